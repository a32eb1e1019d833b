"""A group's pool as others than its ranks see it: rows by their own numbers, whichever writer has them.

- `at_rest` recovers all of it to one step and keeps it locked meanwhile, as holdfast.pools.read_only does with one
  writer's.
- `GroupReader` takes no lock and changes nothing; a run may be at work, and rows are as they are at that instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.errors import PoolError, PoolNotFound, PoolReadOnly
from holdfast.group import manifest as manifests
from holdfast.group.founding import DENSE_DIRECTORY, GroupLock
from holdfast.group.manifest import Manifest
from holdfast.group.opening import newest_common_step, open_together
from holdfast.pools.one_rank import OneRank
from holdfast.pools.opening_options import Mark, OpenOptions

_SCRATCHPAD_BYTES = 16 << 20  # of each writer: nothing is trained
_GATHERED_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupRecovery:
    """What recovering a group's pool found. clean: all of it was closed. step: where all of it is now."""

    clean: bool
    step: int


class GroupReader:
    """What digests, exports, inspection and evaluation use of _core.Reader, over all writers of a group's pool.

    Raises PoolNotFound where a writer's part cannot be reached from here, and what _core.Reader raises.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest, self.members = _open_members(directory)
        self.manifest.check_dense(directory / DENSE_DIRECTORY)
        self.dense = _core.Reader(str(directory / DENSE_DIRECTORY))
        self.tables = [entry.spec for entry in self.manifest.tables]
        self._touched: tuple[int, NDArray[np.uint64]] | None = None  # the table that was asked for last

    @property
    def parts(self) -> list[_core.Reader]:
        return [*self.members, self.dense]

    @cached_property
    def header(self) -> dict[str, Any]:
        """The first writer's, but for what is the whole's."""
        levels = {str(part.header["level"]) for part in self.parts}
        return {
            **self.members[0].header,
            "uuid": bytes.fromhex(self.manifest.uuid),
            "level": "power" if levels == {"power"} else "process",
            "num_shards": self.manifest.num_shards,
            "num_writers": self.manifest.num_writers,
        }

    @property
    def medium(self) -> str:
        return self.members[0].medium

    @property
    def epoch(self) -> int:
        return max(part.epoch for part in self.parts)

    @property
    def clean(self) -> bool:
        return all(part.clean for part in self.parts)

    @property
    def commit(self) -> dict[str, Any]:
        """Of the newest step whose rows all writers have."""
        return min((member.commit for member in self.members), key=lambda commit: int(commit["step"]))

    def common_mark(self) -> Mark:
        """Where all of it goes back to when it is opened. Raises Corrupted where there is no such step."""
        return common_mark(self.dense, self.members)

    @property
    def log_bytes_used(self) -> int:
        return sum(member.log_bytes_used for member in self.members)

    @property
    def merged_step(self) -> int | None:
        steps = [member.merged_step for member in self.members]
        return min((step for step in steps if step is not None), default=None)

    def dense_state(self) -> tuple[int, bytes, bytes] | None:
        return self.dense.dense_state()

    # Rows.

    def touched_rows(self, table: int, first: int, count: int) -> list[int]:
        """Ascending, as _core.Reader's. Of a split table all are gathered when its rows are asked for from 0 on: 8
        bytes for each."""
        entry = self.manifest.tables[table]
        if entry.table_shards == 1:
            return self.members[self.manifest.owner_of[entry.first_shard]].touched_rows(table, first, count)
        if self._touched is None or self._touched[0] != table or first == 0:
            self._touched = table, self._gather_touched(table)
        rows = self._touched[1]
        begin = int(np.searchsorted(rows, first))
        found: list[int] = rows[begin : begin + count].tolist()
        return found

    def count_touched(self, table: int) -> int:
        return sum(len(places) for member in self.members for places in _touched_places(member, table))

    def gather_rows(
        self,
        table: int,
        rows: Sequence[int],
        weights: NDArray[np.uint8],
        state: NDArray[np.uint8],
        differs: NDArray[np.uint8],
    ) -> None:
        """As _core.Reader's; rows ascend."""
        numbers = np.asarray(rows, np.int64)
        entry = self.manifest.tables[table]
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= entry.num_embeddings):
            raise ValueError("arrays do not fit the rows")
        if entry.table_shards == 1:
            owner = self.members[self.manifest.owner_of[entry.first_shard]]
            owner.gather_rows(table, numbers.tolist(), weights, state, differs)
            return
        num_rows = len(numbers)
        places, owners = self.manifest.locate(table, numbers)
        by_row = [(array, array.reshape(num_rows, -1)) for array in (weights, state, differs) if num_rows]
        for writer, member in enumerate(self.members):
            mine = np.flatnonzero(owners == writer)
            if mine.size == 0:
                continue
            mine = mine[np.argsort(places[mine])]
            parts = [np.empty((mine.size, view.shape[1]), np.uint8) for _, view in by_row]
            flat = [part.reshape(-1) for part in parts]
            member.gather_rows(table, places[mine].tolist(), flat[0], flat[1], flat[2])
            for (_, view), part in zip(by_row, parts, strict=True):
                view[mine] = part

    def read_rows(
        self, table: int, first: int, count: int, weights: NDArray[np.uint8], state: NDArray[np.uint8]
    ) -> None:
        self.gather_rows(table, range(first, first + count), weights, state, np.empty(count, np.uint8))

    def _gather_touched(self, table: int) -> NDArray[np.uint64]:
        entry = self.manifest.tables[table]
        found = [entry.rows_of_places(places) for member in self.members for places in _touched_places(member, table)]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        rows.sort()
        return rows.view(np.uint64)

    # Evaluation.

    def collection(self, tables: Sequence[int], features: Sequence[tuple[str, int]]) -> GroupCollection:
        return GroupCollection(self, tables, features)

    def evaluate(self, plan: GroupPlan, out: NDArray[np.float32]) -> None:
        """Pools the batch's bags into out [num_bags, output_width]."""
        blocks = []
        for member, part in zip(self.members, plan.parts, strict=True):
            block = np.empty((1, sum(part.output_floats)), np.float32)
            member.evaluate(part, block)
            blocks.append(block[0])
        plan.route.combine(np.concatenate(blocks), out)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A batch's plan: where its ids went, and what each writer makes of those that it got."""

    route: _core.Route
    parts: list[_core.Plan]
    output_width: int

    @property
    def num_bags(self) -> int:
        return self.route.num_bags


