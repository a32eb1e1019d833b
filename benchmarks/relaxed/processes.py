"""Functions in processes of their own, so many at a time.

Importing PyTorch takes seconds: it is done once, in a process without threads from which the others are forked.
"""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["relaxed.lives", "torch._dynamo", "numpy.random"])


class Processes:
    """Used from several threads. at_a_time: more of them wait."""

    def __init__(self, at_a_time: int) -> None:
        self._free = threading.Semaphore(at_a_time)
        # Starting a process asks how others have ended, too, and two that ask at once are told 255.
        self._asks = threading.Lock()

    def run(self, function: Callable[..., dict[str, Any]], *arguments: Any, status: int = 0) -> dict[str, Any]:
        """What `function` returns; nothing where it dies. Raises RuntimeError where its exit status is another one."""
        with self._free:
            receiver, sender = _FORKED.Pipe(duplex=False)
            process = _FORKED.Process(target=_answer, args=(sender, function, arguments))
            with self._asks:
                process.start()
            sender.close()
            try:
                answer: dict[str, Any] = receiver.recv()
            except EOFError:
                answer = {}
            wait([process.sentinel])
            with self._asks:
                process.join()
        if process.exitcode != status or "error" in answer:
            raise RuntimeError(f"{function.__name__} ended with {process.exitcode}: {answer.get('error', '')}")
        return answer


def _answer(sender: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    from larger.one import prepare_process

    prepare_process(1)
    try:
        sender.send(function(*arguments))
    except Exception:
        sender.send({"error": traceback.format_exc()})
    sender.close()
