"""Row updates in slots: Triton's kernel and its twin to the bit; and whole steps against the core's, through a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import SGD, Adagrad, Adam, EmbeddingBagCollection, Pool, RowWiseAdagrad, RowWiseAdam
from holdfast.device import kernels
from holdfast.device.kernels.rounding import random_bits
from kernel_cases import (
    DEVICE,
    DIMS,
    DTYPES,
    EITHER,
    generator,
    huge,
    in_torch,
    in_triton,
    needs_triton,
    normals,
    numbers,
    same_bits,
    starts_of,
)
from row_reference import STOCHASTIC_ROUNDING, Bags, BagWeights, element_bits, key_of
from twin import jagged, random_bags, random_weights, read_table, table

OPTIMIZERS = [SGD, RowWiseAdagrad, Adagrad, Adam, RowWiseAdam]


def state_floats(kind: int, dim: int) -> int:
    return (0, 1, dim, 2 * dim, dim + 1)[kind]


class Rows:
    """Rows in slots, and one update of some of them; `updated` returns all that it writes."""

    def __init__(self, kind: int, dim: int, dtype: torch.dtype, num_rows: int, seed: int, num_slots: int = 60) -> None:
        self.kind, self.dim, self.num_rows = kind, dim, num_rows
        self.weights = normals(num_slots, dim, seed=seed, dtype=dtype)
        width = state_floats(kind, dim)
        self.state = normals(num_slots, width, seed=seed + 1).abs() if width else None
        self.slots = torch.randperm(num_slots, generator=generator(seed))[:num_rows].to(torch.int32).to(DEVICE)
        self.sums = normals(num_rows, dim, seed=seed + 2)
        self.rounding = (
            seed,
            numbers(3, num_rows, seed + 3),
            torch.randint(0, 1 << 45, (num_rows,), generator=generator(seed + 4)).to(DEVICE),
        )

    def updated(
        self, *, step: int = 3, scale: float = 0.5, weight_decay: float = 0.0, in_place: bool = False
    ) -> tuple[Tensor | None, ...]:
        weights, state = self.weights, self.state
        if not in_place:
            weights, state = weights.clone(), None if state is None else state.clone()
        fresh_weights = weights.new_zeros(self.num_rows, self.dim)
        fresh_state = None if state is None else state.new_zeros(self.num_rows, state.shape[1])
        kernels.update_rows(
            self.kind,
            weights,
            state,
            self.slots,
            self.sums,
            hyperparameters=kernels.Hyperparameters(
                learning_rate=0.07, step=step, epsilon=1e-8, beta1=0.9, beta2=0.999, weight_decay=weight_decay
            ),
            gradient_scale=torch.tensor(scale, device=DEVICE),
            rounding=self.rounding,
            fresh_weights=fresh_weights,
            fresh_state=fresh_state,
        )
        return weights, state, fresh_weights, fresh_state


@needs_triton
@given(
    kind=st.integers(0, 4),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.sampled_from([0, 1, 3, 19]),
    step=st.sampled_from([1, 16, 12345, 1 << 40]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1 << 20),
)
@settings(derandomize=True, database=None, max_examples=100)
def test_kernel_and_twin_update_alike(kind, dim, dtype, num_rows, step, weight_decay, seed):
    rows = Rows(kind, dim, dtype, num_rows, seed)

    def update() -> tuple[Tensor | None, ...]:
        return rows.updated(step=step, weight_decay=weight_decay)

    weights, state, fresh_weights, fresh_state = in_triton(update)
    assert same_bits((weights, state, fresh_weights, fresh_state), in_torch(update))
    assert same_bits(weights[rows.slots.long()], fresh_weights), "what goes home is what is in the slots"
    assert state is None or same_bits(state[rows.slots.long()], fresh_state)
    others = torch.ones(60, dtype=torch.bool, device=DEVICE)
    others[rows.slots.long()] = False
    assert same_bits(weights[others], rows.weights[others]), "other slots are left"


@EITHER
@pytest.mark.parametrize("kind", range(5))
def test_no_bit_depends_on_slots_or_on_other_rows(run, kind: int):
    rows = Rows(kind, 24, torch.bfloat16, 13, seed=kind)
    _, _, together, states = run(rows.updated)
    alone = Rows(kind, 24, torch.bfloat16, 1, seed=kind, num_slots=5)
    for row in range(13):
        slot, there = int(rows.slots[row]), int(alone.slots[0])
        alone.weights[there] = rows.weights[slot]
        if alone.state is not None:
            alone.state[there] = rows.state[slot]
        alone.sums = rows.sums[row : row + 1]
        seed, tables, own_rows = rows.rounding
        alone.rounding = (seed, tables[row : row + 1].clone(), own_rows[row : row + 1].clone())
        _, _, weights, state = run(alone.updated)
        assert same_bits(weights[0], together[row]), f"weights of row {row}"
        assert state is None or same_bits(state[0], states[row]), f"state of row {row}"


@EITHER
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_that_16_bits_hold_badly(run, dtype: torch.dtype):
    largest, infinity, nan = torch.finfo(dtype).max, float("inf"), float("nan")
    sums = [infinity, -infinity, nan, 1e36, -1e36, 65520.0, 1e-41, -6e-8, 2.0**-14, 2.0**-25, 1e-30, 0.0]
    rows = Rows(0, len(sums), dtype, 1, seed=11)
    rows.weights.zero_()
    rows.weights[:, 3], rows.weights[:, 4] = -largest, largest
    rows.sums = torch.tensor([sums], device=DEVICE) / 0.5 / 0.07
    _, _, fresh, _ = run(lambda: rows.updated(scale=0.5))
    new = fresh[0].float().tolist()
    assert new[:2] == [-infinity, infinity] and np.isnan(new[2])
    assert new[3:5] == [-largest, largest], "what is finite stays finite"
    assert all(np.isfinite(new[5:]))
    assert same_bits(fresh[0, 3:], in_torch(lambda: rows.updated(scale=0.5))[2][0, 3:])


def test_random_bits_are_the_cores():
    tables = torch.tensor([0, 3, 1 << 20], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([5, 1 << 40, 0], device=DEVICE)
    for seed in (0, 7, (1 << 64) - 1):
        found = random_bits((seed, tables, rows), 12, 40).cpu().numpy()
        for i, (number, row) in enumerate(zip(tables.tolist(), rows.tolist(), strict=True)):
            assert (found[i] == element_bits(key_of(STOCHASTIC_ROUNDING, seed, number, 12, row), 40)).all()


@needs_triton
def test_rows_beyond_two_to_the_31_elements(pool_root: Path):
    num_slots = (1 << 24) + 60
    rows = Rows(2, 128, torch.float16, 7, seed=12)
    far_weights = huge(pool_root / "weights", num_slots, 128, torch.float16)
    far_state = huge(pool_root / "state", num_slots, 128, torch.float32)
    far_weights[-60:], far_state[-60:] = rows.weights, rows.state
    expected = in_torch(rows.updated)
    rows.slots += num_slots - 60
    rows.weights, rows.state = far_weights, far_state
    weights, state, fresh_weights, fresh_state = in_triton(lambda: rows.updated(in_place=True))
    assert same_bits((weights[-60:].clone(), state[-60:].clone(), fresh_weights, fresh_state), expected)


class Group:
    """The tables of a collection, all alike, in slots; and what a batch's plan says of it."""

    def __init__(self, pool: Pool, features: Sequence[Sequence[str]], dim: int, dtype: torch.dtype, kind: int) -> None:
        self.features, self.dim, self.kind = features, dim, kind
        found = [read_table(pool.directory, number) for number in range(len(features))]
        self.num_rows = [weights.shape[0] for weights, _ in found]
        count = sum(self.num_rows)
        self.slot_of = torch.randperm(count + 9)[:count].split(self.num_rows)
        self.weights = torch.zeros(count + 9, dim, dtype=dtype, device=DEVICE)
        self.state = torch.zeros(count + 9, state_floats(kind, dim), device=DEVICE) if kind else None
        for slots, (weights, state) in zip(self.slot_of, found, strict=True):
            self.weights[slots] = weights.to(dtype).to(DEVICE)
            if self.state is not None:
                self.state[slots] = state.to(DEVICE)

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        slots = self.slot_of[number]
        state = torch.empty(len(slots), 0) if self.state is None else self.state[slots].cpu()
        return self.weights[slots].float().cpu(), state

    def lookup(self, bags: Bags, weights: BagWeights | None, *, mean: bool) -> Tensor:
        order = [(t, feature) for t, features in enumerate(self.features) for feature in features]
        self.bag_lengths = [len(bag) for _, feature in order for bag in bags[feature]]
        self.lookup_slot = _int32(int(self.slot_of[t][row]) for t, f in order for bag in bags[f] for row in bag)
        self.columns = _int32(place * self.dim for place in range(len(order)))
        given = None if weights is None else [w for _, f in order for bag in weights[f] for w in bag]
        self.scale = None if given is None else torch.tensor(given, dtype=torch.float32, device=DEVICE)
        self.mean = mean
        out = torch.empty(len(bags[order[0][1]]), len(order) * self.dim, device=DEVICE)
        kernels.pooled_lookup(
            self.weights, self.lookup_slot, starts_of(self.bag_lengths), self.columns, out, scale=self.scale, mean=mean
        )
        return out

    def scale_gradients(self, grad: Tensor) -> Tensor:
        return kernels.scale_gradients(
            self.weights, self.lookup_slot, starts_of(self.bag_lengths), self.columns, grad, mean=self.mean
        )

    def update(
        self, bags: Bags, weights: BagWeights | None, grad: Tensor, seed: int, given: kernels.Hyperparameters
    ) -> None:
        width = grad.shape[1]
        occurrences: dict[tuple[int, int], list[tuple[int, float]]] = {}
        column = 0
        for t, features in enumerate(self.features):
            for feature in features:
                for sample, bag in enumerate(bags[feature]):
                    factor = np.float32(1) / np.float32(len(bag) or 1) if self.mean else np.float32(1)
                    for j, row in enumerate(bag):
                        scale = factor if weights is None else np.float32(weights[feature][sample][j]) * factor
                        occurrences.setdefault((t, row), []).append((sample * width + column, float(scale)))
                column += self.dim
        unique = sorted(occurrences)
        flat = [occurrence for row in unique for occurrence in occurrences[row]]
        counts = [len(occurrences[row]) for row in unique]
        sums = kernels.segment_sum(
            grad,
            starts_of(counts),
            _int32(offset for offset, _ in flat),
            self.dim,
            scale=torch.tensor([scale for _, scale in flat], device=DEVICE) if self.mean or weights else None,
            max_occurrences=max(counts, default=0),
        )
        slots = _int32(int(self.slot_of[t][row]) for t, row in unique)
        kernels.update_rows(
            self.kind,
            self.weights,
            self.state,
            slots,
            sums,
            hyperparameters=given,
            gradient_scale=torch.ones((), device=DEVICE),
            rounding=(seed, _int32(t for t, _ in unique), torch.tensor([row for _, row in unique], device=DEVICE)),
            fresh_weights=self.weights.new_empty(len(unique), self.dim),
            fresh_state=None if self.state is None else self.state.new_empty(len(unique), self.state.shape[1]),
        )


