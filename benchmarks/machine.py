"""What the benchmark ran on, and whether it was alone there."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)


def _cpu_ticks() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def others_busy(seconds: float = 0.3) -> dict[str, float]:
    """CPUs in use while this process sleeps (stolen ones too), and the load average, which remembers our own work."""
    before = _cpu_ticks()
    time.sleep(seconds)
    spent = [after - then for after, then in zip(_cpu_ticks(), before, strict=True)]
    total = max(1, sum(spent))
    num_cpus = os.cpu_count() or 1
    return {
        "cpus": num_cpus * (total - spent[_IDLE] - spent[_IOWAIT]) / total,
        "stolen_cpus": num_cpus * spent[_STEAL] / total,
        "load_average": os.getloadavg()[0],
    }


class Beside:
    """Around a block: cpus, that others used meanwhile, stolen ones among them. Own are this process and its children
    that have ended."""

    cpus = 0.0

    def __enter__(self) -> Self:
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        seconds, used_s, own_s = (after - then for after, then in zip(self._now(), self._before, strict=True))
        self.cpus = max(0.0, used_s - own_s) / max(seconds, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks, own = _cpu_ticks(), os.times()
        used = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
        return time.monotonic(), used / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def wait_until_idle(patience_s: float, *, most_cpus: float = 0.2) -> bool:
    """Waits until others use next to no CPU, for so long at most; whether they do."""
    end = time.monotonic() + patience_s
    while others_busy(1.0)["cpus"] > most_cpus:
        if time.monotonic() > end:
            return False
    return True


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _file_system(path: Path) -> str:
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    best = max((mount for mount in mounts if path.absolute().is_relative_to(mount[1])), key=lambda mount: len(mount[1]))
    return f"{best[2]} ({best[1]})"


def _thp(name: str) -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage") / name
    text = path.read_text() if path.exists() else "[unknown]"
    return text[text.index("[") + 1 : text.index("]")]


def _commit() -> str:
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def in_words(machine: Mapping[str, Any]) -> str:
    """What `describe` found, as reports name it."""
    return f"{machine['processor']}, {machine['cpus']} CPUs, {machine['kernel']}"


def describe(medium: Path, disk: Path) -> dict[str, Any]:
    """Hardware, kernel and file systems."""
    cache = Path("/sys/devices/system/cpu/cpu0/cache")
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "caches": [
            f"L{(index / 'level').read_text().strip()} {(index / 'type').read_text().strip().lower()} "
            f"{(index / 'size').read_text().strip()}"
            for index in sorted(cache.glob("index*"))
        ],
        "memory": _field("/proc/meminfo", "MemTotal"),
        "hypervisor": "hypervisor" in _field("/proc/cpuinfo", "flags").split(),
        "kernel": f"{platform.system()} {platform.release()}",
        "transparent_huge_pages": {"anonymous": _thp("enabled"), "shared": _thp("shmem_enabled")},
        "medium": _file_system(medium),
        "disk": _file_system(disk),
        "holdfast_commit": _commit(),
    }
