"""The slow reference: what a training step does to rows, one float32 operation of torch after another.

It follows the order of operations that core/kernels/*.h document, row by row and occurrence by occurrence; nothing of
holdfast is called. Values that 16-bit rows hold are kept as the float32 that they widen to.

Shapes: a row is [dim]; bags are {feature: one list of ids per sample}, weights the same with numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast import SGD, Adagrad, Adam, EmbeddingBagConfig, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.optim import RowOptimizerSpec

Bags = Mapping[str, Sequence[Sequence[int]]]
BagWeights = Mapping[str, Sequence[Sequence[float]]]
RowGradients = dict[int, Tensor]

LANES = 16
INITIAL_VALUES = int.from_bytes(b"initial\0", "big")
STOCHASTIC_ROUNDING = int.from_bytes(b"rounding", "big")


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


# Counter-based random bits: core/base/counter_rng.h.


def _mix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def key_of(purpose: int, *values: int) -> int:
    key = purpose
    for value in values:
        key = _mix64(((key + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)) ^ value)
    return key


def element_bits(key: int, num_elements: int) -> np.ndarray:
    x = np.arange(num_elements, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = x ^ np.uint32(key >> 32)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def initial_row(config: EmbeddingBagConfig, table: int, seed: int, row: int) -> Tensor:
    """low + (high - low) × 24 random bits × 2^-24; 16-bit rows then round to the nearest."""
    bound = 1.0 / math.sqrt(config.num_embeddings)
    low = f32(-bound if config.weight_init_min is None else config.weight_init_min)
    high = f32(bound if config.weight_init_max is None else config.weight_init_max)
    bits = element_bits(key_of(INITIAL_VALUES, seed, table, row), config.embedding_dim) >> np.uint32(8)
    uniform = torch.from_numpy(bits.astype(np.float32)) * f32(2.0**-24)
    value = low + (high - low) * uniform
    value = torch.minimum(value, torch.nextafter(high, f32(-math.inf)) if low < high else low)
    return value.to(storage_dtype(config)).float()


def storage_dtype(config: EmbeddingBagConfig) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.data_type]


def round_stochastically(values: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """Finite float32 values as 16-bit ones, widened again: random bits below the last kept one, then a cut."""
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    random = element_bits(key, values.numel()).astype(np.uint64)
    absolute = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        magnitude = (absolute + (random & 0xFFFF)) >> np.uint64(16)
        magnitude = np.minimum(magnitude, 0x7F7F)
    else:
        exponent, fraction = absolute >> np.uint64(23), absolute & 0x7FFFFF
        significand = np.where(exponent != 0, fraction | 0x800000, fraction)
        below = np.where(exponent < 113, 113 - exponent.astype(np.int64), 0).astype(np.uint64)
        cut = np.where(below > 18, 31, below + 13).astype(np.uint64)
        kept = significand >> np.where(below > 18, np.minimum(below.astype(np.int64) - 18, 31), 0).astype(np.uint64)
        normal = np.where(exponent > 113, (exponent - np.minimum(exponent, 113)) << np.uint64(10), 0).astype(np.uint64)
        magnitude = normal + ((kept + (random & ((np.uint64(1) << cut) - np.uint64(1)))) >> cut)
        magnitude = np.minimum(magnitude, 0x7BFF)
    halves = (magnitude | (bits >> np.uint64(16) & 0x8000)).astype(np.uint16)
    return torch.from_numpy(halves.view(np.int16)).view(dtype).float()


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded, as IEEE 754 has it: torch.sqrt of float32 is MKL's, which may be one bit off."""
    return torch.sqrt(x.double()).float()


def fold(lanes: list[Tensor]) -> Tensor:
    """The fixed tree: lane i + lane (i + 8), of those i + (i + 4), i + (i + 2), i + (i + 1)."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def lane_sums(products: Tensor) -> list[Tensor]:
    """Sixteen sums of a row's elements: lane i takes elements i, i + 16, i + 32 …, absent ones counting as 0."""
    lanes = [torch.zeros(()) for _ in range(LANES)]
    padded = torch.cat([products, torch.zeros(-products.numel() % LANES)])
    for element, value in enumerate(padded):
        lanes[element % LANES] = lanes[element % LANES] + value
    return lanes


def mean_square(g: Tensor) -> Tensor:
    return fold(lane_sums(g * g)) / f32(g.numel())


def power_of(base: float, exponent: int) -> float:
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        base *= base
        exponent >>= 1
    return power


