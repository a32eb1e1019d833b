"""Steps that a device has done, or is about to have done, and that the pool does not have yet.

A step is *issued* when the device was told all of it, and *retired* when its rows have come back and the pool has
committed it. In between the device works on, and the thread that trains waits for nothing. Two others retire steps: one
waits for the device, and has the other, the pool's, call the pool's verbs. That one stages the batches that are on
their way to the device as well (staging.py), and never waits for what the device does.

Invariants
- The pool's verbs are called in the pool's thread alone, one after the other. Whoever calls one elsewhere settles both
  threads first, and meanwhile nothing is asked of them: only the thread that trains does so.
- Steps are retired in the order in which they were issued, one after the other. A step whose loss is not finite is not
  retired, nor is any after it: the pool stays at the last good step.
- Where a step could not be retired, none is any more: what the device has is ahead of the pool for good.
- A row's slot is held by every issued step that looked it up or updated it until that step is retired: who finds a row
  without a slot finds its newest value in the pool. Of several that have a table on the device only the last takes
  steps, and every step of the others is retired before it reads a row.
- The rows of the oldest issued step are captured (its undo log is on its way) before they have come back: the step
  before it is committed then, so they are what the undo log must keep.
- How far the pool is, is what the thread that trains has been told of steps that it knows to be retired: it changes in
  `issue` and `retire` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast import _core
from holdfast.device.arrivals import ArrivingLoss
from holdfast.device.faults import device_errors
from holdfast.errors import NonFiniteLoss, PoolFailed, StepError
from holdfast.pools.dense_state import DenseState, commit_to
from holdfast.slots.ordered_thread import OrderedThread

_ISSUED_AT_MOST = 2  # beside the one that is being issued: one on the device, one on its way back


class UpdatedRows(Protocol):
    """The new rows of one collection, on their way back."""

    @property
    def plan(self) -> _core.Plan: ...
    def wait(self) -> Sequence[tuple[Sequence[int], Any, Any]]:
        """By groups of the collection's tables: their indexes, and the arrays that _core.Pool.put takes. Raises
        NonFiniteLoss where their gradients were not finite."""

    def logged(self, num_bytes: int) -> None:
        """What the pool logs of them takes so many bytes."""

    def release(self) -> None:
        """The pool has them."""


class Issuing(Protocol):
    """Somebody who updates rows on the device. tables: of the pool, whose rows it has there."""

    tables: Sequence[int]

    def take_step(self) -> tuple[UpdatedRows | None, Callable[[], None]]:
        """What the step that ends updates, and what lets go of the rest that it holds."""

    def let_go(self) -> None:
        """The pool is closed: gives back the device's memory."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What the pool is to be given. captures: once it is the oldest."""

    number: int
    cursor: int
    dense: DenseState | None
    loss: ArrivingLoss | None
    updates: list[UpdatedRows]
    let_go: list[Callable[[], None]]
    captures: list[_core.Capture] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a pool is."""

    step: int
    cursor: int
    row_updates: int
    log_is_low: bool
    log_bytes_free: int
    traffic: dict[str, float] | None


class WriteBehind:
    """The issued steps of a pool. core: of the pool. fills_undo_log: whether a step's rows stay in its log until a
    dense state at or after the step is durable. steps_to_spare: that it has room for beside those on their way, when it
    is said to run low. Raises whatever committing raises, DeviceError, NonFiniteLoss; after
    that PoolFailed."""

    def __init__(
        self, core: Callable[[], _core.Pool], dense_interval: int, *, fills_undo_log: bool, steps_to_spare: int = 0
    ) -> None:
        self._core = core
        self._steps_to_spare = steps_to_spare
        self._dense_interval = dense_interval
        self._fills_undo_log = fills_undo_log
        self._issuing: list[Issuing] = []
        self._last_with: dict[int, Issuing] = {}  # by table
        self._pool_thread = OrderedThread("holdfast-pool")
        self._waiting_thread = OrderedThread("holdfast-device")
        self.ask = self._pool_thread.ask  # has the pool's thread do something, after what it was asked for before
        self._issued: deque[tuple[Future[Reading], bool]] = deque()  # and whether it updates rows
        self._told: Reading | None = None  # of the step before those
        self._staged_step: int | None = None
        self._given_up = ""
        self._is_closed = False
        # The pool's thread's own; numbers are read by others, too.
        self._uncommitted: deque[_Step] = deque()
        self._largest_step_bytes = 0  # of log
        # The waiting thread's own.
        self._is_broken = False

    def add(self, issuing: Issuing) -> None:
        while self.retire():  # those before it may have the same tables
            pass
        self._issuing.append(issuing)
        self._last_with |= dict.fromkeys(issuing.tables, issuing)

    def __len__(self) -> int:
        return len(self._issued)

    @property
    def reading(self) -> Reading:
        """Of the newest step that is known to be retired."""
        if self._issued:
            assert self._told is not None
            return self._told
        return self._read()

    @property
    def step(self) -> int:
        """The newest issued step."""
        return self.reading.step + len(self._issued)

    @property
    def row_updates(self) -> int:
        """Steps up to that one that updated rows."""
        return self.reading.row_updates + sum(updates for _, updates in self._issued)

    @property
    def dense_due(self) -> bool:
        """Whether the next step wants its dense state (every dense_interval steps, or when the log runs low)."""
        staged = self._staged_step
        if staged is None:
            staged = self._core().recovery.dense_step or 0
        return self.step + 1 - staged >= self._dense_interval or self.log_is_low

    @property
    def log_is_low(self) -> bool:
        """Whether there is room for few more steps when the issued ones and the next have taken theirs: no sooner is
        the next one's dense state durable, and room is given back. One more is for where the ring ends: a record that
        does not fit before it begins behind it."""
        reading = self.reading
        steps = 3 + _ISSUED_AT_MOST + self._steps_to_spare
        wanted = steps * self._largest_step_bytes
        return reading.log_is_low or (self._fills_undo_log and reading.log_bytes_free < wanted)

    def check(self) -> None:
        """Raises PoolFailed where steps were given up, StepError when the pool is closed."""
        if self._is_closed:
            raise StepError("the pool is closed")
        if self._given_up:
            raise PoolFailed(
                f"the device is ahead of the pool, which stays at step {self._core().step}: what came after it was "
                f"given up ({self._given_up}); open the pool again, and go on from there"
            )

    def check_last(self, issuing: Issuing) -> None:
        """Raises StepError where another one has had one of its tables on the device since: neither sees what the other
        one updates there."""
        for table in issuing.tables:
            if self._last_with[table] is not issuing:
                raise StepError(
                    f"table '{self._core().tables[table].name}' has its rows in the slots of another collection that "
                    "was made since, and a table's rows lie in slots of one: let one collection read all features of "
                    "the table, or set device.rows = 'near_memory'"
                )

    def issue(self, cursor: int, dense: DenseState | None, loss: ArrivingLoss | None) -> int:
        """Ends the step that is under way on the device; returns its number."""
        self.check()
        taken = [issuing.take_step() for issuing in self._issuing]
        updates = [rows for rows, _ in taken if rows is not None]
        self._told = self.reading
        step = self.step + 1
        issued = _Step(step, cursor, dense, loss, updates, [let_go for _, let_go in taken])
        begun = self.ask(lambda: self._begin(issued))
        if updates and self._largest_step_bytes == 0:
            begun.exception()  # how much log a step takes is known from the first one on
        self._issued.append((self._waiting_thread.ask(lambda: self._retire(issued, begun)), bool(updates)))
        if dense is not None:
            self._staged_step = step
        while self._issued and (len(self._issued) > _ISSUED_AT_MOST or self._issued[0][0].done()):
            self.retire()
        return step

    def retire(self) -> bool:
        """Waits until the oldest issued step is committed; where there is none, until both threads have nothing left to
        do, and returns False."""
        if not self._issued:
            self.settle()
            return False
        future, _ = self._issued[0]
        error = future.exception()  # waits
        if error is not None:
            # What was issued and is not in the pool never will be.
            self._given_up = str(error) or type(error).__name__
            self._issued.clear()
            self.settle()
            raise error
        self._issued.popleft()
        self._told = future.result()
        return True

    def settle(self) -> None:
        """Waits until both threads have done all that they were asked for."""
        self._waiting_thread.settle()
        self._pool_thread.settle()

    def close(self) -> None:
        """Ends them, after that, and gives back what is on the device."""
        self._waiting_thread.close()
        self._pool_thread.close()
        self._is_closed = True
        for issuing in self._issuing:
            issuing.let_go()

    # In the waiting thread.

    def _retire(self, issued: _Step, begun: Future[None]) -> Reading:
        """Nothing after a step that could not be committed."""
        if self._is_broken:
            raise PoolFailed("an earlier step was given up")
        try:
            begun.result()
            with device_errors(f"step {issued.number}"):
                if issued.loss is not None:
                    NonFiniteLoss.check(issued.loss.value(), issued.number)
                arrived = [update.wait() for update in issued.updates]
                if issued.dense is not None:
                    issued.dense.wait()
            reading = self.ask(lambda: self._commit(arrived)).result()
            for let_go in issued.let_go:
                let_go()
            return reading
        except BaseException:
            self._is_broken = True
            raise

    # In the pool's thread.

    def _begin(self, issued: _Step) -> None:
        self._uncommitted.append(issued)
        if len(self._uncommitted) == 1:
            self._capture_oldest()

    def _capture_oldest(self) -> None:
        oldest = self._uncommitted[0]
        for update in oldest.updates:
            oldest.captures.append(self._core().capture(update.plan))
            update.logged(oldest.captures[-1].bytes)
        self._largest_step_bytes = max(self._largest_step_bytes, sum(capture.bytes for capture in oldest.captures))

    def _commit(self, arrived: list[Sequence[tuple[Sequence[int], Any, Any]]]) -> Reading:
        """The oldest step, whose rows have arrived."""
        oldest = self._uncommitted[0]
        parts = [
            (capture, tables, weights, state)
            for capture, groups in zip(oldest.captures, arrived, strict=True)
            for tables, weights, state in groups
        ]
        if parts:
            self._core().put(parts)
        commit_to(self._core(), oldest.cursor, oldest.dense)
        self._uncommitted.popleft()
        for update in oldest.updates:
            update.release()
        if self._uncommitted:
            self._capture_oldest()
        return self._read()

    def _read(self) -> Reading:
        core = self._core()
        return Reading(core.step, core.cursor, core.row_updates, core.log_is_low, core.log_bytes_free, core.traffic())
