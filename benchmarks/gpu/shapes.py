"""The models that are measured: in full, and small enough to show that everything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from larger.workload import Workload
from peers.shapes import KAGGLE, RM1, Shape

MLPERF = Shape(
    name="mlperf",
    num_tables=26,
    num_embeddings=1_000_000,
    embedding_dim=128,
    lookups_per_bag=1,
    batch_size=8192,
    num_dense=13,
    bottom=(512, 256, 128),
    top=(1024, 1024, 512, 256, 1),
)

NAMES = ("kaggle", "rm1", "mlperf")
LAWS = ("skewed", "uniform")
LEARNING_RATE = 0.01
EPSILON = 1e-8
WINDOW = 4

_STATE_BYTES = 4  # of row-wise Adagrad, a row
_LEAST_ROWS = 20_000
_SHARE_OF_FREE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how much of it is measured.

    shape: with the rows of the kernels' part. pool_rows: of a table in a pool. kernel_batches: different batches that
    take turns in front of a kernel. fill_batches: how many batches at most bring the scratchpad's rows before training
    settles. settling: steps after them that are not timed. steps: timed ones. options: whether bf16, compile and graphs
    are measured.
    """

    shape: Shape
    pool_rows: int
    kernel_batches: int
    fill_batches: int
    settling: int
    steps: int
    options: bool = False

    @property
    def row_bytes(self) -> int:
        """Weights and the state of row-wise Adagrad."""
        return 4 * self.shape.embedding_dim + _STATE_BYTES

    @property
    def table_bytes(self) -> int:
        """Of all tables of the shape as it is."""
        return self.shape.num_tables * self.shape.num_embeddings * self.row_bytes

    def in_pool(self, bytes_free: int) -> Case:
        """With as many rows as pools have, or as fit in so much memory. Raises MemoryError where hardly any do."""
        fitting = int(bytes_free * _SHARE_OF_FREE) // (self.shape.num_tables * self.row_bytes)
        rows = min(self.pool_rows, fitting)
        if rows < min(self.pool_rows, _LEAST_ROWS):
            raise MemoryError(
                f"{self.shape.name}: {bytes_free:,} bytes are free, half of which hold {fitting:,} rows a table; "
                f"{_LEAST_ROWS:,} are the least"
            )
        return replace(self, shape=replace(self.shape, num_embeddings=rows))

    def workload(self, law: str) -> Workload:
        """Where its ids fall. law: one of LAWS; skewed is the industrial trace's."""
        return Workload(name=self.shape.name, shape=self.shape, uniform_share=1.0 if law == "uniform" else 0.0)


# A window of rm1's batches has 400,000 different rows: with tables of 1M rows a hundredth of them would not hold it.
_FULL = {
    "kaggle": Case(shape=KAGGLE, pool_rows=1_000_000, kernel_batches=16, fill_batches=100, settling=60, steps=300),
    "rm1": Case(shape=RM1, pool_rows=8_000_000, kernel_batches=8, fill_batches=100, settling=40, steps=100),
    "mlperf": Case(
        shape=MLPERF, pool_rows=1_000_000, kernel_batches=8, fill_batches=100, settling=40, steps=100, options=True
    ),
}


def make_case(name: str, *, smoke: bool) -> Case:
    """kaggle, rm1 or mlperf. smoke: the same kind of thing, tiny."""
    case = _FULL[name]
    if not smoke:
        return case
    shape = replace(
        case.shape,
        num_tables=3,
        num_embeddings=20_000,
        batch_size=32,
        lookups_per_bag=min(case.shape.lookups_per_bag, 8),
        bottom=(32, case.shape.embedding_dim),
        top=(32, 1),
    )
    return replace(case, shape=shape, pool_rows=20_000, kernel_batches=2, fill_batches=6, settling=2, steps=6)
