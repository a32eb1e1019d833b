"""Opening several pools as one: all are looked at before any is asked to go back, all are ready before any is written.

A pool asks two questions while it opens (core/pool/pool.h, InGroup), so each is opened by a thread of its own, which
waits for the answers; whoever opens them talks to the other ranks in between, on its own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from holdfast import _core
from holdfast.errors import Corrupted, HoldfastError, StepError
from holdfast.pools.opening_options import Mark, OpenOptions


class Talk(Protocol):
    """What ranks tell each other while they open (Group)."""

    def gather(self, value: Any, what: str) -> list[Any]: ...
    def agree_that_none_failed(self, failure: HoldfastError | None, what: str) -> None: ...


What = tuple[Path, str, OpenOptions, int]
"""A part: its directory, the pool's identity, how it is opened, and the steps from one dense state to the next."""


class KeptPart:
    """A writer's pool that stays open from one group to the next, in a process that outlives its trainers.

    how: it came to where its newest group began.
    """

    def __init__(self) -> None:
        self.pool: _core.Pool | None = None
        self.how = ""
        self._what: What | None = None
        self._lock: tuple[int, int] | None = None

    def prepare(self, what: What) -> None:
        """For its next opening, of `what`."""
        # Another pool's, whose files may have gone; or its files were moved, and a copy lies in their place.
        if self._what != what or self._lock != _lock_in(what[0]):
            self.close_quietly()
        self._what = what

    def keep(self, pool: _core.Pool) -> None:
        """It is where the group is."""
        verb = "stayed open, and went on" if pool is self.pool else "was opened"
        report = pool.recovery
        steps = report.rows_step - report.step
        back = f", {steps} steps and {report.rows_restored:,} rows rolled back," if report.rows_restored else ""
        self.how = f"{verb} at step {report.step}{back} in {report.seconds * 1e3:.1f} ms"
        self.pool = pool
        self._lock = None if self._what is None else _lock_in(self._what[0])

    def close(self) -> None:
        """Takes back what was not committed. Safe to call twice."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()

    def close_quietly(self) -> None:
        """After a failure of its medium it says no more than that again."""
        with suppress(HoldfastError):
            self.close()


def _lock_in(directory: Path) -> tuple[int, int] | None:
    """Which file the part's lock is: a part that was moved takes its own along."""
    try:
        status = (directory / "lock").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class _Opening:
    """One pool on its way. Its thread ends when every future that it waits for has an answer. dense_interval: for how
    many steps its log has room. kept: it is open."""

    def __init__(
        self, directory: Path, options: OpenOptions, dense_interval: int = 1, kept: KeptPart | None = None
    ) -> None:
        self.directory = directory
        self.options = options
        self.dense_interval = dense_interval
        self.kept = kept
        self.survey: Future[tuple[Mark, list[Mark]]] = Future()
        self.target: Future[Mark] = Future()
        self.is_ready: Future[None] = Future()
        self.permission: Future[None] = Future()
        self.pool: Future[_core.Pool] = Future()
        Thread(target=self._open, name="holdfast-open", daemon=True).start()

    def _open(self) -> None:
        try:
            if self.kept is None or self.kept.pool is None:
                pool = self._opened()
            else:
                pool = self._gone_on(self.kept, self.kept.pool)
        except BaseException as error:
            for future in (self.survey, self.is_ready, self.pool):
                if not future.done():
                    future.set_exception(error)
        else:
            self.pool.set_result(pool)

    def _opened(self) -> _core.Pool:
        return self.options.open(self.directory, dense_interval=self.dense_interval, group=(self._agree, self._ready))

    def _gone_on(self, kept: KeptPart, pool: _core.Pool) -> _core.Pool:
        """The pool that is open, or after a failure of its medium the same, opened again."""
        try:
            pool.go_on((self._agree, self._ready))
        except HoldfastError:
            if not self.survey.done():
                kept.close_quietly()
                return self._opened()
            if self.permission.done() and self.permission.exception() is None:
                kept.close_quietly()  # it failed on its way
            raise
        return pool

    def _agree(self, rows: Mark, dense: Sequence[Mark]) -> Mark:
        self.survey.set_result((rows, list(dense)))
        return self.target.result()

    def _ready(self) -> None:
        self.is_ready.set_result(None)
        self.permission.result()

    def give_up(self) -> None:
        for future in (self.target, self.permission):
            if not future.done():
                future.set_exception(StepError("another pool of the group cannot be opened"))
        if self.pool.exception() is None:
            pool = self.pool.result()
            if self.kept is None or self.kept.pool is not pool:
                pool.close()


