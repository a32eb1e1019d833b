"""Where the ranks of a group meet, and on which addresses they listen.

Neither torch.distributed's store nor gloo asks who is there: whoever reaches a port of theirs can read and change what
ranks send each other. So they listen where they must, and nowhere else where that is for us to say.

Invariants
- A store may outlive a group: torchrun's, a script's own, and rank 0's, which stays for as long as its process. What a
  group leaves in it has a prefix that no other group has: a program may open one pool after the other, or again.
- Rank 0 names the prefix; the others take it once each, and the last of them takes the name away: a process that comes
  later, in place of one that died, waits for the next.
- Only the name of a rank 0 that lives is taken: one that was killed before all had come leaves its own in a store that
  outlives it. (torchrun's count of restarts tells such names apart on one machine alone: another's counts otherwise.)
- Ranks wait for each other here, where a wait hears of a signal and ends after the timeout, before torch and gloo do:
  torch's client of a store that is not there waits for up to three times as long, of one that was stopped for ever, and
  no signal reaches it.
"""

from __future__ import annotations

import atexit
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
from functools import partial
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast.errors import ConfigError, GroupError
from holdfast.group.notices import first_line, names_of
from holdfast.group.store_answers import AskedStore, asked
from holdfast.pools.machine import number_in

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_GROUP, _NONE = "group", "none"
_REFUSED = "refused"
_LOOK_SECONDS = 0.01  # at most
_END_SECONDS = 1.0  # for a store to answer, when the process ends
_KNOCKING_SECONDS = 0.1  # between two attempts to reach a store
_CONNECTING_SECONDS = 2.0  # of one of them
_GREETING_SECONDS = 5.0  # of torch's client, for what listens there to show that it is a store
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_mine: dict[tuple[int, str, int], Store] = {}  # rank 0's, by process, MASTER_ADDR and MASTER_PORT
_last_taken: dict[int, str] = {}  # by process: the prefix of its newest group


def choose_interface() -> None:
    """Lets gloo listen where nobody said where: on the loopback interface where all ranks are on this machine; on the
    one that faces MASTER_ADDR where the machine's name, by which gloo would choose, leads others nowhere."""
    if _GLOO_INTERFACE in os.environ:
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "") or _is_loopback():
        if _LOOPBACK in [name for _, name in socket.if_nameindex()]:
            os.environ[_GLOO_INTERFACE] = _LOOPBACK
    elif (host := os.environ.get("MASTER_ADDR")) and all(address.is_loopback for address in _of_this_name()):
        with suppress(OSError):  # whoever waits for MASTER_ADDR next says what is wrong with it
            mine = address_towards(host)
            if not ipaddress.ip_address(mine).is_loopback:
                stay_on(mine)


