"""Power cuts of every verb that writes, on a recording of what it asks of the file system: what was read is as it was,
nothing half is believed, and the same command succeeds afterwards. crash_disk.py says what a cut may leave."""

from __future__ import annotations

import random
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash_disk import CrashDisk, Event
from holdfast import _core
from recorded_cuts import judge_cuts, record, recording_directory
from verbs import VERBS

CUTS = 30
SOAK_CUTS = 1_000

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]  # what all of them share is recorded in the first


@pytest.fixture(scope="module")
def recordings() -> Iterator[Path]:
    with recording_directory() as directory:
        record(directory, list(VERBS))
        yield directory


@pytest.fixture
def is_on_a_disk(recordings: Path) -> None:
    reader = _core.Reader(str(recordings / "second_life" / "before" / "pool"))
    if reader.header["level"] != "power":
        pytest.skip(f"{recordings} keeps nothing for a power cut")


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.usefixtures("is_on_a_disk")
def test_a_verb_whose_power_is_cut_leaves_nothing_half(name: str, recordings: Path) -> None:
    assert judge_cuts(recordings / name, name, seed=1, count=CUTS) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.usefixtures("is_on_a_disk")
def test_a_verb_whose_power_is_cut_anywhere_leaves_nothing_half(name: str, recordings: Path) -> None:
    failures = judge_cuts(recordings / name, name, seed=secrets.randbits(32), count=SOAK_CUTS)
    assert failures == [], "\n".join(failures)


@pytest.mark.usefixtures("is_on_a_disk")
def test_without_its_syncs_an_export_may_be_half_of_one(recordings: Path) -> None:
    """What shows that the cuts can find something: the same recording, in which nothing was synced."""
    assert judge_cuts(recordings / "export", "export", seed=1, count=CUTS, syncs=False) != []


def outcomes(base: Path, scratch: Path, recorded: list[Event], draws: int = 200) -> set[tuple[tuple[str, bytes], ...]]:
    """What a cut after these events may leave: names and contents."""
    disk = CrashDisk(base, as_path=Path("/root"))
    for event in recorded:
        disk.apply(event)
    found = set()
    for seed in range(draws):
        disk.cut(random.Random(seed), scratch / "left")
        files = sorted((scratch / "left").iterdir())
        found.add(tuple((path.name, path.read_bytes()) for path in files))
        shutil.rmtree(scratch / "left")
    return found


def write(name: str, data: bytes) -> Event:
    return Event("W", f"/root/{name}", "", 0, len(data), data)


def sync(name: str = "") -> Event:
    return Event("S", f"/root/{name}".rstrip("/"), "", 0, -1, b"")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def test_a_name_is_durable_once_its_directory_was_synced(base: Path, tmp_path: Path) -> None:
    made = [Event("F", "/root/a", "", 0, 0, b""), write("a", b"x"), sync("a")]
    assert outcomes(base, tmp_path, made) == {(), (("a", b"x"),)}
    assert outcomes(base, tmp_path, [*made, sync()]) == {(("a", b"x"),)}


def test_bytes_and_size_of_a_file_that_was_not_synced_come_apart(base: Path, tmp_path: Path) -> None:
    made = [Event("F", "/root/a", "", 0, 0, b""), sync(), write("a", b"x")]
    assert outcomes(base, tmp_path, made) == {(("a", b""),), (("a", b"\0"),), (("a", b"x"),)}


def test_a_rename_may_come_before_the_bytes_that_it_names(base: Path, tmp_path: Path) -> None:
    (base / "a").write_bytes(b"old")
    made = [
        Event("F", "/root/new", "", 0, 0, b""),
        write("new", b"new"),
        Event("R", "/root/new", "/root/a", 0, 0, b""),
    ]
    found = outcomes(base, tmp_path, made)
    assert (("a", b""),) in found
    assert (("a", b"old"),) in found
    synced = [*made[:2], sync("new"), made[2], sync()]
    assert outcomes(base, tmp_path, synced) == {(("a", b"new"),)}


def test_sectors_of_a_write_come_one_by_one(base: Path, tmp_path: Path) -> None:
    (base / "a").write_bytes(bytes(1024))
    found = {left[0][1] for left in outcomes(base, tmp_path, [write("a", b"x" * 1024)])}
    assert {(data[0], data[512]) for data in found} == {(0, 0), (0, 120), (120, 0), (120, 120)}
