"""What a process may use of its machine: memory and processors, less what cgroups and limits take from them, and what
other ranks of the same machine take (torchrun's LOCAL_WORLD_SIZE)."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from holdfast.errors import ConfigError

_SHARE = 0.25  # of one process
_SHARE_OF_ALL = 0.5  # of the ranks of a machine together
_PROC = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def default_scratchpad_bytes() -> int:
    """A quarter of the memory that this process may use; of several ranks on a machine each its part of a half of it,
    where that is less."""
    return int(usable_bytes() * min(_SHARE, _SHARE_OF_ALL / _ranks_here()))


def available_bytes(meminfo: Path = _MEMINFO, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What could be allocated now, within what the process's cgroups and those above them allow."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
    for directory in _directories(proc, cgroups, "memory"):
        used = _numbers(directory / "memory.current") or _numbers(directory / "memory.usage_in_bytes")
        if used and (limits := _memory_limits(directory)):
            available = min(available, max(0, min(limits) - used[0] + _reclaimable_bytes(directory)))
    return available


def spare_bytes(meminfo: Path = _MEMINFO) -> int:
    """What may be used for a while, beside whatever else runs: half of what is available, and a quarter of what this
    process may use at most."""
    return min(available_bytes(meminfo) // 2, int(usable_bytes() * _SHARE))


def default_threads() -> int:
    """For lookups and updates as many threads as PyTorch has, whose team they then are. Where torchrun has left a rank
    one thread, which is its default, the rank's part of the processors."""
    of_torch = torch.get_num_threads()
    ranks = _ranks_here()
    return of_torch if of_torch > 1 or ranks == 1 else max(1, usable_processors() // ranks)


def usable_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The least of the machine's memory, the limits of the process's cgroups and of those above them (a container's, a
    batch job's, a service's), and its limit of address space."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    for directory in _directories(proc, cgroups, "memory"):
        limits += _memory_limits(directory)
    return min(limits)


def usable_processors(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """As many as the process may run on at a time: by its affinity, and by quotas of its cgroups."""
    limits = [len(os.sched_getaffinity(0))]
    for directory in _directories(proc, cgroups, "cpu"):
        quota = _numbers(directory / "cpu.max")
        quota = quota or _numbers(directory / "cpu.cfs_quota_us") + _numbers(directory / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:
            limits.append(math.ceil(quota[0] / quota[1]))
    return max(1, min(limits))


def number_in(variable: str, least: int, most: int | None = None) -> int:
    """What a launcher says in a variable of the environment; the least where it is not set. Raises ConfigError."""
    said = os.environ.get(variable, str(least))
    if not said.isdecimal() or int(said) < least or (most is not None and int(said) > most):
        numbers = f"a number from {least}" + ("" if most is None else f" to {most}")
        of_ranks = f", with WORLD_SIZE = {os.environ['WORLD_SIZE']}" if variable == "RANK" else ""
        raise ConfigError(f"{variable} = {said!r}: it must be {numbers}{of_ranks}")
    return int(said)


def _ranks_here() -> int:
    return number_in("LOCAL_WORLD_SIZE", 1)


def _numbers(file: Path) -> list[int]:
    """What a file of a cgroup says; nothing where it says "max", or is not to be seen from here."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def _memory_limits(directory: Path) -> list[int]:
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    return [words[0] for name in names if (words := _numbers(directory / name))]


def _reclaimable_bytes(directory: Path) -> int:
    """Pages of files that count as used in a cgroup and those below it, and that nobody has asked for again: the kernel
    gives them up where memory is wanted."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    said = dict(line.split(maxsplit=1) for line in lines)
    return int(said.get("total_inactive_file", said.get("inactive_file", 0)))  # the total is version 1's


def _directories(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """Of the process's cgroups, of both versions, and of those above them. In a container the root is its own, and the
    path that the kernel tells may be none here."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        lines = []
    paths = {cgroups: "/", cgroups / controller: "/"}
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[cgroups] = path
        elif controller in controllers.split(","):
            paths[cgroups / controller] = path
    for root, path in paths.items():
        own = Path(path.lstrip("/"))
        if ".." in own.parts:  # it lies outside of this namespace
            own = Path()
        yield from (root / directory for directory in (own, *own.parents))