def open_together(
    members: Sequence[Path],
    dense: Path | None,
    options: OpenOptions,
    talk: Talk,
    *,
    dense_interval: int = 1,
    kept: KeptPart | None = None,
) -> tuple[list[_core.Pool], _core.Pool | None, Mark]:
    """Opens and recovers this process's pools of a group: writers' `members`, and the one with the dense states where
    this process has it. Also returns where the group is. All ranks call it at once, those without a pool, too.
    dense_interval: steps from one dense state of the group to the next. kept: the first member's, where it is open.

    Raises what any pool of the group raises, on all ranks; nothing is written then, unless the medium failed while it
    was.
    """
    openings = [
        _Opening(directory, options, dense_interval, None if number else kept)
        for number, directory in enumerate(members)
    ]
    # It has no rows, and so no log that is anywhere else.
    of_dense = None if dense is None else _Opening(dense, replace(options, log=None))
    everything = [*openings, *([] if of_dense is None else [of_dense])]
    try:
        told, failure = _told(openings, of_dense)
        surveys = talk.gather(told, "what the pools can go back to")
        talk.agree_that_none_failed(failure, "what the pools can go back to")
        target = newest_common_step(surveys)
        for opening in everything:
            opening.target.set_result(target)
        talk.agree_that_none_failed(_first_failure([opening.is_ready for opening in everything]), "the way back")
        for opening in everything:
            opening.permission.set_result(None)
        talk.agree_that_none_failed(_first_failure([opening.pool for opening in everything]), "going back")
    except BaseException:
        for opening in everything:
            opening.give_up()
        raise
    dense_pool = None if of_dense is None else of_dense.pool.result()
    return [opening.pool.result() for opening in openings], dense_pool, target


def newest_common_step(surveys: Sequence[dict[str, Any]]) -> Mark:
    """The newest step whose dense state is there and whose rows all writers have.

    surveys: one of each rank, ``{"rows": [mark of each writer], "dense": [marks of the slots] or None}``.
    Raises Corrupted where there is none.
    """
    rows = [step for survey in surveys for step, _, _ in survey["rows"]]
    slots = [tuple(mark) for survey in surveys for mark in survey["dense"] or ()]
    if not slots:
        if any(rows):
            raise Corrupted(f"the writers hold rows of step {max(rows)}, and there is no dense state")
        return 0, 0, 0
    reachable = [mark for mark in slots if mark[0] <= min(rows)]
    if not reachable:
        found = " and ".join(str(mark[0]) for mark in slots)
        raise Corrupted(
            f"there are dense states of steps {found}, and a writer whose newest rows are of step {min(rows)}: it is "
            "an older copy than the others"
        )
    step, cursor, row_updates = max(reachable)
    return step, cursor, row_updates


def _told(openings: list[_Opening], dense: _Opening | None) -> tuple[dict[str, Any], HoldfastError | None]:
    failure = _first_failure([opening.survey for opening in [*openings, *([] if dense is None else [dense])]])
    if failure is not None:
        return {"rows": [], "dense": None}, failure
    rows = [opening.survey.result()[0] for opening in openings]
    return {"rows": rows, "dense": None if dense is None else dense.survey.result()[1]}, None


def _first_failure(futures: Sequence[Future[Any]]) -> HoldfastError | None:
    """Waits for all. Anything but what holdfast raises on purpose goes through."""
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, HoldfastError):
            raise error
    return failures[0] if failures else None  # type: ignore[return-value]
