"""How much memory a process may use: what the machine has, less what cgroups and limits take from that."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_SHARE = 0.25  # of one process
_SHARE_OF_ALL = 0.5  # of the ranks of a machine together


def default_scratchpad_bytes() -> int:
    """A quarter of the memory that this process may use; of several ranks on a machine (torchrun's LOCAL_WORLD_SIZE)
    each its part of a half of it, where that is less."""
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(usable_bytes() * min(_SHARE, _SHARE_OF_ALL / ranks_here))


def usable_bytes(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of the machine's memory, the limits of the process's cgroups and of those above them (a container's, a
    batch job's, a service's), and its limit of address space."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [machine, *_limits(proc, cgroups)]
    return min(limits if soft == resource.RLIM_INFINITY else [*limits, soft])


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for directory, name in _limited_by(proc, cgroups):
        try:
            yield int((directory / name).read_text())
        except (OSError, ValueError):  # a cgroup that is not to be seen from here, or "max"
            continue


def _limited_by(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str]]:
    """Directories of cgroups, and the files of each that have its limits: of both versions, from the process's own up.
    In a container the root is its own, and the path that the kernel tells may be none here."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        lines = []
    roots = {"0": (cgroups, ("memory.max", "memory.high")), "memory": (cgroups / "memory", ("memory.limit_in_bytes",))}
    paths = {"0": "/", "memory": "/"}
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["0"] = path
        elif "memory" in controllers.split(","):
            paths["memory"] = path
    for kind, (root, names) in roots.items():
        own = Path(paths[kind].lstrip("/"))
        if ".." in own.parts:  # it lies outside of this namespace
            own = Path()
        for directory in (own, *own.parents):
            yield from ((root / directory, name) for name in names)
