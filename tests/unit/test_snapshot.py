"""Snapshots of a pool at rest: what is in them, what a restore makes of them, and that damage is found before that."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_runs import Commands, pool_digest
from holdfast import _core
from holdfast.admin.snapshot import (
    Snapshot,
    layer_file,
    open_chain,
    output,
    restore_snapshot,
    runs,
    take_snapshot,
    taking,
)
from holdfast.admin.snapshot.chain import merged_rows
from holdfast.admin.snapshot.form import CHUNK, CHUNK_MAGIC, MANIFEST, crc_of
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.output import new_directory
from holdfast.admin.snapshot.rows import Rows, order_of
from holdfast.errors import (
    BrokenChain,
    ConfigError,
    Corrupted,
    FormatMismatch,
    Overtaken,
    PoolError,
    PoolExists,
    PoolFull,
    PoolNotFound,
    StepError,
)
from holdfast.files.manifests import checksum_of

pytestmark = pytest.mark.dear


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


@pytest.fixture
def chain(holdfast: Commands) -> Path:
    """The root of a pool of 6 steps, a snapshot `full` of step 3 and one of step 6 since that, `changed`."""
    root = holdfast.root
    assert holdfast.train("pool", "--set", "train.steps=3").code == 0
    take_snapshot(root / "pool", root / "full")
    assert holdfast.train("pool", "--set", "train.steps=6").code == 0
    take_snapshot(root / "pool", root / "changed", since=root / "full")
    return root


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and puts the right checksum under it."""
    file = path / MANIFEST
    said = json.loads(file.read_text())
    change(said)
    said.pop("crc32c", None)
    said["crc32c"] = checksum_of(said)
    file.write_text(json.dumps(said))


def rewrite(path: Path, name: str, chunks: bytes) -> None:
    """Replaces a file, with the right checksums in the manifest."""
    (path / name).write_bytes(chunks)
    reseal(path, lambda said: said["files"][name].update(bytes=len(chunks), crc32c=crc_of(chunks)))


def chunk(rows: list[int], row_bytes: int, **head: int) -> bytes:
    payload = np.array(rows, "<u8").tobytes() + bytes(len(rows) * row_bytes)
    said = {"num_rows": len(rows), "first": rows[0], "last": rows[-1], "payload_bytes": len(payload), **head}
    crc = crc_of(payload)
    packed = CHUNK.pack(CHUNK_MAGIC, *said.values(), crc, b"", 0)[:-4]
    return packed + crc_of(packed).to_bytes(4, "little") + payload


def test_the_commands_copy_a_pool_and_make_one_of_the_copy(holdfast: Commands) -> None:
    root = holdfast.root
    holdfast.train("pool", "--set", "train.steps=3")
    at_3 = holdfast.digest("pool")
    taken = holdfast("snapshot", root / "pool", root / "full")
    assert taken.code == 0 and "step 3" in taken.out
    holdfast.train("pool", "--set", "train.steps=6")
    at_6 = holdfast.digest("pool")
    taken = holdfast("snapshot", root / "pool", root / "changed", "--since", root / "full")
    assert taken.code == 0 and "rows that changed" in taken.out
    assert holdfast("restore", root / "full", root / "a").code == 0
    made = holdfast("restore", root / "changed", root / "b")
    assert made.code == 0 and "2 snapshot(s)" in made.out
    assert holdfast.digest("a") == at_3
    assert holdfast.digest("b") == at_6
    assert holdfast.train("a", "--set", "train.steps=6").code == 0
    assert holdfast.digest("a").whole == at_6.whole
    assert holdfast("verify", root / "a").code == 0


def test_the_commands_say_what_a_snapshot_holds_and_whether_it_is_whole(holdfast: Commands, chain: Path) -> None:
    said = holdfast("inspect", chain / "changed")
    assert said.code == 0 and "a snapshot of step 6" in said.out
    assert f"based on {chain / 'full'}: step 3" in said.out
    found = json.loads(holdfast("inspect", chain / "changed", "--json").out)
    assert [table["rows"] for table in found["tables"]] == [50, 7, 400]
    assert [(each["step"], each["bytes"]) for each in found["chain"]] == [
        (part.step, sum(file.stat().st_size for file in part.path.iterdir() if file.name != MANIFEST))
        for part in open_chain(chain / "changed")
    ]
    checked = holdfast("verify", chain / "changed")
    assert checked.code == 0 and "whole, a snapshot of step 6, with the 1 that it is based on" in checked.out
    assert holdfast("verify", "--repair", chain / "changed").code == 1
    older = chain / "full" / "table-0002.rows"
    data = bytearray(older.read_bytes())
    data[-1] ^= 1
    older.write_bytes(data)
    checked = holdfast("verify", chain / "changed")
    assert checked.code == 1 and str(older) in checked.err


