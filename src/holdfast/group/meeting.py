"""Where the ranks of a group meet, and on which addresses they listen.

Neither torch.distributed's store nor gloo asks who is there: whoever reaches a port of theirs can read and change what
ranks send each other. So they listen where they must, and nowhere else where that is for us to say.

Invariants
- A store may outlive a group: torchrun's, a script's own, and rank 0's, which stays for as long as its process. What a
  group leaves in it has a prefix that no other group has: a program may open one pool after the other, or again.
- Rank 0 names the prefix; the others take it once each, and the last of them takes the name away: a process that comes
  later, in place of one that died, waits for the next.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from holdfast.errors import GroupError
from holdfast.group.notices import first_line

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_GROUP, _NONE = "group", "none"
_LOOK_SECONDS = 0.01  # at most
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_mine: dict[tuple[int, str | None, str | None], Store] = {}  # rank 0's, by process, MASTER_ADDR and MASTER_PORT
_last_taken: dict[int, str] = {}  # by process: the prefix of its newest group


def stay_on_one_machine() -> None:
    """Lets gloo listen on the loopback interface where all ranks are on this machine and nobody said where."""
    all_are_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or _is_loopback()
    if all_are_here and _GLOO_INTERFACE not in os.environ and _LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ[_GLOO_INTERFACE] = _LOOPBACK


def meet(timeout: float) -> tuple[Store, int, int]:
    """The store of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; this rank and how many there are. timeout: seconds.

    Rank 0's listens on MASTER_ADDR, where that is an address of its machine and not torchrun's store.

    Raises GroupError.
    """
    try:
        return _meet(timedelta(seconds=timeout))
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise GroupError(
                f"rank 0 cannot listen at {where}, where somebody else does: set MASTER_PORT to a free port"
            ) from None
        waited = "the others' word at" if os.environ["RANK"] == "0" else "rank 0 at"
        raise GroupError(
            f"rank {os.environ['RANK']} waited {timeout:g} s for {waited} {where}: {first_line(error)}"
        ) from None


def of_this_group(
    met: Store, rank: int, world_size: int, timeout: float, stopping: Callable[[], bool] = lambda: False
) -> Store:
    """The part of a store that is this group's alone. All ranks call it for each group. Raises GroupError."""
    # torchrun may keep its store when it starts the ranks again.
    words = PrefixStore(f"holdfast/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", met)
    try:
        if rank == 0:
            prefix = uuid4().hex
            words.set(_GROUP, prefix)
        else:
            prefix = _newly_named(words, timeout, stopping)
            if words.add(f"{prefix}/taken", 1) == world_size - 1:
                words.compare_set(_GROUP, prefix, _NONE)
    except RuntimeError as error:  # dist.DistError is one
        raise GroupError(f"rank {rank} waited for rank 0 to open the pool: {first_line(error)}") from None
    _last_taken[os.getpid()] = prefix
    return PrefixStore(prefix, words)


def _newly_named(words: Store, timeout: float, stopping: Callable[[], bool]) -> str:
    """What rank 0 names after the last group that this process was in."""
    last, deadline, pause = _last_taken.get(os.getpid()), time.monotonic() + timeout, 0.001
    while True:
        named = words.get(_GROUP).decode() if words.check([_GROUP]) else _NONE
        if named not in (_NONE, last):
            return named
        if stopping():
            raise RuntimeError("stopped")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        met, rank, world_size = next(rendezvous("env://", timeout=timeout))
        return met, rank, world_size
    world_size = int(os.environ["WORLD_SIZE"])
    place = os.getpid(), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if place not in _mine:
        _mine[place] = _listen(world_size, timeout)
        # Its destructor waits for its thread, which a forked child that exits does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_mine[place]))
    return _mine[place], 0, world_size


def _listen(world_size: int, timeout: timedelta) -> Store:
    listening = _listen_on_master_address()
    if listening is None:
        met: Store = next(rendezvous("env://", timeout=timeout))[0]
        return met
    address, port = listening.getsockname()[:2]
    # Shared with what the script's own init_process_group asks for in this process.
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listening.detach(),
        multi_tenant=True,
    )


def stay_on(address: str) -> None:
    """Lets gloo listen on the interface that has this address of the machine's, where nobody said where."""
    if _GLOO_INTERFACE not in os.environ and (interface := _interface_of(ipaddress.ip_address(address))) is not None:
        os.environ[_GLOO_INTERFACE] = interface


def _interface_of(address: Address) -> str | None:
    if address.is_loopback:
        return _LOOPBACK
    if address.version == 6:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((words[5] for words in lines if words[0] == address.packed.hex()), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == address.packed:
                    return name
    return None


def _is_loopback() -> bool:
    address = _master_address()
    return address is not None and address.is_loopback


def _master_address() -> Address | None:
    """None where it is a name: what that means on this machine may be another thing than on the others."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        return ipaddress.ip_address("127.0.0.1" if name == "localhost" else name)
    except ValueError:
        return None


def _listen_on_master_address() -> socket.socket | None:
    """None where it is no address of this machine, or the port is taken: then torch says what is wrong."""
    address = _master_address()
    if address is None:
        return None
    with suppress(OSError):
        return listen_on(str(address), int(os.environ["MASTER_PORT"]))
    return None


def listen_on(address: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening
