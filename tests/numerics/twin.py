"""A collection in a pool and the slow reference beside it, fed the same batches and compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, Pool, _core
from holdfast.pools.optim import RowOptimizerSpec
from row_reference import Bags, BagWeights, RowGradients, TableReference, storage_dtype


def table(name: str, features: Sequence[str], rows: int = 20, dim: int = 8, **options: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features), **options
    )


def jagged(bags: Bags, weights: BagWeights | None = None, keys: Sequence[str] | None = None) -> JaggedFeatures:
    """Bags as the ragged tensors that forward takes; `keys` is their order (default: as given)."""
    keys = list(bags) if keys is None else list(keys)
    ids = [row for key in keys for bag in bags[key] for row in bag]
    lengths = torch.tensor([len(bag) for key in keys for bag in bags[key]], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    flat = None if weights is None else torch.tensor([w for key in keys for bag in weights[key] for w in bag])
    return JaggedFeatures(keys, torch.tensor(ids, dtype=torch.int64), offsets, flat)


def random_bags(features: Sequence[str], rows: int, samples: int, seed: int, longest: int = 4) -> Bags:
    """Bags of 0 to `longest` ids, repeated ones among them."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=generator).tolist()

    return {feature: [numbers(rows, length) for length in numbers(longest + 1, samples)] for feature in features}


def random_weights(bags: Bags, seed: int) -> BagWeights:
    generator = torch.Generator().manual_seed(seed)
    return {f: [torch.randn(len(bag), generator=generator).tolist() for bag in of] for f, of in bags.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int32), right.contiguous().view(torch.int32)
    )


def read_table(directory: Path, number: int) -> tuple[Tensor, Tensor]:
    """All rows of a pool's table as float32 [rows, dim], and their state [rows, state_floats]."""
    reader = _core.Reader(str(directory))
    spec = reader.tables[number]
    dtype = (torch.float32, torch.float16, torch.bfloat16)[spec.dtype]
    dim = spec.embedding_dim
    state_floats = (0, 1, dim, 2 * dim, dim + 1)[spec.optimizer]
    weights = torch.empty(spec.num_embeddings, dim, dtype=dtype)
    state = torch.empty(spec.num_embeddings, state_floats)
    reader.read_rows(
        number, 0, spec.num_embeddings, weights.view(torch.uint8).flatten(), state.view(torch.uint8).flatten()
    )
    return weights.float(), state


class Twin:
    """Context manager; `step` is one training step on both, `check` compares all rows and their state."""

    def __init__(
        self,
        directory: Path,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizerSpec,
        *,
        seed: int = 7,
        log_bytes: int | None = 1 << 18,
    ) -> None:
        self.pool = Pool(directory, seed=seed, log_bytes=log_bytes)
        self.emb = EmbeddingBagCollection(self.pool, tables, optimizer=optimizer)
        self.tables = [TableReference(config, number, seed, optimizer) for number, config in enumerate(tables)]
        self.num_updates = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()

    def forward(self, bags: Bags, weights: BagWeights | None = None) -> Tensor:
        """The reference's pooled output, features in the collection's order."""
        return torch.cat(
            [
                reference.pool(bags[feature], None if weights is None else weights[feature])
                for reference in self.tables
                for feature in reference.config.feature_names
            ],
            dim=1,
        )

    def gradients(
        self, bags: Bags, grad: Tensor, weights: BagWeights | None = None, into: list[RowGradients] | None = None
    ) -> list[RowGradients]:
        """Per table, each row's gradient summed over its occurrences (on top of `into`)."""
        sums: list[RowGradients] = [{} for _ in self.tables] if into is None else into
        column = 0
        for reference, of_table in zip(self.tables, sums, strict=True):
            dim = reference.config.embedding_dim
            for feature in reference.config.feature_names:
                of_feature = None if weights is None else weights[feature]
                reference.add_gradients(of_table, bags[feature], of_feature, grad[:, column : column + dim])
                column += dim
        return sums

    def update(self, sums: list[RowGradients], *, lr: float | None = None, gradient_scale: float = 1.0) -> None:
        self.num_updates += 1
        for reference, of_table in zip(self.tables, sums, strict=True):
            reference.update(of_table, self.num_updates, lr=lr, gradient_scale=gradient_scale)

    def coefficients(self, samples: int, seed: int) -> Tensor:
        """A gradient for the pooled output: the loss is (output × coefficients).sum()."""
        return torch.randn(samples, self.emb.output_width, generator=torch.Generator().manual_seed(seed))

    def step(self, bags: Bags, seed: int, weights: BagWeights | None = None) -> None:
        samples = len(next(iter(bags.values())))
        coefficients = self.coefficients(samples, seed)
        output = self.emb(jagged(bags, weights)).values()
        assert same_bits(output, self.forward(bags, weights)), "forward"
        (output * coefficients).sum().backward()
        self.emb.optimizer.step()
        self.pool.commit(self.pool.step + 1)
        self.update(self.gradients(bags, coefficients, weights))

    def check(self) -> None:
        for number, reference in enumerate(self.tables):
            weights, state = read_table(self.pool.directory, number)
            wrong = (weights.view(torch.int32) != reference.weights.view(torch.int32)).any(1).nonzero().flatten()
            assert wrong.numel() == 0, f"weights of rows {wrong.tolist()} of table {number}"
            wrong = (state.view(torch.int32) != reference.state.view(torch.int32)).any(1).nonzero().flatten()
            assert wrong.numel() == 0, f"state of rows {wrong.tolist()} of table {number}"


__all__ = ["Twin", "jagged", "random_bags", "random_weights", "read_table", "same_bits", "storage_dtype", "table"]