def _int32(values) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", range(5))
def test_steps_in_slots_are_the_cores_steps(pool_root: Path, kind: int, dtype: str):
    mean, weighted, dim, seed = kind % 2 == 0, kind % 3 != 1, (12, 16, 33, 5, 40)[kind], 7
    spec = OPTIMIZERS[kind](lr=0.1, weight_decay=0.0 if kind == 1 else 0.02)
    features = [["a", "b"], ["c"]]
    tables = [
        table(f"t{t}", of_table, rows=12, dim=dim, data_type=dtype, pooling="mean" if mean else "sum")
        for t, of_table in enumerate(features)
    ]
    with Pool(pool_root / "pool", seed=seed, log_bytes=1 << 18) as pool:
        emb = EmbeddingBagCollection(pool, tables, optimizer=spec)
        group = Group(pool, features, dim, dict(zip(("fp32", "fp16", "bf16"), DTYPES, strict=True))[dtype], kind)
        for step in range(1, 4):
            bags = random_bags("abc", 12, 6, seed=step)
            weights = random_weights(bags, seed=step) if weighted else None
            given = jagged(bags, weights)
            if weighted:
                given.weights_or_none().requires_grad_()
            out = emb(given).values()
            found = group.lookup(bags, weights, mean=mean)
            assert same_bits(found.cpu(), out.detach()), f"lookup of step {step}"
            grad = torch.randn(out.shape, generator=generator(step))
            (out * grad).sum().backward()
            emb.optimizer.step()
            pool.commit(step)
            there = grad.to(DEVICE)
            if weighted:
                of_weights = group.scale_gradients(there)
                assert same_bits(of_weights.cpu(), given.weights_or_none().grad), f"weight gradients of step {step}"
            numbers_of_step = kernels.Hyperparameters(
                learning_rate=spec.lr,
                step=step,
                epsilon=getattr(spec, "eps", 0.0),
                beta1=getattr(spec, "betas", (0.0, 0.0))[0],
                beta2=getattr(spec, "betas", (0.0, 0.0))[1],
                weight_decay=spec.weight_decay,
            )
            group.update(bags, weights, there, seed, numbers_of_step)
            for number in range(2):
                expected = read_table(pool.directory, number)
                for what, ours, cores in zip(("weights", "state"), group.rows(number), expected, strict=True):
                    assert same_bits(ours, cores), f"{what} of table {number} after step {step}"