def address_towards(host: str) -> str:
    """This machine's, from which that one is reached. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def _of_this_name() -> list[Address]:
    """The addresses of the machine's name, for the machine itself."""
    try:
        return [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def how_gloo_connects() -> str:
    """To be said where ranks were all there and gloo did not connect them; empty where they are on one machine."""
    chosen = os.environ.get(_GLOO_INTERFACE)
    if chosen == _LOOPBACK:
        return ""
    here = f"{chosen} here" if chosen else "not set here"
    own = ", ".join(sorted({str(address) for address in _of_this_name()})) or "no address"
    return (
        f"; all of them were there before: if they still are, gloo cannot connect them. Let {_GLOO_INTERFACE} ({here}) "
        f"name the interface at which the others reach each machine, at any port; without it gloo listens where the "
        f"machine's name leads ({own} here)"
    )


def check_interfaces() -> None:
    """Raises ConfigError where gloo cannot listen on what GLOO_SOCKET_IFNAME names: what gloo says of that
    would be taken for a connection that broke."""
    for name in filter(None, os.environ.get(_GLOO_INTERFACE, "").split(",")):
        try:
            dist.ProcessGroupGloo.create_device(interface=name)
        except RuntimeError as error:
            known = ", ".join(known for _, known in socket.if_nameindex())
            raise ConfigError(
                f"gloo cannot listen on {_GLOO_INTERFACE} = {name}, and this machine has {known}: {first_line(error)}"
            ) from None


def meet(timeout: float, stopping: Callable[[], bool] = lambda: False) -> tuple[Store, int, int]:
    """The store of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; this rank and how many there are. timeout: seconds.

    Rank 0's listens on MASTER_ADDR, where that is an address of its machine and not torchrun's store.

    Raises ConfigError where a variable is missing or cannot be, GroupError.
    """
    unset = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if unset:
        raise ConfigError(
            f"RANK is set, and {' and '.join(unset)} not: start the processes with torchrun, which sets all of them; "
            "or unset RANK for a process alone"
        )
    world_size = number_in("WORLD_SIZE", 1)
    rank = number_in("RANK", 0, world_size - 1)
    # Nobody else could know which port the system has chosen.
    host, port = os.environ["MASTER_ADDR"], number_in("MASTER_PORT", 0 if world_size == 1 else 1, 65535)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _own_store(host, port, world_size, timeout), rank, world_size
    try:
        return reach_store(host, port, timeout, stopping), rank, world_size
    except GroupError as error:
        raise GroupError(f"rank {rank} waited for the group's store (of rank 0, or torchrun's): {error}") from None


def reach_store(host: str, port: int, timeout: float, stopping: Callable[[], bool] = lambda: False) -> Store:
    """The one that listens there, when it does. Raises GroupError."""
    deadline = time.monotonic() + timeout
    while not stopping():
        left, doubt = deadline - time.monotonic(), ""
        try:
            with socket.create_connection((host, port), timeout=_CONNECTING_SECONDS) as reached:
                address = reached.getpeername()[0]  # of a name's, torch's client spends all its time on the first
            doubt = "; or what listens there is another program"
            greeting = min(left / 2, _GREETING_SECONDS)  # half: torch's client has ended when we give up
            return asked(partial(_connect, address, port, timeout, greeting), left, stopping)
        except (OSError, dist.DistError) as error:
            if time.monotonic() > deadline:
                why = f"{first_line(error)}{doubt}"
                raise GroupError(f"{host}:{port} did not answer within {timeout:g} s: {why}") from None
            time.sleep(_KNOCKING_SECONDS)
    raise GroupError("stopped")


def _connect(host: str, port: int, timeout: float, greeting: float) -> TCPStore:
    """timeout: of what the store is asked later."""
    store = TCPStore(host, port, timeout=timedelta(seconds=max(_KNOCKING_SECONDS, greeting)), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def of_this_group(
    met: Store, rank: int, world_size: int, timeout: float, stopping: Callable[[], bool] = lambda: False
) -> Store:
    """The part of a store that is this group's alone. All ranks call it for each group. Raises ConfigError where they
    are told different numbers of ranks, GroupError."""
    shared = PrefixStore("holdfast", met)
    words = AskedStore(shared, timeout, stopping)
    try:
        if rank == 0:
            prefix = f"{uuid4().hex}-{world_size}"
            words.set(_GROUP, prefix)
            if world_size > 1:
                _stand_by(shared, prefix, 2 * timeout)
        else:
            prefix = _newly_named(words, timeout, stopping)
            if (ranks := prefix.rpartition("-")[2]) != str(world_size):
                refusal = f"rank {rank} has WORLD_SIZE = {world_size}, rank 0 has {ranks}: make them the same"
                raise _refused(AskedStore(PrefixStore(prefix, shared), timeout, stopping), refusal)
            if words.add(f"{prefix}/taken", 1) == world_size - 1:
                words.compare_set(_GROUP, prefix, _NONE)
    except (RuntimeError, TimeoutError) as error:  # dist.DistError is a RuntimeError
        raise GroupError(f"rank {rank} waited for rank 0 to open the pool: {first_line(error)}") from None
    _last_taken[os.getpid()] = prefix
    return PrefixStore(prefix, shared)


def await_others(
    store: Store, rank: int, world_size: int, timeout: float, stopping: Callable[[], bool] = lambda: False
) -> None:
    """Until all ranks have called this, with the group's part of the store. Raises ConfigError where two are one rank,
    or where gloo cannot listen where one says; GroupError, which names those that have not."""
    deadline, pause = time.monotonic() + timeout, 0.001
    ours = AskedStore(store, timeout, stopping)
    try:
        if ours.add(f"here-{rank}", 1) > 1:
            raise _refused(ours, f"two processes have RANK = {rank}: give each of the {world_size} a number of its own")
        try:
            check_interfaces()
        except ConfigError as error:
            raise _refused(ours, f"rank {rank}: {error}") from None
        here = ours.add("here", 1)
        while here < world_size:
            if stopping():
                raise GroupError(f"rank {rank} waited for all ranks to be there: stopped")
            if ours.has(_REFUSED):
                raise ConfigError(ours.get(_REFUSED))
            if time.monotonic() > deadline:
                late = [other for other in range(world_size) if not ours.has(f"here-{other}")]
                raise GroupError(
                    f"rank {rank} waited {timeout:g} s for {names_of(late)} to be there: see what became of "
                    f"{'it' if len(late) == 1 else 'them'}, and start all ranks again"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
            here = ours.add("here", 0)
    except (RuntimeError, TimeoutError) as error:  # dist.DistError is a RuntimeError
        raise GroupError(f"rank {rank} waited for all ranks to be there: {first_line(error)}") from None


def _refused(ours: AskedStore, why: str) -> ConfigError:
    """What to raise, when those that wait for others have been told."""
    ours.set(_REFUSED, why)
    return ConfigError(why)


def _stand_by(shared: Store, prefix: str, seconds: float) -> None:
    """Shows from now on that the rank 0 that named this prefix lives, until all have taken it, or long enough."""
    deadline, is_over = time.monotonic() + seconds, Event()

    def beat() -> None:
        with suppress(RuntimeError):  # of a store that is gone: whoever waits next says so
            while time.monotonic() < deadline and shared.get(_GROUP) == prefix.encode():
                shared.add(_beats_key(prefix), 1)
                if is_over.wait(_LOOK_SECONDS):
                    return
        atexit.unregister(end)

    def end() -> None:
        """An interpreter that ends while a thread of Python's is in the store aborts."""
        is_over.set()
        beating.join(_END_SECONDS)

    beating = Thread(target=beat, name="holdfast-named", daemon=True)
    atexit.register(end)
    beating.start()


def _beats_key(prefix: str) -> str:
    return f"{prefix}/beats"


def _newly_named(words: AskedStore, timeout: float, stopping: Callable[[], bool]) -> str:
    """What rank 0 names after the last group that this process was in."""
    last, deadline, pause = _last_taken.get(os.getpid()), time.monotonic() + timeout, 0.001
    seen, beats_then = _NONE, 0
    while True:
        named = words.get(_GROUP) if words.has(_GROUP) else _NONE
        if named not in (_NONE, last):
            beats = words.add(_beats_key(named), 0)
            if named == seen and beats > beats_then:
                return named
            seen, beats_then = named, beats
        if stopping():
            raise RuntimeError("stopped")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)


def _own_store(host: str, port: int, world_size: int, timeout: float) -> Store:
    """Rank 0's. Raises GroupError."""
    place = os.getpid(), host, port
    if place in _mine:
        return _mine[place]
    listening = _listen_on_master_address()
    if listening is None:
        host = _own_address_of(host)
    else:
        host, port = listening.getsockname()[:2]
    try:
        # Shared with what the script's own init_process_group asks for in this process.
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
            multi_tenant=True,
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise GroupError(
                f"rank 0 cannot listen at {host}:{port}, where somebody else does: set MASTER_PORT to a free port"
            ) from None
        raise GroupError(
            f"rank 0 cannot listen at {host}:{port}: {first_line(error)}; MASTER_ADDR has to lead to the machine that "
            "rank 0 runs on"
        ) from None
    # Its destructor waits for its thread, which a forked child that exits does not have.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    _mine[place] = store
    return store


def _own_address_of(host: str) -> str:
    """That of the name's addresses which this machine has: its own client reaches the store there, whatever the others
    lead to. The name itself where there is none. Raises GroupError where it has no address: torch asks for it again and
    again, for three times the timeout."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise GroupError(f"rank 0 cannot listen at MASTER_ADDR = {host}: {error}") from None
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return str(address[0])
    return host


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
