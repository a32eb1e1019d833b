"""Work that is done while its results so far are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_DEPTH = 2


@contextmanager
def ahead(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """The same items, of which a thread has the next ones made; no thread is at work any more when the block ends."""
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(_DEPTH)
    stopping = threading.Event()

    def make() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                made.put((item, None))
                if stopping.is_set():
                    return
        except BaseException as raised:
            error = raised
        made.put((None, error))

    def use() -> Iterator[T]:
        while (next_made := made.get())[0] is not None:
            yield next_made[0]
        if next_made[1] is not None:
            raise next_made[1]

    thread = threading.Thread(target=make, name="hf-ahead", daemon=True)
    thread.start()
    try:
        yield use()
    finally:
        stopping.set()
        while thread.is_alive():
            try:
                made.get(timeout=0.01)
            except queue.Empty:
                continue
        thread.join()
