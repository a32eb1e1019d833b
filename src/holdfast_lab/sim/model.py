"""Models: what a batch asks for.

How many different rows a batch has, and how many of them the batch before had, follow from the skew: Zipf's law, as the
made-up data has it, or what falls on the hottest rows of real ids. With n draws of a table's rows, a row of probability
p is in a batch with probability 1 - (1 - p)^n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

Precision = Literal["fp32", "tf32", "half"]
Sharding = Literal["table", "row"]
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "tf32": 4, "half": 2}

_HEAD_RANKS = 256
_RANKS_PER_OCTAVE = 16  # of the ranks beyond, which stand for their neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """`count` tables alike. lookups: ids of a table and sample. hottest: instead of Zipf's law, pairs (k, the part of
    accesses that falls on the k hottest rows), ascending; the last is of all rows, and rows between two are alike."""

    count: int = 1
    rows: float
    dim: int
    lookups: float = 1.0
    hottest: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("count", "rows", "dim", "lookups"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be more than 0, and finite")
        rungs = [(0.0, 0.0), *self.hottest]
        if self.hottest and self.hottest[-1] != (self.rows, 1.0):
            raise ValueError(f"hottest = {list(self.hottest)}; its last pair must be [{self.rows:g}, 1.0]")
        if any(rows <= before or share < below for (before, below), (rows, share) in pairwise(rungs)):
            raise ValueError(f"hottest = {list(self.hottest)}; rows and parts must ascend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A DLRM and its batches. bottom, top: sizes of the MLPs' layers without their input. weight_bytes, state_bytes: of
    a row's elements, and of its optimizer state in all; parameter_bytes: what a checkpoint keeps of each parameter of
    the MLPs. precision: of the MLPs' products; in "half" (fp16 or bf16) vectors of fp32 are cast for them.
    top_input: where it is not what the interaction gives."""

    batch_size: float
    tables: tuple[TableGroup, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    num_dense: int = 13
    zipf_exponent: float = 1.05
    interaction: Literal["dot", "concat"] = "dot"
    precision: Precision = "fp32"
    weight_bytes: float = 4.0
    state_bytes: float = 0.0
    parameter_bytes: float = 4.0
    source: str = ""

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("tables is empty; a model has at least one")
        if not self.bottom or not self.top:
            raise ValueError("bottom and top need one layer at least")
        if not self.batch_size > 0:
            raise ValueError(f"batch_size = {self.batch_size}; it must be more than 0")

    @property
    def num_tables(self) -> int:
        return sum(group.count for group in self.tables)

    @property
    def bottom_parameters(self) -> int:
        return _parameters([self.num_dense, *self.bottom])

    @property
    def top_parameters(self) -> int:
        return _parameters([self.top_input, *self.top])

    @property
    def top_input(self) -> int:
        vectors = self.num_tables + 1
        if self.interaction == "dot":
            return self.bottom[-1] + vectors * (vectors - 1) // 2
        return self.bottom[-1] + sum(group.count * group.dim for group in self.tables)

    def touched(self) -> Sequence[Touched]:
        """Of a table of each group, by the law of its ids."""
        return [
            _touched_by_law(group.rows, self.zipf_exponent, self.batch_size * group.lookups, group.hottest)
            for group in self.tables
        ]


@dataclass(frozen=True, slots=True)
class Touched:
    """What a batch touches of one table, in means: different rows, those of them that the batch before had, and the
    accesses to these."""

    unique: float
    repeated_rows: float
    repeated_accesses: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch in means, over all tables. accesses: ids; unique_rows: different rows; repeated_accesses,
    repeated_rows: of each, those of rows that the batch before had. row_bytes: of weights and state, the mean over
    accesses; tables_row_bytes: of one row of each table. pooled_bytes: what lookups give, and gradients are. Flops: of
    the forward pass. bottom_layers, top_layers: sizes with their input. gpus: that share it; skew: rows and vectors of
    the GPU with the most, over the mean; partial_vectors: how many of them a pooled vector is summed from."""

    batch_size: float
    num_tables: int
    table_bytes: float
    tables_row_bytes: float
    accesses: float
    unique_rows: float
    repeated_accesses: float
    repeated_rows: float
    row_bytes: float
    pooled_bytes: float
    bottom_flops: float
    top_flops: float
    interaction_flops: float
    network_bytes: float
    index_bytes: float
    bottom_layers: tuple[int, ...]
    top_layers: tuple[int, ...]
    precision: Precision
    gpus: int = 1
    skew: float = 1.0
    partial_vectors: float = 1.0

    @property
    def overlap(self) -> float:
        """The part of accesses whose rows the batch before had."""
        return self.repeated_accesses / self.accesses


def workload_of(model: Model) -> Workload:
    accesses = unique = repeated_accesses = repeated_rows = row_bytes = table_bytes = tables_row_bytes = pooled = 0.0
    for group, of_table in zip(model.tables, model.touched(), strict=True):
        draws = model.batch_size * group.lookups
        group_row_bytes = group.dim * model.weight_bytes + model.state_bytes
        accesses += group.count * draws
        unique += group.count * of_table.unique
        repeated_rows += group.count * of_table.repeated_rows
        repeated_accesses += group.count * of_table.repeated_accesses
        row_bytes += group.count * draws * group_row_bytes
        tables_row_bytes += group.count * group_row_bytes
        table_bytes += group.count * group.rows * group_row_bytes
        pooled += group.count * group.dim * 4 * model.batch_size
    vectors = model.num_tables + 1
    dim = model.bottom[-1]
    return Workload(
        batch_size=model.batch_size,
        num_tables=model.num_tables,
        table_bytes=table_bytes,
        tables_row_bytes=tables_row_bytes,
        accesses=accesses,
        unique_rows=unique,
        repeated_accesses=repeated_accesses,
        repeated_rows=repeated_rows,
        row_bytes=row_bytes / accesses,
        pooled_bytes=pooled,
        bottom_flops=2 * model.batch_size * model.bottom_parameters,
        top_flops=2 * model.batch_size * model.top_parameters,
        interaction_flops=2 * model.batch_size * vectors**2 * dim if model.interaction == "dot" else 0.0,
        network_bytes=(model.bottom_parameters + model.top_parameters) * model.parameter_bytes,
        index_bytes=8 * accesses,
        bottom_layers=(model.num_dense, *model.bottom),
        top_layers=(model.top_input, *model.top),
        precision=model.precision,
    )


@lru_cache(maxsize=4096)
def _touched_by_law(
    rows: float, exponent: float, draws: float, hottest: tuple[tuple[float, float], ...] = ()
) -> Touched:
    """By so many draws, with as many before them."""
    if hottest:
        ends, shares = np.array([(0.0, 0.0), *hottest]).T
        counts = np.diff(ends)
        probabilities = np.diff(shares) / counts
    else:
        ranks, counts = _ranks(rows)
        masses = ranks**-exponent
        probabilities = masses / np.sum(masses * counts)
    there = -np.expm1(draws * np.log1p(-np.minimum(probabilities, 1 - 1e-12)))
    return Touched(
        unique=float(np.sum(there * counts)),
        repeated_rows=float(np.sum(there**2 * counts)),
        repeated_accesses=float(np.sum(draws * probabilities * there * counts)),
    )


def _ranks(rows: float) -> tuple[np.ndarray, np.ndarray]:
    """Ranks that stand for all of 1 to `rows`, and how many each stands for."""
    head = np.arange(1, math.ceil(min(rows, _HEAD_RANKS)) + 1, dtype=np.float64)
    if rows <= _HEAD_RANKS:
        return head, np.minimum(1.0, rows - head + 1)
    octaves = np.log2((rows + 0.5) / (_HEAD_RANKS + 0.5))
    bounds = (_HEAD_RANKS + 0.5) * 2 ** np.linspace(0, octaves, int(np.ceil(octaves * _RANKS_PER_OCTAVE)) + 1)
    middles = np.sqrt(bounds[1:] * bounds[:-1])
    return np.concatenate([head, middles]), np.concatenate([np.ones_like(head), np.diff(bounds)])


def _parameters(sizes: Sequence[int]) -> int:
    """Weights and biases."""
    return sum((before + 1) * after for before, after in pairwise(sizes))
