"""How much memory a scratchpad is given where nobody says: a share of what the process may use, whoever limits it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from holdfast.pools import memory

GIB = 1 << 30
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def usable(tmp_path: Path, of_process: str, limits: dict[str, object]) -> int:
    """Of a process with such a /proc/self/cgroup, where files below /sys/fs/cgroup have these contents."""
    (tmp_path / "cgroup").write_text(of_process)
    root = tmp_path / "sys"
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{limit}\n")
    return memory.usable_bytes(tmp_path / "cgroup", root)


@pytest.mark.parametrize(
    ("of_process", "limits"),
    [
        ("0::/\n", {"memory.max": GIB}),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": GIB, "a.slice/memory.max": "max"}),
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/memory.max": GIB, "slurm/job_7/step_0/memory.max": 2 * GIB}),
        ("0::/a.slice\n", {"a.slice/memory.max": "max", "a.slice/memory.high": GIB}),
        ("0::/not/to/be/seen\n", {"memory.max": GIB}),
        ("0::/../../above\n", {"memory.max": GIB}),
        ("4:cpu,memory:/docker/1\n0::/\n", {"memory/docker/1/memory.limit_in_bytes": GIB}),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": GIB}),
    ],
)
def test_a_limit_counts_wherever_it_is_set(tmp_path: Path, of_process: str, limits: dict[str, object]) -> None:
    assert usable(tmp_path, of_process, limits) == GIB


@pytest.mark.parametrize("of_process", ["", "0::/\n", "nonsense", "0::/a\n4:memory:/b\n"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, of_process: str) -> None:
    limits = {"memory.max": "max", "memory/memory.limit_in_bytes": 9223372036854771712}
    assert usable(tmp_path, of_process, limits) == MACHINE


def test_a_limit_of_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, resource.RLIM_INFINITY))
    assert usable(tmp_path, "", {}) == GIB


@pytest.mark.parametrize(("ranks", "share"), [(None, 4), ("1", 4), ("2", 4), ("4", 8), ("8", 16)])
def test_ranks_of_a_machine_take_half_of_it_together(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, share: int
) -> None:
    monkeypatch.setattr(memory, "usable_bytes", lambda: 64 * GIB)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert memory.default_scratchpad_bytes() == 64 * GIB // share
