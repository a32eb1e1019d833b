"""RM1 to RM4: the paper's layers, tables and lookups. Batch size and rows of a table are not given there."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 192  # the simulator's fit to the paper's bars has 190
ROWS = 200_000  # of a table; the fit has 4 million, of which RM2's 80 tables would take 41 GB
ZIPF = 1.05  # the made-up data's skew
NUM_DENSE = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Layers are without their input; that of the top MLP is what the interaction gives."""

    name: str
    tables: int
    dim: int
    lookups: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def table_bytes(self) -> int:
        return self.tables * ROWS * self.dim * 4


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="rm1", tables=20, dim=32, lookups=80, bottom=(8192, 2048, 32), top=(256, 64, 1)),
        Shape(name="rm2", tables=80, dim=32, lookups=80, bottom=(8192, 2048, 32), top=(512, 128, 1)),
        Shape(name="rm3", tables=20, dim=32, lookups=20, bottom=(10240, 4096, 32), top=(512, 128, 1)),
        Shape(name="rm4", tables=52, dim=16, lookups=1, bottom=(16384, 2048, 512, 16), top=(512, 128, 1)),
    )
}
