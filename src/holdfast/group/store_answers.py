"""What a store of torch.distributed answers, which may be never: whoever has it was stopped, or lost its power or its
cable. torch's client waits for that in C++, without a deadline and deaf to signals."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from torch._C._distributed_c10d import Store

_LEAST_SECONDS = 1.0  # that a store has for an answer, whoever is in a hurry
_LOOK_SECONDS = 0.25  # how soon a wait notices that the process was asked to stop
_END_SECONDS = 1.0  # for questions that nobody waits for any more to end, when the process does
_Answer = TypeVar("_Answer")
_given_up: set[Thread] = set()  # those of these questions


def asked(question: Callable[[], _Answer], seconds: float, stopping: Callable[[], bool] = lambda: False) -> _Answer:
    """What `question` returns, which asks a store. Raises TimeoutError where that takes more than `seconds`, or a
    second once the process was asked to stop; and what the question raises."""
    answer: Future[_Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    asking = Thread(target=ask, name="holdfast-store", daemon=True)
    asking.start()
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        # Before a last look: where this process was stopped for a while, too, the answer is about to be there.
        is_late = waited >= (_LEAST_SECONDS if stopping() else max(_LEAST_SECONDS, seconds))
        with suppress(TimeoutError):
            answer.exception(_LOOK_SECONDS)
        if answer.done():
            return answer.result()
        if is_late:
            _given_up.difference_update([thread for thread in _given_up if not thread.is_alive()])
            _given_up.add(asking)
            raise TimeoutError("whoever has the group's store was stopped, or is cut off")


@atexit.register
def _await_given_up() -> None:
    """An interpreter that ends while a thread of Python's comes back from the store aborts. Torch gives up about when
    we do."""
    deadline = time.monotonic() + _END_SECONDS
    for asking in _given_up:
        asking.join(max(0.0, deadline - time.monotonic()))


class AskedStore:
    """A store whose answers are waited for: `timeout` seconds for all of them together, or until `stopping`. What does
    not come by then is a TimeoutError."""

    def __init__(self, store: Store, timeout: float, stopping: Callable[[], bool]) -> None:
        self._store = store
        self._deadline = time.monotonic() + timeout
        self._stopping = stopping

    def get(self, key: str) -> str:
        return self._ask(lambda: self._store.get(key)).decode()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def add(self, key: str, number: int) -> int:
        return self._ask(lambda: self._store.add(key, number))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._ask(lambda: self._store.compare_set(key, expected, value))

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        return asked(question, self._deadline - time.monotonic(), self._stopping)
