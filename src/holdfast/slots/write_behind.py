"""Steps that a device has done, or is about to have done, and that the pool does not have yet.

A step is *issued* when the device was told all of it, and *retired* when its rows have come back and the pool has
committed it. In between the device works on, and the host waits for nothing.

Invariants
- Steps are retired in the order in which they were issued, one after the other. A step whose loss is not finite is not
  retired, nor is any after it: the pool stays at the last good step.
- Where a step could not be retired, none is any more: what the device has is ahead of the pool for good.
- A row's slot is held by every issued step that looked it up or updated it until that step is retired: who finds a row
  without a slot finds its newest value in the pool.
- The rows of the oldest issued step are captured (its undo log is on its way) before they have come back: the step
  before it is committed then, so they are what the undo log must keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast import _core
from holdfast.device.arrivals import ArrivingLoss
from holdfast.device.faults import device_errors
from holdfast.errors import NonFiniteLoss, PoolFailed
from holdfast.pools.dense_state import DenseState, commit_to

_ISSUED_AT_MOST = 2  # beside the one that is being issued: one on the device, one on its way back


class UpdatedRows(Protocol):
    """The new rows of one collection, on their way back."""

    @property
    def plan(self) -> _core.Plan: ...
    def wait(self) -> Sequence[tuple[Sequence[int], Any, Any]]:
        """By groups of the collection's tables: their indexes, and the arrays that _core.Pool.put takes."""

    def logged(self, num_bytes: int) -> None:
        """What the pool logs of them takes so many bytes."""

    def release(self) -> None:
        """The pool has them."""


class Issuing(Protocol):
    """Somebody who updates rows on the device."""

    def take_step(self) -> tuple[UpdatedRows | None, Callable[[], None]]:
        """What the step that ends updates, and what lets go of the rest that it holds."""


@dataclass(slots=True)
class _Issued:
    cursor: int
    dense: DenseState | None
    loss: ArrivingLoss | None
    updates: list[UpdatedRows]
    let_go: list[Callable[[], None]]
    captures: list[_core.Capture] = field(default_factory=list)


class WriteBehind:
    """The issued steps of a pool. core: of the pool. fills_undo_log: whether a step's rows stay in its log until a
    dense state at or after the step is durable. Raises whatever committing raises, DeviceError, NonFiniteLoss; after
    that PoolFailed."""

    def __init__(self, core: Callable[[], _core.Pool], dense_interval: int, *, fills_undo_log: bool) -> None:
        self._core = core
        self._dense_interval = dense_interval
        self._fills_undo_log = fills_undo_log
        self._issuing: list[Issuing] = []
        self._issued: deque[_Issued] = deque()
        self._num_updates = 0  # of the issued steps, those that update rows
        self._staged_step: int | None = None
        self._largest_step_bytes = 0  # of log
        self._given_up = ""

    def add(self, issuing: Issuing) -> None:
        self._issuing.append(issuing)

    def __len__(self) -> int:
        return len(self._issued)

    @property
    def step(self) -> int:
        """The newest issued step."""
        return self._core().step + len(self._issued)

    @property
    def row_updates(self) -> int:
        """Steps up to that one that updated rows."""
        return self._core().row_updates + self._num_updates

    @property
    def dense_due(self) -> bool:
        """Whether the next step wants its dense state (every dense_interval steps, or when the log runs low)."""
        staged = self._staged_step
        if staged is None:
            staged = self._core().recovery.dense_step or 0
        return self.step + 1 - staged >= self._dense_interval or self._log_is_low

    @property
    def _log_is_low(self) -> bool:
        """Whether there is room for few more steps when the issued ones and the next have taken theirs: no sooner is
        the next one's dense state durable, and room is given back."""
        core = self._core()
        steps = 2 + _ISSUED_AT_MOST
        return core.log_is_low or (self._fills_undo_log and core.log_bytes_free < steps * self._largest_step_bytes)

    def check(self) -> None:
        """Raises PoolFailed where steps were given up."""
        if self._given_up:
            raise PoolFailed(
                f"the device is ahead of the pool, which stays at step {self._core().step}: what came after it was "
                f"given up ({self._given_up}); open the pool again, and go on from there"
            )

    def issue(self, cursor: int, dense: DenseState | None, loss: ArrivingLoss | None) -> int:
        """Ends the step that is under way on the device; returns its number."""
        self.check()
        taken = [issuing.take_step() for issuing in self._issuing]
        updates = [rows for rows, _ in taken if rows is not None]
        self._issued.append(_Issued(cursor, dense, loss, updates, [let_go for _, let_go in taken]))
        self._num_updates += bool(updates)
        step = self.step
        if dense is not None:
            self._staged_step = step
        if len(self._issued) == 1:
            with self._or_give_up():
                self._capture_oldest()
        while len(self._issued) > _ISSUED_AT_MOST:
            self.retire()
        return step

    def retire(self) -> None:
        """Commits the oldest issued step; waits for it."""
        with self._or_give_up():
            oldest = self._issued[0]
            core = self._core()
            with device_errors(f"step {core.step + 1}"):
                if oldest.loss is not None:
                    NonFiniteLoss.check(oldest.loss.value(), core.step + 1)
                arrived = [update.wait() for update in oldest.updates]
                if oldest.dense is not None:
                    oldest.dense.wait()
            parts = [
                (capture, tables, weights, state)
                for capture, groups in zip(oldest.captures, arrived, strict=True)
                for tables, weights, state in groups
            ]
            if parts:
                core.put(parts)
            commit_to(core, oldest.cursor, oldest.dense)
            self._issued.popleft()
            self._num_updates -= bool(oldest.updates)
            for update in oldest.updates:
                update.release()
            for let_go in oldest.let_go:
                let_go()
            if self._issued:
                self._capture_oldest()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Where anything is raised inside, what was issued and is not in the pool never will be."""
        try:
            yield
        except BaseException as error:
            self._given_up = str(error) or type(error).__name__
            self._issued.clear()
            self._num_updates = 0
            raise

    def _capture_oldest(self) -> None:
        oldest = self._issued[0]
        for update in oldest.updates:
            oldest.captures.append(self._core().capture(update.plan))
            update.logged(oldest.captures[-1].bytes)
        self._largest_step_bytes = max(self._largest_step_bytes, sum(capture.bytes for capture in oldest.captures))