def test_a_copy_leaves_the_processors_to_the_run(holdfast: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(os, "nice", lowered.append)
    holdfast.train("pool")
    assert (holdfast("snapshot", holdfast.root / "pool", holdfast.root / "copy").code, lowered) == (0, [10])


def test_help_teaches(holdfast: Commands) -> None:
    assert "--since" in holdfast("snapshot", "--help").out
    assert "digest" in holdfast("restore", "--help").out


def test_an_incremental_snapshot_has_the_changed_rows_alone(chain: Path) -> None:
    before = merged_rows(open_chain(chain / "full"), 0)
    known = {int(row): bytes(data) for rows in before for row, data in zip(rows.rows, rows.data, strict=True)}
    changed = [rows for layer in ("rows", "corrections") for rows in Snapshot.open(chain / "changed").layer(0, layer)]
    found = {int(row): bytes(data) for rows in changed for row, data in zip(rows.rows, rows.data, strict=True)}
    assert found
    assert all(known.get(row) != data for row, data in found.items())


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_since_a_snapshot_of_the_same_step_nothing_has_changed(holdfast: Commands, medium: str) -> None:
    root = holdfast.root
    assert holdfast.train("pool", "--set", "train.steps=4", "--set", f"pool.medium={medium}").code == 0
    full = take_snapshot(root / "pool", root / "full")
    assert full.rows + full.corrections > 0
    nothing = take_snapshot(root / "pool", root / "nothing", since=root / "full")
    assert (nothing.rows, nothing.corrections) == (0, 0)
    restore_snapshot(root / "nothing", root / "restored")
    assert pool_digest(root / "restored") == pool_digest(root / "pool")


def test_rows_that_lie_by_first_touch_are_copied_in_runs_and_make_the_same_pool(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES", 3000)
    for module in (output, layer_file):
        monkeypatch.setattr(module, "RUN_CHUNK_BYTES", 700)
    root = holdfast.root
    log = ("--set", "pool.medium=block", "--set", "pool.log_bytes=32768")
    assert holdfast.train("pool", "--set", "train.steps=20", *log).code == 0
    at_20 = holdfast.digest("pool")
    take_snapshot(root / "pool", root / "full")
    assert holdfast.train("pool", "--set", "train.steps=40", *log).code == 0
    take_snapshot(root / "pool", root / "changed", since=root / "full")
    assert json.loads((root / "full" / MANIFEST).read_text())["version"] == 2
    found = [int(row) for rows in Snapshot.open(root / "full").layer(2, "rows") for row in rows.rows]
    assert found == sorted(set(found))
    for medium in ("memory", "block"):
        restore_snapshot(root / "full", root / f"full-{medium}", medium=medium)
        assert pool_digest(root / f"full-{medium}") == at_20
        restore_snapshot(root / "changed", root / f"changed-{medium}", medium=medium)
        assert pool_digest(root / f"changed-{medium}") == holdfast.digest("pool")
        assert holdfast("verify", root / f"changed-{medium}").code == 0


def test_since_a_snapshot_that_the_log_goes_on_from_home_is_not_read(holdfast: Commands) -> None:
    root = holdfast.root
    small, large = "pool.log_bytes=32768", "pool.log_bytes=4194304"
    for pool, log_bytes in (("turned", small), ("there", large)):
        block = ("--set", "pool.medium=block", "--set", log_bytes)
        assert holdfast.train(pool, "--set", "train.steps=20", *block).code == 0
        take_snapshot(root / pool, root / f"{pool}-full")
        steps = 24 if pool == "there" else 60
        assert holdfast.train(pool, "--set", f"train.steps={steps}", *block).code == 0
        after = take_snapshot(root / pool, root / f"{pool}-since", since=root / f"{pool}-full")
        assert after.corrections > 0
        restore_snapshot(root / f"{pool}-since", root / f"{pool}-restored")
        assert pool_digest(root / f"{pool}-restored") == holdfast.digest(pool)
        assert (after.rows == 0) == (pool == "there")
        # Another pool with the same seed and, from here on, other steps: its log is not the one that went on.
        other = take_snapshot(root / f"{pool}-restored", root / f"{pool}-other", since=root / f"{pool}-full")
        restore_snapshot(root / f"{pool}-other", root / f"{pool}-again")
        assert other.step == after.step
        assert pool_digest(root / f"{pool}-again") == holdfast.digest(pool)


def test_a_pool_that_was_put_back_and_went_another_way_is_compared_in_full(holdfast: Commands) -> None:
    root = holdfast.root
    block = ("--set", "pool.medium=block", "--set", "pool.log_bytes=4194304")
    assert holdfast.train("pool", "--set", "train.steps=3", *block).code == 0
    shutil.copytree(root / "pool", root / "put_back")
    assert holdfast.train("pool", "--set", "train.steps=6", *block).code == 0
    take_snapshot(root / "pool", root / "full")
    shutil.rmtree(root / "pool")
    (root / "put_back").rename(root / "pool")
    assert holdfast.train("pool", "--set", "train.steps=9", "--set", "embedding.lr=0.5", *block).code == 0
    take_snapshot(root / "pool", root / "changed", since=root / "full")
    restore_snapshot(root / "changed", root / "restored")
    assert pool_digest(root / "restored") == holdfast.digest("pool")


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_snapshot_may_be_since_any_of_a_pool_with_the_same_seed(holdfast: Commands, medium: str) -> None:
    root = holdfast.root
    for pool, steps in (("long", 9), ("short", 2)):
        assert holdfast.train(pool, "--set", f"train.steps={steps}", "--set", f"pool.medium={medium}").code == 0
    take_snapshot(root / "long", root / "full")
    take_snapshot(root / "short", root / "changed", since=root / "full")  # rows of step 3 to 9 are untouched there
    restore_snapshot(root / "changed", root / "restored")
    assert holdfast.digest("restored") == holdfast.digest("short")


def test_a_new_pool_and_one_without_dense_state_have_snapshots(pool_root: Path) -> None:
    import holdfast
    from test_digest import Run

    for steps, name in ((0, "new"), (3, "rows_only")):
        run = Run(pool_root / name)
        with run.pool:
            for _ in range(steps):
                run.rows({"f": (np_ids(run.pool.step), offsets())}).values().sum().backward()
                run.rows.optimizer.step()
                run.pool.commit(5)
        assert take_snapshot(pool_root / name, pool_root / f"{name}-copy").step == steps
        restore_snapshot(pool_root / f"{name}-copy", pool_root / f"{name}-restored")
        assert pool_digest(pool_root / f"{name}-restored") == pool_digest(pool_root / name)
        with holdfast.Pool(pool_root / f"{name}-restored") as pool:
            assert pool.step == steps


def np_ids(step: int) -> Any:
    import torch

    return torch.arange(step * 10, step * 10 + 20)


def offsets() -> Any:
    import torch

    return torch.arange(20)


@given(st.integers(0, 2**40), st.lists(st.integers(0, 5000), max_size=300), st.sampled_from([1, 2**20]))
def test_rows_are_put_in_the_order_of_a_sort(first: int, offsets: list[int], stride: int) -> None:
    """However far apart they are; and what should not be, a row that is there twice, stays for others to see."""
    rows = np.array([first + offset * stride for offset in offsets], np.uint64)
    assert np.array_equal(order_of(rows), np.argsort(rows, kind="stable"))


def test_merged_layers_give_each_row_once_from_the_first_layer_that_has_it() -> None:
    def layer(*chunks: list[int], value: int) -> Any:
        return iter([Rows(np.array(rows, np.uint64), np.full((len(rows), 2), value, np.uint8)) for rows in chunks])

    merged = Merged([layer([3, 9], value=1), layer(value=2), layer([1, 3], [4, 9, 12], [20], value=3)])
    first = merged.take(3)
    assert first is not None
    assert first.rows.tolist() == [1, 3]
    assert first.data[:, 0].tolist() == [3, 1]
    assert merged.take(3) is None
    rest = list(merged)
    assert [row for rows in rest for row in rows.rows.tolist()] == [4, 9, 12, 20]
    assert [value for rows in rest for value in rows.data[:, 1].tolist()] == [3, 1, 3, 3]


def refused(chain: Path, error: type[Exception], match: str | None = None, name: str = "changed") -> None:
    """A restore ends in this error, and leaves nothing."""
    before = {path.name for path in chain.iterdir()}
    with pytest.raises(error, match=match):
        restore_snapshot(chain / name, chain / "restored")
    assert {path.name for path in chain.iterdir()} == before


def test_a_flipped_bit_anywhere_is_found_before_a_pool_is_made(chain: Path) -> None:
    rng = np.random.default_rng(4)
    flipped = 0
    for path in sorted([*(chain / "full").iterdir(), *(chain / "changed").iterdir()]):
        whole = path.read_bytes()
        for at in sorted({0, len(whole) - 2, *rng.integers(0, max(1, len(whole)), 6).tolist()}):
            if not 0 <= at < len(whole) or (path.name == MANIFEST and chr(whole[at]).isspace()):
                continue
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(damaged)
            refused(chain, PoolError)
            flipped += 1
        path.write_bytes(whole)
    assert flipped > 40
    restore_snapshot(chain / "changed", chain / "restored")


def damaged_parts(
    rng: np.random.Generator, files: dict[str, bytes], others: dict[str, bytes], name: str
) -> list[bytes]:
    """A file with a part zeroed, with two parts of one length swapped, with a part twice, and as others are."""
    whole = files[name]
    begin, end = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
    half = (end - begin) // 2
    return [
        whole[:begin] + bytes(end - begin) + whole[end:],
        whole[:begin]
        + whole[begin + half : begin + 2 * half]
        + whole[begin : begin + half]
        + whole[begin + 2 * half :],
        whole[:end] + whole[begin:end] + whole[end:],
        whole[:begin] + whole[end:],
        others.get(name, b""),
        files[str(rng.choice(sorted(files)))],
    ]


def test_parts_that_are_zeroed_swapped_doubled_or_of_another_file_are_found_before_a_pool_is_made(chain: Path) -> None:
    rng = np.random.default_rng(5)
    snapshots = {
        name: {path.name: path.read_bytes() for path in (chain / name).iterdir()} for name in ("full", "changed")
    }
    found = 0
    for name, other in (("full", "changed"), ("changed", "full")):
        for file, whole in sorted(snapshots[name].items()):
            for data in damaged_parts(rng, snapshots[name], snapshots[other], file):
                if data == whole:
                    continue
                (chain / name / file).write_bytes(data)
                refused(chain, PoolError)
                found += 1
            (chain / name / file).write_bytes(whole)
    assert found > 40


@pytest.mark.parametrize("name", ["table-0000.rows", "dense.tensors", "table-0002.corrections"])
def test_a_file_that_is_missing_or_of_another_length_is_damage(chain: Path, name: str) -> None:
    path = chain / "full" / name
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    refused(chain, Corrupted, name)
    path.write_bytes(whole[:-1])
    if whole:
        refused(chain, Corrupted, name)
    path.unlink()
    refused(chain, Corrupted, f"{name} is missing")


BAD_CHUNKS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "descending": (lambda size: chunk([5, 4], size), "out of order"),
    "twice": (lambda size: chunk([4, 4], size), "out of order"),
    "beyond the table": (lambda size: chunk([4, 1 << 40], size), "out of order"),
    "twice in two chunks": (lambda size: chunk([7], size) + chunk([7], size), "out of order"),
    "another first row": (lambda size: chunk([4, 5], size, first=3), "out of order"),
    "more rows than bytes": (lambda size: chunk([4, 5], size, num_rows=3), "cannot be"),
    "wider rows": (lambda size: chunk([4, 5], size + 1), "cannot be"),
    "no rows": (lambda size: chunk([4, 5], size, num_rows=0), "cannot be"),
    "cut": (lambda size: chunk([4, 5], size)[:-1], "beyond the file"),
    "cut in the head": (lambda size: chunk([4, 5], size)[:40], "head"),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_files_that_hold_their_checksums_are_still_not_believed(chain: Path, name: str) -> None:
    bad, match = BAD_CHUNKS[name]
    layout = Snapshot.open(chain / "full").tables[0].layout
    rewrite(chain / "full", "table-0000.rows", bad(layout.weight_bytes + layout.state_bytes))
    refused(chain, Corrupted, match)


def test_a_manifest_that_does_not_fit_is_refused(chain: Path) -> None:
    def other_manifest(error: type[Exception], match: str, change: Callable[[dict[str, Any]], object]) -> None:
        kept = (chain / "full" / MANIFEST).read_bytes()
        reseal(chain / "full", change)
        refused(chain, error, match, "full")
        (chain / "full" / MANIFEST).write_bytes(kept)

    other_manifest(FormatMismatch, "version 3", lambda said: said.update(version=3))
    other_manifest(FormatMismatch, "not the manifest", lambda said: said.update(format="another"))
    other_manifest(Corrupted, "no manifest", lambda said: said.pop("step"))
    other_manifest(Corrupted, "no manifest", lambda said: said["tables"][0].pop("name"))
    other_manifest(
        Corrupted, "files of 3 tables", lambda said: said["files"].update({"../x": said["files"]["dense.tensors"]})
    )
    (chain / "full" / MANIFEST).write_text("[]")
    refused(chain, Corrupted, "no manifest", "full")
    (chain / "full" / MANIFEST).unlink()
    refused(chain, FormatMismatch, "is no snapshot", "full")


def test_a_chain_that_is_broken_is_refused(chain: Path) -> None:
    (chain / "full").rename(chain / "elsewhere")
    refused(chain, BrokenChain, "put it there")
    take_snapshot(chain / "pool", chain / "full")  # another one
    refused(chain, BrokenChain, "but .*full is snapshot")
    shutil.rmtree(chain / "full")
    (chain / "elsewhere").rename(chain / "full")
    reseal(chain / "full", lambda said: said.update(seed=said["seed"] + 1))
    refused(chain, BrokenChain, "another seed")


def test_a_chain_may_be_moved_as_a_whole(chain: Path) -> None:
    (chain / "disk").mkdir()
    for name in ("full", "changed"):
        (chain / name).rename(chain / "disk" / name)
    restore_snapshot(chain / "disk" / "changed", chain / "restored")
    assert pool_digest(chain / "restored") == pool_digest(chain / "pool")


def test_what_is_there_is_not_overwritten_and_what_is_not_there_is_said(holdfast: Commands, chain: Path) -> None:
    (chain / "link").symlink_to(chain / "nowhere")  # for which no directory can be exchanged when all is copied
    for there in ("full", "pool", "link"):  # of which one is to be removed, least of all the pool
        with pytest.raises(ConfigError, match="is there already; a snapshot makes a new directory, name another"):
            take_snapshot(chain / "pool", chain / there)
    with pytest.raises(PoolExists):
        restore_snapshot(chain / "full", chain / "pool")
    with pytest.raises(PoolExists, match="link is there already"):
        restore_snapshot(chain / "full", chain / "link")
    with pytest.raises(PoolNotFound):
        take_snapshot(chain / "full", chain / "new")
    with pytest.raises(FormatMismatch, match="is no snapshot"):
        restore_snapshot(chain / "pool", chain / "new")
    with pytest.raises(StepError, match="is past"):
        take_snapshot(chain / "pool", chain / "new", step=5)
    holdfast.train("other", "--set", "train.steps=1", "--set", "data.synthetic.rows=[50,8,400]")
    with pytest.raises(ConfigError, match="other tables"):
        take_snapshot(chain / "other", chain / "new", since=chain / "full")
    assert not [path for path in chain.iterdir() if path.name.startswith(".") or path.name == "new"]


def test_a_run_that_laps_the_copy_again_and_again_is_an_error(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def lapped(self: Any, step: int | None) -> None:
        attempts.append(step)
        raise Overtaken("log-0000: the log came round before a record was read")

    monkeypatch.setattr(taking._Taking, "take", lapped)
    monkeypatch.setattr(taking, "is_in_use", lambda pool: True)
    with pytest.raises(Overtaken, match="larger log_bytes, or stop the run"):
        take_snapshot(chain / "pool", chain / "new")
    assert len(attempts) == 4
    assert not [path for path in chain.iterdir() if path.name.startswith(".") or path.name == "new"]


def test_damage_of_a_pool_at_rest_is_called_that(chain: Path) -> None:
    log = chain / "pool" / "dense-0"
    for name in ("dense-0", "dense-1"):
        log = chain / "pool" / name
        data = bytearray(log.read_bytes())
        data[4200] ^= 1
        log.write_bytes(data)
    with pytest.raises(Corrupted):
        take_snapshot(chain / "pool", chain / "new")


def test_a_full_disk_is_an_error_that_leaves_nothing(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2000

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PoolFull, match=r"No space left on device; free space there, .*; nothing is left of"):
        take_snapshot(chain / "pool", chain / "new")
    assert not [path for path in chain.iterdir() if path.name.startswith(".") or path.name == "new"]


@pytest.mark.parametrize("command", ["snapshot", "restore"])
def test_a_kill_in_the_middle_leaves_nothing_under_the_name(chain: Path, command: str) -> None:
    what = {
        "snapshot": "snapshot.take_snapshot(root / 'pool', root / 'new', on_rows=wait)",
        "restore": "snapshot.restore_snapshot(root / 'full', root / 'new', on_bytes=wait)",
    }[command]
    code = (
        "import sys, time, pathlib\nfrom holdfast.admin import snapshot\nroot = pathlib.Path(sys.argv[1])\n"
        f"def wait(rows):\n    print('now', flush=True)\n    time.sleep(60)\n{what}"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(chain)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    assert not (chain / "new").exists()
    assert hidden(chain), "nothing was begun"
    if command == "snapshot":
        take_snapshot(chain / "pool", chain / "new")
    else:
        restore_snapshot(chain / "full", chain / "new")
    assert hidden(chain) == []


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_what_a_process_of_the_same_number_left_does_not_stand_in_the_way(chain: Path) -> None:
    """Process ids come again, in containers from one start to the next."""
    for name in (f".new.{os.getpid()}.partial", f".new.{os.getpid()}.restoring"):
        (chain / name).mkdir()
        (chain / name / "pool.holdfast").write_bytes(b"half of something")
    take_snapshot(chain / "pool", chain / "new")
    shutil.rmtree(chain / "new")
    restore_snapshot(chain / "full", chain / "new")
    assert hidden(chain) == []


def test_what_another_process_is_making_is_left_alone(chain: Path) -> None:
    with new_directory(chain / "new", "partial") as theirs:
        (theirs / "file").write_bytes(b"theirs")
        take_snapshot(chain / "pool", chain / "new")
        assert (theirs / "file").read_bytes() == b"theirs"
        shutil.rmtree(chain / "new")
    assert (chain / "new" / "file").read_bytes() == b"theirs"
    with pytest.raises(PoolExists, match="somebody else made it"), new_directory(chain / "other", "partial"):
        take_snapshot(chain / "pool", chain / "other")
    assert hidden(chain) == []


def test_the_document_has_the_head_of_a_chunk_as_it_is_written() -> None:
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
    table = text.split("| field of a chunk's head |")[1].split("\n\n")[0]
    fields = re.findall(r"^\| (\d+) \| (\S+) \| `(\w+)` \|", table, re.MULTILINE)
    head = chunk([3, 8, 9], 5)[: CHUNK.size]
    said = {}
    end = 0
    for offset, kind, name in fields:
        assert int(offset) == end, name
        end += {"u8[8]": 8, "u8[16]": 16, "u32": 4, "u64": 8}[kind]
        said[name] = head[int(offset) : end]
    assert end == CHUNK.size
    assert said["magic"] == b"HFSNAPCH"
    numbers = {name: int.from_bytes(said[name], "little") for name in said}
    assert [numbers[name] for name in ("num_rows", "first_row", "last_row", "payload_bytes")] == [3, 3, 9, 39]
    assert numbers["reserved"] == 0
    assert numbers["crc"] == crc_of(head[:-4])


def test_the_cores_checksum_goes_on_where_it_was() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert _core.crc32c(0, data) == 0xE3069283
    assert _core.crc32c(_core.crc32c(0, data[:4]), data[4:]) == 0xE3069283


def test_a_snapshot_verifies_every_file_and_names_the_one_that_does_not_hold(chain: Path) -> None:
    snapshot = Snapshot.open(chain / "full")
    read: list[int] = []
    snapshot.verify(read.append)
    assert sum(read) == sum(file.bytes for file in snapshot.files.values())
    for name in snapshot.files:
        file = chain / "full" / name
        data = bytearray(file.read_bytes())
        if not data:
            continue
        data[len(data) // 2] ^= 1
        whole = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(Corrupted, match=re.escape(str(file))):
            snapshot.verify()
        file.write_bytes(whole)
    snapshot.verify()


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_memory_that_the_system_refuses_is_said_as_such_and_leaves_nothing(
    medium: str, holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.train("pool", "--set", f"pool.medium={medium}")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("holdfast.files.recycled._free", defaultdict(deque))
    monkeypatch.setattr("holdfast.files.recycled.mmap.mmap", refuse)
    result = holdfast("snapshot", holdfast.root / "pool", holdfast.root / "snapshot")
    assert result.code == 1
    assert re.fullmatch(r"holdfast: out of memory \([\d,]+ bytes\): .*`ulimit -v`.*\n", result.err), result.err
    assert {entry.name for entry in holdfast.root.iterdir()} == {"run.toml", "pool"}