class GroupCollection:
    """What EmbeddingBagCollection asks of a _core.Collection, over all writers: the one trainer of them all."""

    def __init__(self, reader: GroupReader, tables: Sequence[int], features: Sequence[tuple[str, int]]) -> None:
        manifest = reader.manifest
        self._router = manifest.router(tables, features)
        self._parts = [member.collection(tables, features) for member in reader.members]

    def plan(
        self,
        ids: NDArray[np.int64],
        offsets: NDArray[Any],
        weights: NDArray[np.float32] | None,
        block_of: Sequence[int],
        num_blocks: int,
        parallel: bool,
        evaluates: bool = True,
    ) -> GroupPlan:
        """As _core.Collection's; evaluates: all of them are."""
        num_bags = (len(offsets) - 1) // num_blocks
        route = self._router.route(ids, offsets, weights, block_of, num_blocks, 0, num_bags)
        ends = np.cumsum(route.message_words)
        parts = []
        for writer, part in enumerate(self._parts):
            message = route.message[ends[writer] - route.message_words[writer] : ends[writer]]
            parts.append(part.plan_routed(route.counts[writer : writer + 1], message, parallel, True))
        return GroupPlan(route, parts, self._router.output_width)


def common_mark(dense: _core.Reader, members: Sequence[_core.Reader]) -> Mark:
    """See `newest_common_step`. Of a run at work it may be an older one: the slots are read first, and the one that
    all have is kept until all have the next."""
    marks = dense.dense_marks()
    rows = [(int(c["step"]), int(c["cursor"]), int(c["row_updates"])) for c in (member.commit for member in members)]
    return newest_common_step([{"rows": rows, "dense": marks}])


def _touched_places(member: _core.Reader, table: int) -> Iterator[NDArray[np.int64]]:
    first = 0
    while places := member.touched_rows(table, first, _GATHERED_ROWS):
        yield np.array(places, np.int64)
        first = places[-1] + 1


def _open_members(directory: Path) -> tuple[Manifest, list[_core.Reader]]:
    """Begins anew where the shards were dealt out anew meanwhile: the parts of before are gone then."""
    manifest = manifests.read(directory)
    while True:
        try:
            return manifest, [_core.Reader(str(path)) for path in reachable_writers(directory, manifest)]
        except PoolError:
            newest = manifests.read(directory)
            if newest == manifest:
                raise
            manifest = newest


def reachable_writers(directory: Path, manifest: Manifest) -> list[Path]:
    """The directories of all writers. Raises PoolNotFound where one cannot be reached from here."""
    writers = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    for path in writers:
        if not path.is_dir():
            raise PoolNotFound(
                f"{path}, a writer's part of the pool, cannot be reached from here: look at the pool where all of its "
                "parts can be, or make the directory reachable"
            )
    return writers


@contextmanager
def at_rest(directory: Path) -> Iterator[tuple[GroupReader, GroupRecovery | None]]:
    """The group's pool, recovered exactly to one step and locked; see holdfast.pools.read_only.at_rest. Raises
    PoolBusy."""
    with ExitStack() as stack:
        try:
            lock = GroupLock(directory)
            stack.callback(lock.release)
            manifest = manifests.read(directory)
            writers = reachable_writers(directory, manifest)
            for writer in range(manifest.num_writers):
                manifest.check_part(directory, writer)
            manifest.check_dense(directory / DENSE_DIRECTORY)
            options = OpenOptions(grow_log=False, scratchpad_bytes=_SCRATCHPAD_BYTES)
            pools, dense, (step, _, _) = open_together(writers, directory / DENSE_DIRECTORY, options, OneRank())
        except PoolReadOnly:
            reader = GroupReader(directory)
            if not reader.clean:
                raise
            yield reader, None
            return
        everything = [*pools, *([] if dense is None else [dense])]
        for pool in everything:
            stack.callback(pool.close)
        clean = all(pool.recovery.clean for pool in everything)
        yield GroupReader(directory), GroupRecovery(clean, step)
