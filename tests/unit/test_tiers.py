"""Tiers are declared strictly, and a probe measures them and leaves nothing behind."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.placement import probe as probing
from holdfast_lab.placement.probe import NUM_STEPS, probe
from holdfast_lab.placement.tiers import Tier, read_tiers, tiers_toml

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiers.toml"

DISK = Tier(
    name="disk",
    kind="block",
    capacity_bytes=10**12,
    read_bandwidth_bytes_per_s=2e9,
    write_bandwidth_bytes_per_s=1e9,
    read_latency_ns=80_000.0,
    access_granularity_bytes=512,
    random_reads_per_s=1e5,
    endurance_drive_writes_per_day=1.0,
    endurance_years=5.0,
)


def test_the_example_is_read_and_every_tier_of_it_is_whole():
    tiers = read_tiers(EXAMPLE).tiers
    assert [tier.kind for tier in tiers] == ["hbm", "dram", "byte", "block"]
    assert tiers[3].endurance_bytes == 30 * 5 * 365 * 4 * 10**12
    assert tiers[0].endurance_bytes is None


def test_what_is_written_is_read_back(tmp_path: Path):
    path = tmp_path / "tiers.toml"
    path.write_text(tiers_toml([DISK], ["as new", "not at all"]))
    assert path.read_text().startswith("# as new\n# not at all\n")
    assert read_tiers(path).tiers == (DISK,)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("capacity_bytes = 1000000000000", "", r"missing: tiers\[0\].capacity_bytes"),
        ("capacity_bytes = 1000000000000", "capacity_bytes = 1e12", r"tiers\[0\].capacity_bytes: found .* an integer"),
        ("capacity_bytes = 1000000000000", "capacity_bytes = 0", r"tiers\[0\]: capacity_bytes = 0; .* more than 0"),
        ("read_latency_ns = 80000.0", "read_latency_ns = -1", r"tiers\[0\]: read_latency_ns = -1"),
        ("read_latency_ns = 80000.0", "read_latency_ns = nan", r"tiers\[0\]: read_latency_ns = nan"),
        (
            "read_latency_ns = 80000.0",
            "read_latency_ns = 1e308",
            r"read_latency_ns = 1e\+308; .* 0 or more, from 1e-06 to 1e\+30",
        ),
        ("read_latency_ns", "read_latency", r"tiers\[0\].read_latency: unknown key; did you mean read_latency_ns\?"),
        ('kind = "block"', 'kind = "disk"', r"tiers\[0\].kind: found \"disk\""),
        ('kind = "block"', 'kind = "byte"', r"tiers\[0\]: endurance_years belongs to block tiers"),
        ("random_reads_per_s = 100000.0", "", r"tiers\[0\]: random_reads_per_s is missing"),
        ("endurance_years = 5.0", "", r"tiers\[0\]: endurance_.* only together"),
        ('name = "disk"', 'name = ""', r"tiers\[0\]: name is empty"),
        ("[[tiers]]", "[tiers]", r"tiers: found a table, expected an array"),
        ("[[tiers]]", "[[tiers", r"not TOML"),
    ],
)
def test_tiers_are_read_strictly(tmp_path: Path, old: str, new: str, named: str):
    path = tmp_path / "tiers.toml"
    text = tiers_toml([DISK], [])
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=named) as caught:
        read_tiers(path)
    assert str(path) in str(caught.value)


def test_no_tiers_and_one_name_twice_are_refused(tmp_path: Path):
    path = tmp_path / "tiers.toml"
    path.write_text("tiers = []")
    with pytest.raises(ConfigError, match="at least one is needed"):
        read_tiers(path)
    path.write_text(tiers_toml([DISK, DISK], []))
    with pytest.raises(ConfigError, match="'disk' is there more than once"):
        read_tiers(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_SECONDS", 0.02)
    monkeypatch.setattr(probing, "_MEMORY_BYTES", 16 << 20)


def check(tier: Tier) -> None:
    for value in (tier.read_bandwidth_bytes_per_s, tier.write_bandwidth_bytes_per_s):
        assert math.isfinite(value)
        assert value > 1e6
    assert 0 < tier.read_latency_ns < 1e10
    assert tier.random_reads_per_s is not None
    assert tier.random_reads_per_s > 1
    assert tier.capacity_bytes > 0


@pytest.mark.usefixtures("quick")
def test_a_probe_gives_sane_numbers_says_how_far_it_is_and_leaves_nothing(tmp_path: Path):
    steps = []
    found = probe(tmp_path, on_step=lambda done, total=None, /: steps.append(done), file_bytes=16 << 20)
    for tier in found.tiers:
        check(tier)
    assert found.tiers[0].kind == "dram"
    assert sum(steps) == NUM_STEPS
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "tiers.toml"
    path.write_text(tiers_toml(found.tiers, found.notes))
    assert read_tiers(path).tiers == found.tiers


@pytest.mark.usefixtures("quick")
def test_memory_under_a_directory_is_measured_as_byte_addressable_and_said_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(probing, "_file_system", lambda directory: "tmpfs")
    found = probe(tmp_path, on_step=lambda done, total=None, /: None, file_bytes=16 << 20)
    check(found.tiers[1])
    assert (found.tiers[1].name, found.tiers[1].kind) == ("tmpfs", "byte")
    assert "no O_DIRECT" in found.notes[1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_an_interrupted_probe_leaves_no_file_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed_files: bool
):
    open_file = os.open

    def without_unnamed_files(path: os.PathLike[str], flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not here")
        return open_file(path, flags, *rest)

    if not has_unnamed_files:
        monkeypatch.setattr(os, "open", without_unnamed_files)
    num_steps = 0

    def interrupt(done: int, total: int | None = None, /) -> None:
        nonlocal num_steps
        num_steps += done
        if num_steps == 6:
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing itself is one
    with pytest.raises(KeyboardInterrupt):
        probe(tmp_path, on_step=interrupt, file_bytes=16 << 20)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # noqa: PTH208


def test_an_error_in_one_thread_ends_all_and_surfaces():
    def work(thread: int, is_over: Callable[[], bool]) -> int:
        if thread == 2:
            raise OSError(5, "the medium fails")
        while not is_over():
            pass
        return 1

    with pytest.raises(OSError, match="the medium fails"):
        probing._in_threads(4, work, seconds=60.0)


def test_a_probe_takes_no_more_than_a_quarter_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Little:
        f_bavail, f_frsize = 1000, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Little)
    with pytest.raises(ConfigError, match=r"4,096,000 bytes are free.*at least 67,108,864 are needed"):
        probe(tmp_path, on_step=lambda done, total=None, /: None)
    with pytest.raises(ConfigError, match="no such directory"):
        probe(tmp_path / "nowhere", on_step=lambda done, total=None, /: None)
