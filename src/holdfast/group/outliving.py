"""A memory rank that runs by itself: it owns its share of a pool's rows, and serves one set of trainers after another.

Its part of the pool stays open, and rows stay in its scratchpad, whatever becomes of the trainers. What the next ones
go on from is decided as when a group recovers: the newest step whose dense state is there and whose rows all have.

Invariants
- It listens at the address that it was given, and gloo on the interface that has it.
- One set of trainers at a time. Others are told so, and change nothing.
- Whatever trainers ask for that cannot be ends their attachment, not this process.
- Between two attachments no step is under way: what the last one had begun and not committed is taken back before the
  next one begins.
"""

from __future__ import annotations

import gc
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from socket import MSG_PEEK
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, GroupError, HoldfastError, PoolBusy
from holdfast.group.asking import Asked
from holdfast.group.attaching import GO, Hello, answer, numeric_address, read_line, split_address
from holdfast.group.group import Group
from holdfast.group.meeting import listen_on, reach_store, stay_on
from holdfast.group.notices import first_line
from holdfast.group.opening import KeptPart
from holdfast.group.options import GroupOptions
from holdfast.group.process_groups import let_go_of_failed
from holdfast.group.roles import Roles
from holdfast.group.shared_pool import SharedPool
from holdfast.pools.directory import check_nodes, make_pool_directory
from holdfast.pools.log_medium import LogMedium, directory_of_log
from holdfast.pools.victim_cache import VictimCache

_LINE_SECONDS = 5.0  # that whoever knocks has for a line
_LOOK = 0.25  # seconds: how soon it notices that it was asked to stop


class _Visitor:
    """Who knocked, and holds the door until all memory ranks have said yes."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self.connection = connection
        self.hello = hello

    def has_left(self) -> bool:
        """Whether nobody is at the door any more: it gave up, or died."""
        door = select.poll()  # whatever the number of its descriptor: a pool may have thousands open
        door.register(self.connection, select.POLLIN)
        try:
            return bool(door.poll(0)) and not self.connection.recv(1, MSG_PEEK)
        except OSError:
            return True

    def wants_in(self, stopping: Callable[[], bool]) -> bool:
        """Whether the others said yes, too."""
        waited = 0.0
        self.connection.settimeout(_LOOK)
        while waited < self.hello.timeout and not stopping():
            try:
                return read_line(self.connection) == GO
            except TimeoutError:
                waited += _LOOK
            except (OSError, ValueError):
                return False
        return False


class _Door:
    """Takes who knocks, one at a time, on a thread of its own. check: raises what refuses a visitor."""

    def __init__(self, address: tuple[str, int], check: Callable[[Hello], None]) -> None:
        self._listening = listen_on(*address)
        self._check = check
        self._visitors: queue.Queue[_Visitor] = queue.Queue()
        self._occupant = ""
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="holdfast-door", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def visitor(self) -> _Visitor | None:
        """The next one, whom nobody follows until `vacate`; None where nobody came soon."""
        with suppress(queue.Empty):
            return self._visitors.get(timeout=_LOOK)
        return None

    def vacate(self) -> None:
        with self._lock:
            self._occupant = ""

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listening.close()

    def _listen(self) -> None:
        self._listening.settimeout(_LOOK)
        while self._is_open:
            # Whoever it was is none of ours, or gone.
            with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                connection, _ = self._listening.accept()
                with ExitStack() as refused:
                    refused.callback(connection.close)
                    connection.settimeout(_LINE_SECONDS)
                    hello = Hello.parse(read_line(connection))
                    try:
                        self._check(hello)
                        self._let_in(hello)
                    except HoldfastError as error:
                        answer(connection, error)
                        continue
                    refused.pop_all()
                    self._visitors.put(_Visitor(connection, hello))

    def _let_in(self, hello: Hello) -> None:
        with self._lock:
            if self._occupant:
                raise PoolBusy(
                    f"memory rank {hello.memory_rank} serves {self._occupant} already: wait for them, or stop them"
                )
            trainers = "1 trainer" if hello.trainers == 1 else f"{hello.trainers} trainers"
            self._occupant = f"{trainers} of {hello.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMedia:
    """What a memory rank is told of its own machine, which trainers know nothing of: see holdfast.Pool."""

    log: LogMedium | None = None
    scratchpad_nodes: Sequence[int] = ()
    victims: VictimCache | None = None

    def check(self) -> None:
        """Raises ConfigError for what this machine does not have."""
        check_nodes(self.scratchpad_nodes)
        directory_of_log(self.log, log_store=True)
        if self.victims is not None:
            self.victims.check()


class _ServedPool(SharedPool):
    """The pool as a rank has it that has no script: made of what the trainers ask for."""

    def __init__(self, directory: Path, *, ranks: Group, asked: Asked, part: KeptPart, here: OwnMedia) -> None:
        own: dict[str, Any] = {part.name: getattr(here, part.name) for part in fields(here)}
        super().__init__(directory, **asked.pool, **own, group=GroupOptions(**asked.group), ranks=ranks)
        self._kept = part
        for tables, optimizer in asked.collections:
            self.open_rows(tables, optimizer, DeviceConfig())


class MemoryRank:
    """One of `memory_ranks`, the `number`-th from 1, over the pool in `directory`.

    address: HOST:PORT to listen at; port 0: any. media: of this machine. stopping: whether this process was asked
    to stop. say: told in a line what happens.

    Raises ConfigError, also where it cannot listen there; PoolExists, PoolError.
    """

    def __init__(
        self,
        directory: Path,
        *,
        number: int,
        memory_ranks: int,
        address: str,
        media: OwnMedia = OwnMedia(),
        stopping: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        if not 1 <= number <= memory_ranks:
            raise ConfigError(f"memory rank {number} of {memory_ranks}: count them from 1")
        media.check()  # and the next one: here whoever starts it is told, else trainers are
        make_pool_directory(directory)
        self._directory = directory
        self._number = number
        self._memory_ranks = memory_ranks
        self._stopping = stopping
        self._say = say
        self._part, self._media = KeptPart(), media
        host, port = split_address(address, "the address to listen at,")
        try:
            if (numeric := numeric_address(host)) is not None:
                stay_on(numeric)
            self._door = _Door((numeric or host, port), self._check)
        except OSError as error:
            raise ConfigError(
                f"a memory rank cannot listen at {address}: {error.strerror or error}; give it an address of this "
                "machine, and a port that is free (0: any)"
            ) from None
        say(f"memory rank {number} of {memory_ranks} of {directory}: process {os.getpid()} at {host}:{self._door.port}")

    def run(self) -> None:
        """Serves until it is asked to stop. Its part of the pool is closed cleanly when this returns."""
        with ExitStack() as stack:
            stack.callback(self._part.close)
            stack.callback(self._door.close)
            while not self._stopping():
                let_go_of_failed()
                visitor = self._door.visitor()
                if visitor is None:
                    continue
                with visitor.connection:
                    self._receive(visitor)
                gc.collect()  # of the attachment: its captures pin rows, and its collectives connections
                self._door.vacate()

    def end_steps(self) -> None:
        """No further step follows the one under way. From any thread."""
        pool = self._part.pool
        if pool is not None:
            pool.end_steps()

    def _check(self, hello: Hello) -> None:
        if (hello.memory_rank, hello.memory_ranks) != (self._number, self._memory_ranks):
            raise ConfigError(
                f"this is memory rank {self._number} of {self._memory_ranks}, and not {hello.memory_rank} of "
                f"{hello.memory_ranks}: name all memory ranks of the pool, in their order"
            )
        mine = {"holdfast": version("holdfast"), "torch": torch.__version__}
        for name, found in mine.items():
            if (theirs := getattr(hello, name)) != found:
                raise ConfigError(f"memory rank {self._number} has {name} {found}, the trainers have {theirs}")

    def _receive(self, visitor: _Visitor) -> None:
        hello = visitor.hello
        try:
            store = _reach(hello, lambda: self._stopping() or visitor.has_left())
        except GroupError as error:
            with suppress(OSError):
                answer(visitor.connection, error)
            return
        with suppress(OSError):
            answer(visitor.connection, None)
            if visitor.wants_in(self._stopping):
                self._serve(hello, store)

    def _serve(self, hello: Hello, store: PrefixStore) -> None:
        whose = f"{hello.trainers} trainer{'s' if hello.trainers > 1 else ''} of {hello.host}"
        try:
            roles = Roles(world_size=hello.trainers + self._memory_ranks, memory_ranks=self._memory_ranks)
            group = Group(
                store=store,
                rank=hello.trainers + self._number - 1,
                roles=roles,
                timeout=hello.timeout,
                stopping=self._stopping,
                are_apart=True,
            )
            with self._pool_of(group) as pool:
                step = pool.opened.step
                self._say(f"serving {whose} from step {step}: its part {self._part.how}")
                pool.serve()
                step = pool.opened.step
            self._say(f"{whose} ended at step {step}")
        except HoldfastError as error:
            self._say(f"no longer serving {whose}: {type(error).__name__}: {first_line(error)}")

    def _pool_of(self, group: Group) -> _ServedPool:
        try:
            return _ServedPool(
                self._directory, ranks=group, asked=Asked.heard(group), part=self._part, here=self._media
            )
        except BaseException as error:
            group.notices.leave_failure(error)
            group.close()
            raise


def _reach(hello: Hello, stopping: Callable[[], bool]) -> PrefixStore:
    """The trainers' store."""
    host, port = hello.store
    try:
        store = reach_store(host, port, hello.timeout, stopping)
    except GroupError as error:
        raise GroupError(
            f"memory rank {hello.memory_rank} does not reach the trainers' store (MASTER_ADDR and MASTER_PORT): {error}"
        ) from None
    return PrefixStore(hello.prefix, store)
