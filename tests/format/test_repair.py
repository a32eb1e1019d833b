"""`verify --repair`: what it puts right leaves the state as it was, all else is left as it is, and it may die."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from corruption import HISTORIES, KINDS, MadePool, make_pools
from damage import CHECKPOINT_OFFSETS, ROW_LOG, SUPERBLOCK, Files
from format_doc import CONSTANTS, LAYOUTS, Layout
from holdfast import Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.repair import problems_of, repair_pool
from holdfast.errors import PoolBusy, UntrustedPool
from holdfast.pools.directory import SUPERBLOCK_COPY as COPY
from pool_image import COMMIT, COMMIT_OFFSETS, DENSE, EPOCH, EPOCH_OFFSETS, PAYLOAD_OFFSET, seed_of
from tiny_pools import files_of

pytestmark = pytest.mark.dear

CLOSED, IN_A_STEP, SECOND_LIFE, GONE_ROUND = (
    "closed",
    "died in step 6",
    "died in the first step of its second life",
    "closed, its log gone round",
)


@pytest.fixture(scope="module")
def pools(new_root) -> dict[str, MadePool]:
    wanted = [history for history in HISTORIES if history.name in (CLOSED, IN_A_STEP, SECOND_LIFE, GONE_ROUND)]
    return {pool.name: pool for pool in make_pools(new_root(), wanted)}


@pytest.fixture
def lay(pools: dict[str, MadePool], pool_root: Path) -> Callable[[str, str], tuple[Path, MadePool]]:
    """Lays a pool down; the one before is gone."""

    def lay(kind: str, history: str) -> tuple[Path, MadePool]:
        shutil.rmtree(pool_root)
        directory = pool_root / "pool"
        made = pools[f"{kind}, {history}"]
        for name, data in made.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return directory, made

    return lay


STORES = [kind.name for kind in KINDS]


def change(directory: Path, name: str, offset: int, data: bytes | None = None) -> None:
    """data: None: one byte, to another than it was."""
    with (directory / name).open("r+b") as file:
        file.seek(offset)
        if data is None:
            data = bytes([file.read(1)[0] ^ 0xA5])
            file.seek(offset)
        file.write(data)


def records(files: Files, name: str, offsets: tuple[int, int], layout: Layout, *order: str) -> tuple[int, int]:
    """The offsets of the record that counts, and of the other one."""
    newest = max(offsets, key=lambda offset: [layout.unpack(files[name], offset)[field] for field in order])
    (older,) = set(offsets) - {newest}
    return newest, older


def is_whole_at(directory: Path, made: MadePool, *, trusted: bool = False) -> None:
    assert problems_of(directory) == []
    with Pool(directory, trust_after_reboot=trusted) as pool:
        assert pool.step == made.expected_step
    assert digest_pool(_core.Reader(str(directory))).whole == made.good[made.expected_step]


def is_repaired(directory: Path, made: MadePool, *words: str) -> None:
    """repair says what it does with these words, takes nothing but damage away, and keeps what it replaced."""
    damaged = files_of(directory)
    assert problems_of(directory)
    report = repair_pool(directory)
    assert report.left == []
    assert any(all(word in line for word in words) for line in report.done), report.done
    assert report.backup is not None
    take_back(report.backup)
    assert files_of(directory) == damaged
    assert repair_pool(directory).left == []
    is_whole_at(directory, made)


def take_back(backup: Path) -> None:
    for line in reversed(backup.read_text().splitlines()):
        edit = json.loads(line)
        change(Path(edit["file"]).parent, Path(edit["file"]).name, edit["offset"], bytes.fromhex(edit["before"]))
        os.truncate(edit["file"], edit["file_bytes"])


def is_left_alone(directory: Path, *words: str) -> None:
    damaged = files_of(directory)
    report = repair_pool(directory)
    assert report.left
    assert (report.done, report.backup) == ([], None)
    assert any(all(word in line for word in words) for line in report.refusals), report.refusals
    assert files_of(directory) == damaged


# What is put right.


@pytest.mark.parametrize("store", STORES)
def test_the_older_epoch_record_of_a_closed_pool(lay, store: str):
    for field in EPOCH.fields:
        directory, made = lay(store, CLOSED)
        _, older = records(made.files, SUPERBLOCK, EPOCH_OFFSETS, EPOCH, "epoch", "clean")
        change(directory, SUPERBLOCK, older + field.offset)
        is_repaired(directory, made, f"{SUPERBLOCK} at offset {older}", "epoch record")


def test_an_epoch_record_that_was_lost_before_the_machine_went_down_leaves_the_choice_to_the_user(lay):
    directory, made = lay("in place", CLOSED)
    newest, older = records(made.files, SUPERBLOCK, EPOCH_OFFSETS, EPOCH, "epoch", "clean")
    record = bytearray(made.files[SUPERBLOCK][newest : newest + EPOCH.size])
    record[16:32] = bytes(16)
    EPOCH.seal(record, seed=seed_of((directory / "pool.holdfast").read_bytes()))
    change(directory, SUPERBLOCK, newest, bytes(record))
    change(directory, SUPERBLOCK, older + 9)
    report = repair_pool(directory)
    assert report.left == []
    assert "trust_after_reboot" in report.done[0]
    with pytest.raises(UntrustedPool):
        Pool(directory)
    is_whole_at(directory, made, trusted=True)


@pytest.mark.parametrize("store", STORES)
def test_the_newest_epoch_record_of_a_life_that_was_not_closed(lay, store: str):
    directory, made = lay(store, SECOND_LIFE)
    newest, _ = records(made.files, SUPERBLOCK, EPOCH_OFFSETS, EPOCH, "epoch", "clean")
    change(directory, SUPERBLOCK, newest + 8)
    is_repaired(directory, made, f"{SUPERBLOCK} at offset {newest}", "epoch record")


@pytest.mark.parametrize("store", STORES)
def test_the_older_commit_record_of_a_closed_pool(lay, store: str):
    for history in (CLOSED, GONE_ROUND):
        directory, made = lay(store, history)
        _, older = records(made.files, SUPERBLOCK, COMMIT_OFFSETS, COMMIT, "epoch", "step")
        change(directory, SUPERBLOCK, older + 50)
        is_repaired(directory, made, f"{SUPERBLOCK} at offset {older}", "is emptied")


def test_the_newest_commit_record_of_a_closed_log_store(lay):
    for history in (CLOSED, GONE_ROUND):
        directory, made = lay("log store", history)
        newest, _ = records(made.files, SUPERBLOCK, COMMIT_OFFSETS, COMMIT, "epoch", "step")
        change(directory, SUPERBLOCK, newest + 16)
        is_repaired(directory, made, f"{SUPERBLOCK} at offset {newest}", "written anew")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("history", [CLOSED, IN_A_STEP])
def test_the_dense_slot_that_does_not_count(lay, store: str, history: str):
    def cut(directory: Path, name: str) -> None:
        os.truncate(directory / name, 100)

    def strike_payload(directory: Path, name: str) -> None:
        change(directory, name, PAYLOAD_OFFSET + 3)

    def strike_header(directory: Path, name: str) -> None:
        change(directory, name, 18)

    for strike in (cut, strike_payload, strike_header):
        directory, made = lay(store, history)
        name = min(("dense-0", "dense-1"), key=lambda slot: DENSE.unpack(made.files[slot])["step"])
        strike(directory, name)
        if history == IN_A_STEP and strike is strike_header:
            Pool(directory).close()  # a torn one, as a crash leaves it: opening empties it
            is_whole_at(directory, made)
        else:
            is_repaired(directory, made, f"{name} at offset 0", "is emptied")


def test_the_older_checkpoint_of_a_closed_row_log(lay):
    for history in (CLOSED, GONE_ROUND):
        directory, made = lay("log store", history)
        _, older = records(made.files, ROW_LOG, CHECKPOINT_OFFSETS, LAYOUTS["RowLogCheckpoint"], "sequence")
        change(directory, ROW_LOG, older + 30)
        is_repaired(directory, made, f"{ROW_LOG} at offset {older}", "is emptied")


def test_touched_bits_behind_the_last_row(lay):
    directory, made = lay("in place", CLOSED)
    change(directory, "shard-0000/table-0002.touched", 7, b"\x80")
    is_repaired(directory, made, "table-0002.touched at offset 0", "cleared")


# What is not.


def test_a_dense_header_that_is_older_than_its_payload_is_not_believed(lay, pools: dict[str, MadePool]):
    # It says an earlier step than the other slot's, but what is lost is the newest state.
    directory, made = lay("in place", IN_A_STEP)
    name = max(("dense-0", "dense-1"), key=lambda slot: DENSE.unpack(made.files[slot])["step"])
    steps = {DENSE.unpack(older[name])["step"]: older[name][: DENSE.size] for older in made.older}
    change(directory, name, 0, steps[3])
    is_left_alone(directory, f"{name} at offset 0", "may hold the newest state")


def labels(directory: Path) -> dict[str, int]:
    """The files of a pool that have a label, and where it is."""
    found = {}
    for name, data in files_of(directory).items():
        at = data.find(b"HFLABEL\n")
        if at >= 0:
            found[name] = at
    return found


@pytest.mark.parametrize("store", STORES)
def test_a_label_of_which_a_byte_was_lost(lay, store: str):
    directory, made = lay(store, CLOSED)
    label = LAYOUTS["FileLabel"]
    for number, (name, at) in enumerate(labels(directory).items()):
        for byte in range(number % 3, label.size, 3):
            change(directory, name, at + byte)
            assert any("label" in problem for problem in problems_of(directory))
            report = repair_pool(directory)
            assert report.left == [] and "the label is written anew" in report.done[0]
            assert files_of(directory) == made.files, (name, byte)
    is_whole_at(directory, made)


@pytest.mark.parametrize("store", STORES)
def test_labels_of_all_files_at_once_in_a_pool_that_died(lay, store: str):
    directory, made = lay(store, IN_A_STEP)
    for name, at in labels(directory).items():
        change(directory, name, at + LAYOUTS["FileLabel"].size - 1)
    is_repaired(directory, made, "label")


def test_a_label_that_says_nothing_any_more_is_not_made_up(lay):
    directory, _ = lay(STORES[0], CLOSED)
    name, at = next(iter(labels(directory).items()))
    change(directory, name, at, bytes(LAYOUTS["FileLabel"].size))
    is_left_alone(directory, "its label does not say")


def test_a_file_of_another_pool_with_a_damaged_label_is_not_made_this_ones(lay, pools: dict[str, MadePool]):
    directory, _ = lay(STORES[0], CLOSED)
    name, at = next(iter(labels(directory).items()))
    other = bytearray(pools[f"{STORES[0]}, {IN_A_STEP}"].files[name])
    other[at + 40] ^= 0xA5  # in its reserved bytes: nothing but the checksum says what was there
    (directory / name).write_bytes(bytes(other))
    is_left_alone(directory, "its label does not say")


@pytest.mark.parametrize("store", STORES)
def test_the_newest_dense_state_is_not_given_up(lay, store: str):
    for offset in (18, PAYLOAD_OFFSET + 3):
        directory, made = lay(store, CLOSED)
        name = max(("dense-0", "dense-1"), key=lambda slot: DENSE.unpack(made.files[slot])["step"])
        change(directory, name, offset)
        is_left_alone(directory, f"{name} at offset 0", "may hold the newest state")


def test_the_newest_commit_record_in_place_is_not_made_up(lay):
    directory, made = lay("in place", CLOSED)
    newest, _ = records(made.files, SUPERBLOCK, COMMIT_OFFSETS, COMMIT, "epoch", "step")
    change(directory, SUPERBLOCK, newest + 16)
    is_left_alone(directory, f"{SUPERBLOCK} at offset {newest}", "the newest commit record is lost")


def test_which_record_counts_is_not_guessed_in_a_pool_that_does_not_say_where_it_ended(lay):
    directory, made = lay("in place", CLOSED)
    newest, _ = records(made.files, SUPERBLOCK, EPOCH_OFFSETS, EPOCH, "epoch", "clean")
    record = bytearray(made.files[SUPERBLOCK][newest : newest + EPOCH.size])
    struct.pack_into("<20x", record, EPOCH.field("has_steps").offset)
    EPOCH.seal(record, seed=seed_of((directory / "pool.holdfast").read_bytes()))
    change(directory, SUPERBLOCK, newest, bytes(record))
    _, older = records(made.files, SUPERBLOCK, COMMIT_OFFSETS, COMMIT, "epoch", "step")
    change(directory, SUPERBLOCK, older + 16)
    is_left_alone(directory, f"{SUPERBLOCK} at offset {older}", "does not say at which step it was closed")


@pytest.mark.parametrize("store", STORES)
def test_what_nothing_else_says_is_not_made_up(lay, store: str):
    log = ROW_LOG if store == "log store" else "log-0000"
    for name, offset in ((SUPERBLOCK, 40), (SUPERBLOCK, CONSTANTS["tables_offset"] + 8)):
        directory, _ = lay(store, CLOSED)
        (directory / COPY).unlink()
        change(directory, name, offset)
        is_left_alone(directory, name, f"there is no {COPY} that says what it was")
    directory, _ = lay(store, CLOSED)
    (directory / log).unlink()
    report = repair_pool(directory)
    assert log in report.left[0]
    assert (report.done, report.backup) == ([], None)


def test_a_row_at_home_that_does_not_hold_is_left_as_it_is(lay):
    directory, made = lay("log store", GONE_ROUND)
    struck = next(place for place in made.places if place.structure == "row image")
    for place in made.places:
        if place.target == struck.target:
            change(directory, place.file, place.begin)
    damaged = files_of(directory)
    report = repair_pool(directory)
    assert all(".home at offset" in problem and "row" in problem for problem in report.left)
    assert report.done == []
    assert files_of(directory) == damaged


def test_a_pool_in_use_is_not_repaired(lay):
    directory, _ = lay("in place", CLOSED)
    with Pool(directory), pytest.raises(PoolBusy):
        repair_pool(directory)


# A repair that dies.


def several_at_once(directory: Path, made: MadePool) -> None:
    _, epoch = records(made.files, SUPERBLOCK, EPOCH_OFFSETS, EPOCH, "epoch", "clean")
    change(directory, SUPERBLOCK, epoch + 9)
    older = min(("dense-0", "dense-1"), key=lambda slot: DENSE.unpack(made.files[slot])["step"])
    change(directory, older, PAYLOAD_OFFSET + 3)
    if "log-0000" in made.files:
        change(directory, "shard-0000/table-0002.touched", 7, b"\x80")


class DiedError(Exception):
    pass


@pytest.mark.parametrize("store", STORES)
def test_a_repair_that_ends_at_any_sync_is_begun_again(lay, store: str, monkeypatch: pytest.MonkeyPatch):
    syncs, dies_at = 0, 1
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == dies_at:
            raise DiedError
        real(descriptor)

    while True:
        directory, made = lay(store, CLOSED)
        several_at_once(directory, made)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            syncs = 0
            try:
                repair_pool(directory)
                break
            except DiedError:
                dies_at += 1
        assert repair_pool(directory).left == []
        is_whole_at(directory, made)
    assert dies_at > 5


@pytest.mark.parametrize("store", STORES)
def test_a_repair_without_room_for_its_backup_names_it_and_leaves_none(
    lay, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, made = lay(store, CLOSED)
    change(directory, SUPERBLOCK, 0, b"lost")
    damaged = files_of(directory)

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 0 and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*pool\.repair-.*\.jsonl"):
        repair_pool(directory)
    monkeypatch.undo()
    assert files_of(directory) == damaged
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert repair_pool(directory).left == []
    is_whole_at(directory, made)


@pytest.mark.parametrize("store", STORES)
def test_half_an_edit_leaves_nothing_worse(lay, store: str):
    for part in range(1, EPOCH.size, 7):
        directory, made = lay(store, CLOSED)
        several_at_once(directory, made)
        ((file, offset, data, _), *_), _ = _core.plan_repair(str(directory))
        change(Path(file).parent, Path(file).name, offset, data[:part])
        assert problems_of(directory)
        assert repair_pool(directory).left == []
        is_whole_at(directory, made)


def test_a_repair_that_is_killed_is_begun_again(lay):
    directory, made = lay("log store", CLOSED)
    several_at_once(directory, made)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom holdfast.admin import repair\nwrite = repair._write\n"
        "def once(*edit):\n    write(*edit)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "repair._write = once\nrepair.repair_pool(Path(sys.argv[1]))"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(directory)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert repair_pool(directory).left == []
    is_whole_at(directory, made)
