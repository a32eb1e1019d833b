"""How trainers find memory ranks that run by themselves, and what is said at their door.

A door is a listening socket at which a memory rank takes one line of JSON from rank 0 (Hello), answers with one, and
takes one more when every memory rank has said yes. Then all of them are ranks of one group.

Invariants
- Rank 0 knocks at the doors in their order, and holds each until all are open: of two sets of trainers that come at
  once one gets them all.
- What is refused is refused before there is a group: every trainer ends with the same error, and memory ranks wait on.
- Every wait ends after the group's timeout at the latest.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast import errors
from holdfast.errors import ConfigError, GroupError, HoldfastError, PoolBusy
from holdfast.group.meeting import address_towards, listen_on, meet, of_this_group, stay_on
from holdfast.group.notices import first_line
from holdfast.group.options import LONGEST_TIMEOUT
from holdfast.group.store_answers import AskedStore

GO = b"go\n"
_MOST_BYTES = 1 << 16  # of a line
_ATTACHED, _HEARD = "holdfast/attached", "holdfast/heard"
_HEARING_SECONDS = 5.0
_PAUSE = 0.1  # seconds between two knocks
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What rank 0 says. memory_rank: which one it takes the other for, from 1, of `memory_ranks`. store: host and port,
    and `prefix` of the keys of this group. timeout: the group's."""

    memory_rank: int
    memory_ranks: int
    trainers: int
    store: tuple[str, int]
    prefix: str
    timeout: float
    host: str = ""
    holdfast: str = ""
    torch: str = ""

    @classmethod
    def parse(cls, line: bytes) -> Hello:
        """Raises ValueError, TypeError where it is none."""
        said = json.loads(line)
        if not isinstance(said, dict):
            raise TypeError("no fields")
        host, port = said.pop("store")
        hello = cls(store=(host, port), **said)
        numbers = (port, hello.trainers, hello.memory_rank, hello.memory_ranks)
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("no numbers")
        if not (hello.trainers > 0 and 0 < hello.timeout <= LONGEST_TIMEOUT):
            raise ValueError("no trainers")
        return hello


def split_address(text: str, what: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what} {text!r}: it must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_line(connection: socket.socket) -> bytes:
    """Up to the end of a line. Raises OSError where the connection breaks, ValueError where there is no end."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part:
            raise ConnectionResetError("the connection was closed")
        line += part
        if len(line) > _MOST_BYTES:
            raise ValueError("a line without an end")
    return line


def answer(connection: socket.socket, failure: HoldfastError | None) -> None:
    """A memory rank's. Raises OSError."""
    said = {} if failure is None else {"error": type(failure).__name__, "message": str(failure)}
    connection.sendall(json.dumps(said).encode() + b"\n")


def attach(
    addresses: Sequence[str], *, timeout: float, stopping: Callable[[], bool] = lambda: False
) -> tuple[Store, int, int]:
    """Joins the memory ranks at these addresses. All trainers call it at once: torchrun's, or a process alone. Returns
    the group's store, this trainer's rank, and how many trainers there are.

    Raises PoolBusy where they serve other trainers, ConfigError, GroupError where they do not answer.
    """
    where = [split_address(address, "the memory rank at") for address in addresses]
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "memory ranks that run by themselves join a group of holdfast's own: open the pool before the script calls "
            "init_process_group, or leave that out"
        )
    host, port = where[0]
    try:
        mine = address_towards(host)
    except OSError as error:
        raise GroupError(f"the memory rank at {host}:{port} cannot be reached: {error}") from None
    stay_on(mine)
    if "RANK" in os.environ:
        met, rank, trainers = meet(timeout, stopping)
        store_at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    else:
        listening = listen_on(mine, 0)
        store_at, rank, trainers = (mine, listening.getsockname()[1]), 0, 1
        met = TCPStore(
            *store_at, is_master=True, timeout=timedelta(seconds=timeout), master_listen_fd=listening.detach()
        )
    words = of_this_group(met, rank, trainers, timeout, stopping)
    if rank != 0:
        return PrefixStore(_hear(words, timeout, stopping), met), rank, trainers
    hello = Hello(
        memory_rank=0,
        memory_ranks=len(where),
        trainers=trainers,
        store=store_at,
        prefix=uuid4().hex,
        timeout=timeout,
        host=f"{socket.gethostname()}, process {os.getpid()}",
        holdfast=version("holdfast"),
        torch=torch.__version__,
    )
    try:
        _knock_at_all(where, hello, stopping)
    except HoldfastError as error:
        _tell_failure(words, error, trainers - 1)
        raise
    words.set(_ATTACHED, json.dumps(hello.prefix))
    return PrefixStore(hello.prefix, met), rank, trainers


