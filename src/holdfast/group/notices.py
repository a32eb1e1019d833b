"""Notices: what ranks leave in the store of torch.distributed, where those look that miss them.

Invariants
- Whoever looks waits for a bounded time, also where the store does not answer.
- A rank whose wait failed has left word of that before it says who is missing: others then tell the dead from those
  who gave up.
- Who goes no further says so where all look that wait for long: they learn of it while the store is there, and need not
  wait for those who wait for somebody that is gone.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, Store

from holdfast.errors import GroupError
from holdfast.group.store_answers import asked

_GRACE_WHEN_STOPPED = 0.2
_GRACE_SECONDS = 3.0  # for the others to say that they are there, once something broke
_LOOK_SECONDS = 1.0  # for the store to say whether a rank goes no further: who asks has a wait of its own to look after
_Answer = TypeVar("_Answer")
NOT_YET = "Operation timed out"  # what Work.wait says when its own timeout passed and the work goes on
_DOING, _DONE = "at it, ", "done"  # what rank 0 says of long work
_ENDED = "ended after step "  # begins the word of a rank whose loop is over
_GAVE_UP = "gave up on "  # begins the word that a rank leaves whose wait timed out
_LOST = "lost a connection, waiting for "  # one whose wait ended otherwise
_OVER_KEY = "holdfast/over"  # is there when a rank goes no further


class EndedElsewhereError(RuntimeError):
    """Another rank goes no further: why a wait for a third one ends."""

    def __init__(self) -> None:
        super().__init__("a rank went no further")


class Notices:
    """This rank's notices, and its view of the others'.

    timeout: seconds that a rank may keep the others waiting. stopping: whether this process was asked to stop.
    is_patient: it waits for what the others say when something broke.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        stopping: Callable[[], bool],
        is_patient: bool = True,
    ) -> None:
        self.step = 0  # that is under way, for messages
        self.any_failure = False  # of a wait of this rank's
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._stopping = stopping
        self._is_patient = is_patient

    def leave(self, what: str) -> None:
        """Says what became of this rank. Never raises."""
        with suppress(RuntimeError, TimeoutError):
            self._ask(lambda: self._store.set(_key(self._rank), what))

    def _leave_last(self, what: str) -> None:
        """The word of a rank that goes no further. Never raises."""

        def tell() -> None:
            self._store.set(_key(self._rank), what)
            self._store.set(_OVER_KEY, "")

        with suppress(RuntimeError, TimeoutError):
            self._ask(tell)

    def leave_failure(self, error: BaseException) -> None:
        """Says that this rank is about to end with `error`."""
        if not isinstance(error, GroupError):
            self._leave_last(f"failed: {type(error).__name__}: {first_line(error)}")

    def leave_end(self, step: int) -> None:
        """Says that this rank's loop is over."""
        self.leave(f"{_ENDED}{step}")

    def is_over(self) -> bool:
        """Whether a rank has said that it goes no further."""
        try:
            return self._ask(lambda: self._store.check([_OVER_KEY]), _LOOK_SECONDS)
        except (RuntimeError, TimeoutError):
            return False

    def close(self) -> None:
        """Lets go of the store, which has threads."""
        self._store = HashStore()

    @contextmanager
    def saying_that_it_lives(self, what: str) -> Iterator[None]:
        """Four times in a timeout, from another thread: this one may be in the core for long."""
        if self._world_size == 1:
            yield
            return
        is_over = Event()

        def tell(word: str) -> None:
            with suppress(RuntimeError, TimeoutError):  # a store that is gone is found out by whoever waits next
                self._ask(lambda: self._store.set(_done_key(what), word), self._timeout)

        def say() -> None:
            for beat in itertools.count():
                tell(f"{_DOING}{beat}")
                if is_over.wait(self._timeout / 4):
                    return

        saying = Thread(target=say, name="holdfast-alive", daemon=True)
        saying.start()
        try:
            yield
        finally:
            is_over.set()
            saying.join()
            tell(_DONE)

    def await_rank_0(self, what: str) -> None:
        key = _done_key(what)
        heard, since = b"", time.monotonic()
        pause = 0.001  # seconds: most of what rank 0 does is over soon
        while True:
            try:
                left = self._timeout - (time.monotonic() - since)  # a store that stalls has as long as rank 0
                said = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"", left)
            except (RuntimeError, TimeoutError):
                self.any_failure = True
                if self._stopping():
                    raise GroupError(f"stopped while waiting for {what}") from None
                raise self._cut_off(what) from None
            if said == _DONE.encode():
                return
            if said != heard:
                heard, since = said, time.monotonic()
            if self._stopping():
                raise GroupError(f"stopped while waiting for {what}")
            if time.monotonic() - since > self._timeout:
                raise self.failure(what, TimeoutError(f"{NOT_YET}: rank 0 was silent"))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def failure(self, what: str, error: Exception) -> GroupError:
        """What to raise when a collective did not work: finds out which ranks do not answer any more."""
        self.any_failure = True
        self._leave_last(f"{_GAVE_UP if _is_timeout(error) else _LOST}{what}")
        answers: dict[int, str] = {}

        def look() -> None:
            for rank in range(self._world_size):
                if rank not in answers and self._store.check([_key(rank)]):
                    answers[rank] = self._store.get(_key(rank)).decode()

        began = time.monotonic()
        while len(answers) < self._world_size:
            try:
                self._ask(look)
            except (RuntimeError, TimeoutError):
                if not answers:
                    return self._cut_off(what)
                break  # it answered a moment ago: who has the store has looked for as long as it should, and ended
            grace = _GRACE_WHEN_STOPPED if self._stopping() or not self._is_patient else _GRACE_SECONDS
            if time.monotonic() - began > grace:
                break
            time.sleep(0.05)
        silent = [rank for rank in range(self._world_size) if rank not in answers]
        failed = {rank: text for rank, text in answers.items() if text.startswith("failed: ")}
        where = f"step {self.step}, waiting for {what}"
        if failed:
            rank, text = min(failed.items())
            return GroupError(f"{where}: rank {rank} {text}")
        ended = {rank: text for rank, text in answers.items() if _is_before(text, self.step)}
        if ended:
            rank, text = min(ended.items())
            return GroupError(
                f"{where}: rank {rank} {text} and closed its pool; all ranks have to make the same steps and "
                "evaluations, so each needs as many batches as the others (drop_last, or as many as the shortest has)"
            )
        if silent:
            became = what_became_of(silent, error, answers.values(), self._timeout)
            return GroupError(f"{where}: {became}; the pool goes on from its newest durable step when it is opened")
        return GroupError(f"{where}: {self._among_all_there(what, error, answers)}")

    def _among_all_there(self, what: str, error: Exception, answers: Mapping[int, str]) -> str:
        """Why a wait ended though every rank answers. answers: by rank."""
        gave_up = [rank for rank, word in answers.items() if word.startswith(_GAVE_UP)]
        if gave_up and _is_broken_connection(error):
            return (
                f"rank {gave_up[0]} {answers[gave_up[0]]} after {self._timeout:g} s, in which this rank or another one "
                "stalled; the pool goes on from its newest durable step when it is opened"
            )
        broke = f"the connection between ranks that are all there broke ({first_line(error)})"
        waits = {rank: _awaited(word) for rank, word in answers.items()}
        if elsewhere := [rank for rank, awaited in waits.items() if awaited not in (None, what)]:
            return (
                f"rank {elsewhere[0]} waited for {waits[elsewhere[0]]} meanwhile: all ranks have to make the same "
                f"calls in the same order, evaluations and flushes among them; where they do, {broke}"
            )
        return broke

    def _ask(self, question: Callable[[], _Answer], seconds: float | None = None) -> _Answer:
        """What the store answers. Raises TimeoutError where it does not: over a cable that was cut it never would."""
        return asked(question, _GRACE_SECONDS if seconds is None else seconds, self._stopping)

    def _cut_off(self, what: str) -> GroupError:
        return GroupError(
            f"step {self.step}: rank {self._rank} ({socket.gethostname()}) waited for {what} and reaches neither the "
            "others nor the group's store: rank 0, which has it where the launcher has none, died or was stopped; "
            "or its network is cut off, or the store's is"
        )


