"""A thread beside the one that trains, which does what it is asked for.

Invariants
- What it is asked for is done in the order of asking, one thing after the other.
- It holds on to nothing that it has done: who lets go of a pool lets go of its threads.
- Once it is closed, and in a child of a fork, which has no such thread, whoever asks does it: the pool says what is
  wrong with that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Outcome = TypeVar("Outcome")


class OrderedThread:
    def __init__(self, name: str) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._process = os.getpid()

    def ask(self, work: Callable[[], Outcome]) -> Future[Outcome]:
        if self._executor is not None and os.getpid() == self._process:
            return self._executor.submit(work)
        return done_here(work)

    def settle(self) -> None:
        """Waits until all is done that it was asked for."""
        self.ask(_nothing).result()

    def close(self) -> None:
        """Ends it, after that. May be called again."""
        if self._executor is not None and os.getpid() == self._process:
            self._executor.shutdown()
        self._executor = None


def done_here(work: Callable[[], Outcome]) -> Future[Outcome]:
    """By the thread that asks."""
    future: Future[Outcome] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future


def _nothing() -> None:
    pass
