"""How a table's accesses gather on its hottest rows: a ladder of rungs, each the hottest k rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The hottest `rows` rows of a table together.

    access_share: their part of the table's accesses, 0 to 1. unique_rows_per_batch: how many of them a batch touches,
    on average. Raises ValueError that names the field.
    """

    rows: int
    access_share: float
    unique_rows_per_batch: float

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}; it must be at least 1")
        for field, most in (("access_share", 1), ("unique_rows_per_batch", self.rows)):
            if not 0.0 <= getattr(self, field) <= most:
                raise ValueError(f"{field} = {getattr(self, field)}; it must lie between 0 and {most}")


def check_ladder(ladder: Sequence[Rung], num_rows: int) -> None:
    """ValueError unless the rungs rise in every field and the last one holds the whole table."""
    if not ladder or ladder[-1].rows != num_rows:
        raise ValueError(f"ladder: its last rung must hold all {num_rows} rows")
    for below, rung in pairwise(ladder):
        if (
            rung.rows <= below.rows
            or rung.access_share < below.access_share
            or rung.unique_rows_per_batch < below.unique_rows_per_batch
        ):
            raise ValueError(f"ladder: the rung of {rung.rows} rows does not rise above that of {below.rows}")
