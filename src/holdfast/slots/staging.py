"""Batches on their way to slots, ahead of their steps: what the host has to do for them is done by the pool's thread.

    announce → slots → what the kernels need packed, missing rows read from the pool    in the pool's thread
    bring: copied over, and into their slots                                            told to the device by its user

Invariants
- Batches get their slots in the order in which they were announced, and are brought in this order: where one finds a
  row in its slot that an earlier one brings, the device gets it before.
- A row without a slot is read from the pool at a moment when no unretired step has updated it, because each of those
  holds its slot until it is retired, and what retires it is done in this thread, too.
- Of a batch that failed no row comes; who relies on one of them fails with it.
- What the thread has made of a batch is there as a whole (`Coming.parts`), or not at all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast import _core
from holdfast.device.queues import host_empty
from holdfast.errors import WindowTooLarge
from holdfast.rows.row_access import PlannedFeatures
from holdfast.slots.home_mapping import HomeMapping
from holdfast.slots.slot_batch import SlotBatch, bytes_of, floats_of
from holdfast.slots.slot_group import SlotGroup
from holdfast.slots.slot_pool import SlotPool

_FETCHED_FIRST = 2  # batches that a pool on a disk fetches rows of, before they are wanted in slots


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What a batch needs of one group, in the host's memory. packed, places: see _core.Admission.pack. weights, state:
    of the missing rows; without either where there is none, or the device reads them itself."""

    admission: _core.Admission
    packed: Tensor
    places: dict[str, tuple[int, int]]
    weights: Tensor | None
    state: Tensor | None


@dataclass(slots=True, eq=False)
class Coming:
    """A batch that was announced. parts: once it has slots, until the device was told of it. batch: from then on.
    error: instead of either."""

    planned: PlannedFeatures
    parts: list[StagedPart] = field(default_factory=list)
    batch: SlotBatch | None = None
    error: BaseException | None = None
    staging: Future[None] | None = None  # when it has had its first turn

    @property
    def is_staged(self) -> bool:
        return bool(self.parts) or self.batch is not None or self.error is not None


class Staging:
    """The batches of one collection. num_bytes: of the device's memory for its rows. bring: tells the device of a
    batch that is staged."""

    def __init__(
        self,
        pool: SlotPool,
        groups: Sequence[SlotGroup],
        mapping: HomeMapping | None,
        device: torch.device,
        num_bytes: int,
        bring: Callable[[Coming], SlotBatch],
    ) -> None:
        self._pool = pool
        self._behind = pool.write_behind()
        self._groups = groups
        self._mapping = mapping
        self._device = device
        self._num_bytes = num_bytes
        self._bring = bring
        self._coming: dict[int, Coming] = {}  # by id of the plan, in order
        # The thread's; the numbers are read by others, too.
        self._waiting: deque[Coming] = deque()  # for slots
        self.rows_hit = self.rows_missed = self.num_delayed = 0

    def announce(self, planned: PlannedFeatures) -> Coming:
        coming = self._coming[id(planned.plan)] = Coming(planned)
        coming.staging = self._behind.ask(lambda: self._take_turn(coming))
        self.bring_staged()
        return coming

    def bring_staged(self) -> None:
        """Tells the device of the batches that are staged by now."""
        for coming in self._coming.values():
            if not coming.is_staged:
                return
            if coming.batch is None and coming.error is None:
                try:
                    coming.batch = self._bring(coming)
                    coming.parts = []  # page-locked memory; its copies are on their way
                except BaseException as error:
                    self._give_up(error)
                    if not isinstance(error, Exception):
                        raise
                    return

    def take(self, planned: PlannedFeatures) -> SlotBatch | None:
        """The batch, of which the device was told; None where there is no room before an issued step is retired."""
        coming = self._coming.get(id(planned.plan))
        if coming is None:
            coming = self.announce(planned)
        assert coming.staging is not None
        coming.staging.result()
        if not coming.is_staged:
            self._behind.ask(lambda: self._admit_waiting(until=coming)).result()
            if not coming.is_staged:
                return None
        self.bring_staged()
        del self._coming[id(planned.plan)]
        if coming.error is not None:
            raise coming.error
        assert coming.batch is not None
        return coming.batch

    def forget_all(self) -> None:
        """Lets go of all batches: none is trained any more."""
        self._coming.clear()

    def _give_up(self, error: BaseException) -> None:
        """Of all batches of which the device was not told: a later one relies on rows of the first."""
        self._behind.settle()
        for coming in self._coming.values():
            if coming.batch is None and coming.parts:
                self._forget([part.admission for part in coming.parts])
                coming.parts, coming.error = [], error

    # In the pool's thread.

    def _take_turn(self, coming: Coming) -> None:
        self._waiting.append(coming)
        leave = 0
        if self._pool.looks_forward:
            leave = _FETCHED_FIRST
            try:
                self._pool.core.announce(coming.planned.plan)
            except BaseException as error:
                self._waiting.pop()
                coming.error = error
        self._admit_waiting(leave=leave)
        self.num_delayed += len(self._waiting) > leave

    def _admit_waiting(self, *, leave: int = 0, until: Coming | None = None) -> None:
        """Gives slots to the batches that wait, but for the newest `leave`, as far as there is room, and no further
        than to `until`."""
        while len(self._waiting) > leave and (until is None or not until.is_staged):
            coming = self._waiting.popleft()  # one that fails waits no more
            try:
                if not self._stage(coming):
                    self._waiting.appendleft(coming)
                    return
            except BaseException as error:
                coming.error = error

    def _stage(self, coming: Coming) -> bool:
        """False where there is no room before a step is retired."""
        plan = coming.planned.plan
        admissions: list[_core.Admission] = []
        try:
            if any(group.has_keys for group in self._groups):
                self._pool.core.expect_keys(plan)
            for group in self._groups:
                admission = group.directory.admit(plan)
                if admission is None:
                    self._forget(admissions)
                    return False
                admissions.append(admission)
            if self._mapping is not None and any(admission.num_missing for admission in admissions):
                self._mapping.materialize(plan)
            parts = [self._read(group, admission) for group, admission in zip(self._groups, admissions, strict=True)]
        except WindowTooLarge as error:
            self._forget(admissions)
            raise WindowTooLarge(f"{error}; {self._bytes_wanted(plan)}") from error
        except BaseException:
            self._forget(admissions)
            raise
        # Counted here: who asks the directory waits for an admission.
        self.rows_hit = sum(group.directory.rows_hit for group in self._groups)
        self.rows_missed = sum(group.directory.rows_missed for group in self._groups)
        coming.parts = parts
        return True

    def _read(self, group: SlotGroup, admission: _core.Admission) -> StagedPart:
        packed = host_empty((admission.packed_bytes,), torch.uint8, self._device)
        places = admission.pack(packed.numpy())
        if admission.num_missing == 0 or self._mapping is not None:
            return StagedPart(admission, packed, places, None, None)
        weights, state = group.empty_rows(admission.num_missing, host=True)
        self._pool.core.read_missing(admission, bytes_of(weights), floats_of(state))
        return StagedPart(admission, packed, places, weights, state)

    def _forget(self, admissions: list[_core.Admission]) -> None:
        """Of the first groups: their bytes do not come."""
        for group, admission in zip(self._groups, admissions, strict=False):
            group.directory.forget(admission)

    def _bytes_wanted(self, plan: _core.Plan) -> str:
        wanted = math.ceil(max(group.bytes_wanted(plan) / group.share for group in self._groups if group.share))
        there = f"device.scratchpad_bytes is {self._num_bytes:,}"
        return f"{there}, this batch alone wants {wanted:,}, a window of several as many times that"