def what_became_of(silent: Sequence[int], error: Exception, words: Iterable[str], timeout: float) -> str:
    """Of the ranks that left no word, as far as a rank whose wait ended with `error` can tell. words: of the others."""
    # Who gives up closes its connections to all: a broken one then says nothing about those who are silent.
    somebody_gave_up = any(word.startswith(_GAVE_UP) for word in words)
    names = names_of(silent)
    is_broken = isinstance(error, EndedElsewhereError) or _is_broken_connection(error)
    if is_broken and not somebody_gave_up:
        # One that is busy with its own part of a step says nothing, too.
        return f"{'' if len(silent) == 1 else 'at least one of '}{names} died or was stopped"
    return f"{names} {'does' if len(silent) == 1 else 'do'} not answer within {timeout:g} s"


def names_of(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _awaited(word: str) -> str | None:
    """What a rank waited for that left this word; None where it left another."""
    return next((word.removeprefix(begin) for begin in (_GAVE_UP, _LOST) if word.startswith(begin)), None)


def _is_before(word: str, step: int) -> bool:
    """Whether it is that of a rank whose loop was over before `step`."""
    return word.startswith(_ENDED) and int(word.removeprefix(_ENDED)) < step


def _is_timeout(error: Exception) -> bool:
    """Whether a wait of ours passed its time, by Work.wait's word or gloo's."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def _is_broken_connection(error: Exception) -> bool:
    return any(word in str(error) for word in ("closed", "reset"))


def _key(rank: int) -> str:
    return f"holdfast/rank-{rank}"


def _done_key(what: str) -> str:
    return f"holdfast/done/{what}"


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
