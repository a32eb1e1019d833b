"""What a process takes of its machine where nobody says: a share of what it may use, whoever limits it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.pools import machine

GIB = 1 << 30
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def lay(tmp_path: Path, of_process: str, limits: dict[str, object]) -> tuple[Path, Path]:
    """Such a /proc/self/cgroup, and a /sys/fs/cgroup whose files have these contents."""
    (tmp_path / "cgroup").write_text(of_process)
    root = tmp_path / "sys"
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{limit}\n")
    return tmp_path / "cgroup", root


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
    assert machine.usable_bytes(*lay(tmp_path, of_process, limits)) == GIB


@pytest.mark.parametrize("of_process", ["", "0::/\n", "nonsense", "0::/a\n4:memory:/b\n"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, of_process: str) -> None:
    limits = {"memory.max": "max", "memory/memory.limit_in_bytes": 9223372036854771712}
    assert machine.usable_bytes(*lay(tmp_path, of_process, limits)) == MACHINE


def test_a_limit_of_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, resource.RLIM_INFINITY))
    assert machine.usable_bytes(*lay(tmp_path, "", {})) == GIB


@pytest.mark.parametrize(
    ("of_process", "limits", "processors"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("2:cpu,cpuacct:/docker\n", {"cpu/docker/cpu.cfs_quota_us": 20000, "cpu/docker/cpu.cfs_period_us": 10000}, 2),
        ("2:cpu:/docker\n", {"cpu/docker/cpu.cfs_quota_us": -1, "cpu/docker/cpu.cfs_period_us": 10000}, 9),
        ("0::/\n", {"cpu.max": "10000 100000"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000"}, 9),
    ],
)
def test_a_quota_of_processors_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_process: str, limits: dict[str, object], processors: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert machine.usable_processors(*lay(tmp_path, of_process, limits)) == processors


@pytest.mark.parametrize(("of_torch", "ranks", "expected"), [(32, 1, 32), (1, 1, 1), (1, 8, 8), (1, 100, 1), (6, 8, 6)])
def test_threads_are_as_many_as_torchs_but_where_torchrun_leaves_it_one(
    monkeypatch: pytest.MonkeyPatch, of_torch: int, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(machine, "usable_processors", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert machine.default_threads() == expected


def test_a_pool_follows_torchs_threads_unless_somebody_chose(tmp_path: Path) -> None:
    script = """
import sys, torch, holdfast
from holdfast import _core
torch.set_num_threads(3)
holdfast.Pool(sys.argv[1] + "/one")
assert _core.num_threads() == 3, _core.num_threads()
_core.set_num_threads(2)
holdfast.Pool(sys.argv[1] + "/other")
assert _core.num_threads() == 2, _core.num_threads()
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


@pytest.mark.parametrize(("ranks", "share"), [(None, 4), ("1", 4), ("2", 4), ("4", 8), ("8", 16)])
def test_ranks_of_a_machine_take_half_of_it_together(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, share: int
) -> None:
    monkeypatch.setattr(machine, "usable_bytes", lambda: 64 * GIB)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert machine.default_scratchpad_bytes() == 64 * GIB // share


def test_what_may_be_used_for_a_while_is_half_of_what_is_free_and_a_quarter_of_all_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "_directories", lambda *_: iter(()))
    meminfo = tmp_path / "meminfo"
    for free, spare in ((2, 1), (15, 4)):
        meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemFree: 3 kB\nMemAvailable: {free << 20} kB\nBuffers: 0 kB\n")
        assert machine.spare_bytes(meminfo) == spare * GIB


@pytest.mark.parametrize(
    ("of_process", "files", "available"),
    [
        ("0::/\n", {"memory.max": 4 * GIB, "memory.current": GIB}, 3),
        ("0::/\n", {"memory.max": "max", "memory.current": GIB}, 8),
        ("0::/\n", {"memory.max": 4 * GIB, "memory.high": 2 * GIB, "memory.current": GIB}, 1),
        ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
        ("0::/job/step\n", {"job/memory.max": 4 * GIB, "job/memory.current": 2 * GIB, "job/step/memory.current": 0}, 2),
        ("4:memory:/job\n", {f"memory/job/memory.{n}_in_bytes": g * GIB for n, g in (("limit", 4), ("usage", 3))}, 1),
        (
            "0::/\n",
            {"memory.max": 4 * GIB, "memory.current": 4 * GIB, "memory.stat": f"anon 9\ninactive_file {3 * GIB}"},
            3,
        ),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": 4 * GIB,
                "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}",
            },
            2,
        ),
    ],
)
def test_what_is_available_is_what_every_cgroup_has_left_with_the_files_that_it_only_caches(
    tmp_path: Path, of_process: str, files: dict[str, object], available: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {8 << 20} kB\n")
    assert machine.available_bytes(meminfo, *lay(tmp_path, of_process, files)) == available * GIB