def _tell_failure(words: Store, error: HoldfastError, num_others: int) -> None:
    """Waits for the others to hear it: the store may be this process's, which is about to end."""
    deadline = time.monotonic() + _HEARING_SECONDS
    words.set(_ATTACHED, json.dumps([type(error).__name__, str(error)]))
    while words.add(_HEARD, 0) < num_others and time.monotonic() < deadline:
        time.sleep(0.01)


def _hear(words: Store, timeout: float, stopping: Callable[[], bool]) -> str:
    """What came of rank 0's knocking: the group's prefix. Raises what rank 0 does."""
    # Rank 0 knocks for as long as the timeout.
    deadline = time.monotonic() + timeout + _HEARING_SECONDS
    patient = AskedStore(words, timeout + _HEARING_SECONDS, stopping)
    try:
        while not patient.has(_ATTACHED):
            if stopping():
                raise GroupError("stopped while rank 0 looked for the memory ranks")
            if time.monotonic() > deadline:
                raise GroupError(
                    f"waited {timeout:g} s for rank 0 to find the memory ranks: it died or was stopped; see what "
                    "became of it, and start all trainers again"
                )
            time.sleep(_LOOK_SECONDS)
        said: Any = json.loads(patient.get(_ATTACHED))
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise GroupError(f"waited for rank 0 to find the memory ranks: {first_line(error)}") from None
    if isinstance(said, str):
        return said
    with suppress(RuntimeError, TimeoutError):
        patient.add(_HEARD, 1)
    kind, message = said
    raise errors.by_name(kind)(f"rank 0: {message}")


def _knock_at_all(where: Sequence[tuple[str, int]], hello: Hello, stopping: Callable[[], bool]) -> None:
    deadline = time.monotonic() + hello.timeout
    with ExitStack() as held:
        opened = []
        for number, address in enumerate(where, 1):
            said = {**asdict(hello), "memory_rank": number}
            opened.append(held.enter_context(_knock_until(address, said, deadline, stopping)))
        for connection, (host, port) in zip(opened, where, strict=True):
            try:
                connection.sendall(GO)
            except OSError as error:
                raise GroupError(f"the memory rank at {host}:{port} is gone: {error}") from None


def _knock_until(
    address: tuple[str, int], said: dict[str, Any], deadline: float, stopping: Callable[[], bool]
) -> socket.socket:
    """One that is not there yet, or still with trainers that have died, is waited for."""
    while True:
        try:
            return _knock(address, said, deadline)
        except (OSError, ValueError, PoolBusy) as error:
            whom = f"memory rank {said['memory_rank']} of {said['memory_ranks']} at {address[0]}:{address[1]}"
            if stopping():
                raise GroupError(f"stopped while waiting for {whom}: {error}") from None
            if time.monotonic() + _PAUSE < deadline:
                time.sleep(_PAUSE)
                continue
            if isinstance(error, PoolBusy):
                raise
            raise GroupError(
                f"waited {said['timeout']:g} s for {whom}: {error}; start it with holdfast serve"
            ) from None


def _knock(address: tuple[str, int], said: dict[str, Any], deadline: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=max(_PAUSE, deadline - time.monotonic()))
    with ExitStack() as on_error:
        on_error.callback(connection.close)
        connection.sendall(json.dumps(said).encode() + b"\n")
        line = read_line(connection)
        if not line.startswith(b"{"):
            raise ValueError("what answers there is no memory rank")
        answered = json.loads(line)
        if "error" in answered:
            raise errors.by_name(answered["error"])(answered["message"])
        on_error.pop_all()
    return connection


def numeric_address(host: str) -> str | None:
    """Of this machine's where it is one; None for all of them. Raises OSError."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return None if ipaddress.ip_address(address).is_unspecified else address
