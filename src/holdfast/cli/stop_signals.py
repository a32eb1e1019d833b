"""SIGINT and SIGTERM, as commands take them that end between two steps."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self


class StopSignals:
    """SIGINT and SIGTERM as a wish that is granted between two steps. Context manager: puts the old handlers back.

    A second signal, a second or more after the first, ends the process on the spot: the pool is as after a crash, which
    costs nothing but the step in flight.

    Python hands a signal over when the main thread is back from the core, where it may be waiting for the disk. Who has
    to know at once is called by a thread of its own.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    @contextmanager
    def calling(self, at_once: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `at_once` is called, on another thread, as soon as a signal comes."""
        ours, pythons = socket.socketpair()

        def listen() -> None:
            while came := ours.recv(1):
                if came[0] in self._before:
                    at_once()

        thread = threading.Thread(target=listen, name="hf-signals", daemon=True)
        with ours, pythons:
            pythons.setblocking(False)
            thread.start()  # which may be refused: Python would go on writing to a descriptor that is another file's
            before = signal.set_wakeup_fd(pythons.fileno())
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                pythons.shutdown(socket.SHUT_WR)
                thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def is_wanted(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._at = number, now
            _say(b"\nstopping: the step is being finished (once more to stop at once)\n")
        elif now - self._at >= 1.0:
            show_cursor = b"\x1b[?25h" if sys.stdout is not None and sys.stdout.isatty() else b""
            _say(show_cursor + b"stopped at once; the next start recovers the pool\n")
            os._exit(128 + number)


def _say(words: bytes) -> None:
    """To stderr, which may be gone: Ctrl-C meets the `tee` that reads it, too."""
    with suppress(OSError):
        os.write(2, words)
