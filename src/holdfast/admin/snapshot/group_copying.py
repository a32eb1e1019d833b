"""The parts of a group's pool copied as one, while its ranks go on training.

Invariants
- The step is one of which there is a dense state and that every writer has committed: the newest such one, so no writer
  has merged a later step home, and each has what going back to it takes (pool.py). As steps go on, it only grows.
- Dense states are looked at before writers are: the one that all have is kept until all have the next.
- A group that is opened anew, or whose shards were dealt out anew, has overtaken the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.snapshot.copying import Fixed, Place, Record, initial_weights, stream
from holdfast.admin.snapshot.form import TableInfo
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import Overtaken
from holdfast.group import manifest as manifests
from holdfast.group.founding import DENSE_DIRECTORY
from holdfast.group.opening import newest_common_step
from holdfast.group.reading import reachable_writers

_TURNS = 100  # in which a dense state is copied whole: it stays for as long as a step, at least


class GroupCopy:
    """See snapshot.copying.LivePool. Raises PoolNotFound where a writer's part cannot be reached from here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.group = manifests.read(directory)
        self.group.check_dense(directory / DENSE_DIRECTORY)
        writers = reachable_writers(directory, self.group)
        for writer in range(len(writers)):
            self.group.check_part(directory, writer)
        self.tables = tuple(TableInfo.of(entry.spec) for entry in self.group.tables)
        self._places = [Place(path) for path in (*writers, directory / DENSE_DIRECTORY)]
        self._parts = [_core.LiveCopy(str(path), part=True) for path in writers]
        self._slots = _core.LiveCopy(str(directory / DENSE_DIRECTORY))  # no rows
        self._dense = _core.Reader(str(directory / DENSE_DIRECTORY))

    @property
    def header(self) -> dict[str, Any]:
        return {**self._parts[0].header, "uuid": bytes.fromhex(self.group.uuid)}

    @property
    def fixes_first(self) -> bool:
        return self._parts[0].fixes_first

    @property
    def rows_ascend(self) -> bool:
        return all(part.rows_ascend for part in self._parts)

    @property
    def newest_dense_step(self) -> int | None:
        """None until all writers have it, too."""
        step = self._slots.newest_dense_step
        if step is None or step > min(part.newest_step() for part in self._parts):
            return None
        return step

    @property
    def home_rows(self) -> list[int] | None:
        found = [part.home_rows for part in self._parts]
        known = [rows for rows in found if rows is not None]
        return [sum(of_parts) for of_parts in zip(*known, strict=True)] if len(known) == len(found) else None

    fixed_record = None

    def log_goes_on_from(self, record: Record) -> bool:
        return False  # there is a log for each writer, and none for all

    def fix(self) -> Fixed:
        for _ in range(_TURNS):
            marks = self._dense.dense_marks()
            steps = [part.newest_step() for part in self._parts]
            mark = newest_common_step([{"rows": [(step, 0, 0) for step in steps], "dense": marks}])
            dense = self._dense.dense_state(last=mark[0])
            if (dense[0] if dense else 0) == mark[0]:
                break
        else:
            raise Overtaken(f"{self._directory / DENSE_DIRECTORY}: written over while it was read")
        for part in self._parts:
            part.fix_at(mark[0])
        return (*mark, dense and dense[1:])

    def settle(self) -> None:
        for part in (*self._parts, self._slots):
            part.settle()
        for place in self._places:
            place.check()
        if manifests.read(self._directory) != self.group:
            raise Overtaken(f"{self._directory}: its shards were dealt out anew")

    def rows(self, number: int) -> Iterator[Rows]:
        streams = self._streams(number, "copy_rows")
        for rows in Merged(streams) if self.rows_ascend else chain.from_iterable(streams):
            if (step := self.newest_dense_step) is not None:
                for part in self._parts:
                    part.raise_floor(step)
            yield rows

    def corrections(self, number: int) -> Iterator[Rows]:
        return iter(Merged(self._streams(number, "corrections")))

    def _streams(self, number: int, of: str) -> list[Iterator[Rows]]:
        entry = self.group.tables[number]
        parts = self._parts
        if entry.table_shards == 1:
            parts = [parts[self.group.owner_of[entry.first_shard]]]
        return [stream(getattr(part, of), number, self.tables[number], entry.end) for part in parts]

    def initial_weights(self, number: int, rows: NDArray[np.uint64]) -> NDArray[np.uint8]:
        return initial_weights(self._parts[0], number, self.tables[number], rows)
