"""Hosts of their own on this machine: network namespaces, each with one cable to a switch that all share.

    with Network(2) as (first, second):
        server = second.start(["python", "server.py", second.address])
        first.run(["python", "client.py", second.address])
        second.cut()

Invariants
- Nothing outside is touched: the switch is a bridge in one more namespace, so addresses and cables can clash with
  nobody's, and nothing leads out.
- Hosts share everything but the network: files, the clock, process ids. The pid of a process that was started is the
  command's own, to be signalled like any other.
- Leaving a network kills every process in it, and takes namespaces and cables away; so does failing to make it.
- A cable that is cut loses what is sent over it, and says nothing to the processes at either end.

A host has ``lo`` and ``eth0``, without IPv6. What looks up its own host name finds nothing useful here: gloo wants
GLOO_SOCKET_IFNAME=eth0, and rendezvous an address. Wants root and Debian's iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

INTERFACE = "eth0"
_numbers = count()


class NetworkError(RuntimeError):
    """What ``ip`` or ``tc`` would not do."""


class Host:
    """One namespace. ``address`` is its IPv4 address, which all hosts of the network reach."""

    def __init__(self, name: str, address: str, switch: str, port: str) -> None:
        self.name = name
        self.address = address
        self._switch = switch
        self._port = port  # the switch's end of the cable

    def command(self, command: list[str]) -> list[str]:
        """``command`` as it is to be run from outside."""
        return ["ip", "netns", "exec", self.name, *command]

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(command), text=True, **options)

    def run(self, command: list[str], *, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` to its end, with its output captured, whatever its exit status."""
        return subprocess.run(self.command(command), text=True, capture_output=True, timeout=timeout, **options)

    def cut(self) -> None:
        """Pulls the cable. Connections stay open, and carry what they have once it is back."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        _call("ip", "-n", self._switch, "link", "set", self._port, "up")

    def slow(self, bits_per_s: int) -> None:
        """Holds the cable to ``bits_per_s`` each way (the kernel's token bucket, sch_tbf), until ``hasten``."""
        for namespace, interface in self._ends():
            _call(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root"),
                *("tbf", "rate", f"{bits_per_s}bit", "burst", "32kb", "latency", "400ms"),
            )

    def hasten(self) -> None:
        for namespace, interface in self._ends():
            _call("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root")

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.name, INTERFACE), (self._switch, self._port)


class Network:
    """``num_hosts`` hosts at one switch, from ``with`` to its end."""

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= 200:
            raise ValueError(f"a network has 1 to 200 hosts, not {num_hosts}")
        name = f"holdfast-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{name}-switch"
        self.hosts = [
            Host(f"{name}-{number}", f"10.77.0.{number + 1}", self._switch, f"port{number}")
            for number in range(num_hosts)
        ]
        self._made = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as made:
            self._make_namespace(self._switch, made)
            _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _call("ip", "-n", self._switch, "link", "set", "bridge", "addrgenmode", "none", "up")
            for number, host in enumerate(self.hosts):
                self._make_namespace(host.name, made)
                self._connect(host, f"port{number}")
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def _make_namespace(self, name: str, made: ExitStack) -> None:
        _call("ip", "netns", "add", name)
        made.callback(_remove_namespace, name)
        _call("ip", "-n", name, "link", "set", "lo", "up")

    def _connect(self, host: Host, port: str) -> None:
        _call(
            *("ip", "-n", self._switch, "link", "add", port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", host.name),
        )
        _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "addrgenmode", "none", "up")
        _call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _call("ip", "-n", host.name, "link", "set", INTERFACE, "addrgenmode", "none", "up")


def why_not() -> str | None:
    """What keeps this process from making networks; None if nothing does."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip (Debian's iproute2)"
    try:
        with Network(1):
            return None
    except NetworkError as error:
        return str(error)


def why_not_slow() -> str | None:
    """What keeps this process from slowing hosts; None if nothing does."""
    if (reason := why_not()) is not None:
        return reason
    if shutil.which("tc") is None:
        return "there is no tc (Debian's iproute2)"
    try:
        with Network(1) as (host,):
            host.slow(1_000_000)
            return None
    except NetworkError as error:
        return str(error)


def _remove_namespace(name: str) -> None:
    while pids := _call("ip", "netns", "pids", name).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
    _call("ip", "netns", "delete", name)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