@dataclass
class TableReference:
    """One table: every row's value and optimizer state as float32, and the hyperparameters of its optimizer. keys: of
    the rows, where ids are keys."""

    config: EmbeddingBagConfig
    number: int
    seed: int
    optimizer: RowOptimizerSpec
    keys: Sequence[int] | None = None
    weights: Tensor = field(init=False)
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weights = torch.stack([self.initial(row) for row in range(self.config.num_embeddings)])
        dim = self.config.embedding_dim
        width = {SGD: 0, RowWiseAdagrad: 1, Adagrad: dim, Adam: 2 * dim, RowWiseAdam: dim + 1}[type(self.optimizer)]
        self.state = torch.zeros(self.config.num_embeddings, width)

    def initial(self, row: int) -> Tensor:
        return initial_row(self.config, self.number, self.seed, self.counted_as(row))

    def counted_as(self, row: int) -> int:
        """The 64 bits by which its random numbers go."""
        return row if self.keys is None else self.keys[row] & ((1 << 64) - 1)

    def bag_factor(self, length: int) -> Tensor:
        """What a mean multiplies its sum with."""
        return f32(1.0) / f32(length) if self.config.pooling == "mean" and length else f32(1.0)

    def pool(self, bags: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None) -> Tensor:
        pooled = []
        for sample, bag in enumerate(bags):
            total = torch.zeros(self.config.embedding_dim)
            for j, row in enumerate(bag):
                value = self.weights[row]
                total = total + (value if weights is None else f32(weights[sample][j]) * value)
            pooled.append(self.bag_factor(len(bag)) * total if self.config.pooling == "mean" else total)
        return torch.stack(pooled)

    def add_gradients(
        self,
        sums: RowGradients,
        bags: Sequence[Sequence[int]],
        weights: Sequence[Sequence[float]] | None,
        grad: Tensor,
    ) -> None:
        """Adds one feature's gradients to its rows', occurrence after occurrence."""
        for sample, bag in enumerate(bags):
            factor = self.bag_factor(len(bag))
            for j, row in enumerate(bag):
                scale = factor if weights is None else f32(weights[sample][j]) * factor
                sums[row] = sums.get(row, torch.zeros(self.config.embedding_dim)) + scale * grad[sample]

    def update(self, sums: RowGradients, step: int, *, lr: float | None = None, gradient_scale: float = 1.0) -> None:
        """One step of the optimizer on the rows of `sums`; `step` counts updates from 1."""
        spec = self.optimizer
        learning_rate = f32(spec.lr if lr is None else lr)
        for row, total in sums.items():
            w, state = self.weights[row], self.state[row]
            g = f32(gradient_scale) * total if gradient_scale != 1.0 else total
            if spec.weight_decay != 0 and isinstance(spec, SGD | RowWiseAdagrad | Adagrad):
                g = g + f32(spec.weight_decay) * w
            new = self._updated(w, state, g, learning_rate, step)
            if self.config.data_type != "fp32":
                key = key_of(STOCHASTIC_ROUNDING, self.seed, self.number, step, self.counted_as(row))
                new = round_stochastically(new, storage_dtype(self.config), key)
            self.weights[row] = new

    def _updated(self, w: Tensor, state: Tensor, g: Tensor, lr: Tensor, step: int) -> Tensor:
        spec, dim = self.optimizer, self.config.embedding_dim
        if isinstance(spec, SGD):
            return w - lr * g
        if isinstance(spec, RowWiseAdagrad):
            state[0] = state[0] + mean_square(g)
            return w - (lr / (square_root(state[0]) + f32(spec.eps))) * g
        if isinstance(spec, Adagrad):
            state[:] = state + g * g
            return w - (lr * g) / (square_root(state) + f32(spec.eps))
        assert isinstance(spec, Adam | RowWiseAdam)
        beta1, beta2 = f32(spec.betas[0]), f32(spec.betas[1])
        correction1 = f32(1.0 - power_of(float(beta1), step))
        correction2 = f32(1.0 - power_of(float(beta2), step))
        square = g * g if isinstance(spec, Adam) else mean_square(g)
        state[:dim] = beta1 * state[:dim] + (f32(1.0) - beta1) * g
        state[dim:] = beta2 * state[dim:] + (f32(1.0) - beta2) * square
        direction = (state[:dim] / correction1) / (square_root(state[dim:] / correction2) + f32(spec.eps))
        if spec.weight_decay != 0:
            direction = direction + f32(spec.weight_decay) * w
        return w - lr * direction
