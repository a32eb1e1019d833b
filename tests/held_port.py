"""A port of this machine's that is a test's alone, from before a process listens there until the test is done."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """One at which nobody listens yet. A process that asks for SO_REUSEADDR, as stores do, can; the kernel gives it to
    nobody else, neither to a test that looks for a free port nor to a socket that takes any."""
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", 0))
        yield holding.getsockname()[1]
