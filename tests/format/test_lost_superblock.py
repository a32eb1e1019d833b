"""A pool that lost the file which says what it is: nothing is made over what is left, and a repair puts it back."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.repair import problems_of, repair_pool
from holdfast.errors import Corrupted, PoolOfGroup
from holdfast.pools.optim import Adam, RowWiseAdagrad
from holdfast.pools.read_only import at_rest, open_reader
from holdfast.rows.embedding import EmbeddingBagCollection
from tiny_pools import ADAGRAD_TABLES, ADAM_TABLES, TABLES, Writer, files_of, image_of

pytestmark = pytest.mark.dear

SUPERBLOCK, COPY, MARK = "pool.holdfast", "pool.copy", "unpublished"
STORES = {"in_place": {}, "row_checksums": {"row_checksums": True}, "log_store": {"log_store": True}}


class Tiny(Writer):
    log_bytes = 40960


@pytest.fixture(params=STORES)
def pool(request, pool_root: Path) -> Path:
    """Of five steps, closed."""
    writer = Tiny(pool_root / "pool", made_with=STORES[request.param])
    writer.steps(5)
    writer.pool.close()
    return pool_root / "pool"


def digest(directory: Path) -> str:
    return digest_pool(_core.Reader(str(directory))).whole


def refuses(directory: Path, *words: str, kind: type[Exception] = Corrupted) -> None:
    before = files_of(directory)
    for opened in (Pool, open_reader, lambda path: at_rest(path).__enter__()):
        with pytest.raises(kind) as raised:
            opened(directory)
        assert all(word in str(raised.value) for word in words), raised.value
    with pytest.raises((Corrupted, kind)):
        _core.Pool.create(str(directory), 1, 1 << 16, specs())
    assert files_of(directory) == before


# What is refused.


def test_a_pool_without_its_superblock_is_refused_and_nothing_of_it_is_touched(pool: Path):
    shutil.move(pool / SUPERBLOCK, pool.parent / "aside")
    refuses(pool, SUPERBLOCK, "verify --repair")
    shutil.move(pool.parent / "aside", pool / SUPERBLOCK)
    with Pool(pool) as opened:
        assert opened.step == 5


def test_any_single_file_that_is_left_of_a_pool_is_refused(pool: Path):
    whole = files_of(pool)
    for name in whole:
        if name == SUPERBLOCK:
            continue
        shutil.rmtree(pool)
        (pool / name).parent.mkdir(parents=True)
        (pool / name).write_bytes(whole[name])
        refuses(pool, name)


def test_verify_names_the_lost_superblock(pool: Path):
    (pool / SUPERBLOCK).unlink()
    assert any(SUPERBLOCK in problem for problem in problems_of(pool))


def test_foreign_files_are_no_part_of_a_pool_and_stay(pool_root: Path):
    directory = pool_root / "pool"
    mine = ("metrics.jsonl", "shard-old/notes", "shard-0000/notes", "writers-1.bak/x", "dense/notes", "log-0000.txt")
    for name in mine:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")
    before = files_of(directory)
    with Pool(directory) as made:
        EmbeddingBagCollection(made, ADAGRAD_TABLES, optimizer=RowWiseAdagrad(lr=0.5))
    assert before.items() <= files_of(directory).items()


@pytest.mark.parametrize("part", ["writers-1/0000/pool.holdfast", "dense/pool.holdfast", "writers-2/0001/log-0000"])
def test_what_is_left_of_a_groups_pool_is_refused_by_one_process(part: str, pool_root: Path):
    directory = pool_root / "pool"
    (directory / part).parent.mkdir(parents=True)
    (directory / part).write_bytes(b"something")
    refuses(directory, part.partition("/")[0], "group.json", kind=PoolOfGroup)


# Creation, and its death.


def forked(work: Callable[[], object]) -> int:
    """Ends a child after `work`; returns its wait status."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def create(directory: Path, **how: bool) -> None:
    _core.Pool.create(str(directory), 7, 1 << 16, specs(), **how)


def specs() -> list[_core.TableSpec]:
    from holdfast.pools.tables import normalize_all, to_spec

    return [to_spec(table, RowWiseAdagrad.kind) for table in normalize_all(ADAGRAD_TABLES)]


@pytest.mark.parametrize("store", STORES)
def test_a_creation_that_is_killed_anywhere_is_begun_anew_without_asking(store: str, pool_root: Path):
    directory = pool_root / "pool"
    points = unfinished = 0
    while True:
        points += 1
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()

        def die(at: int = points) -> None:
            _core.kill_at_persist_point(at)
            create(directory, **STORES[store])

        status = forked(die)
        is_published = (directory / SUPERBLOCK).exists()
        unfinished += (directory / MARK).exists() and not is_published
        if not is_published:
            create(directory, **STORES[store])
        with Pool(directory) as opened:
            assert opened.step == 0
        assert not (directory / MARK).exists()
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            break
    assert unfinished >= 4


def test_a_mark_that_was_left_beside_a_published_pool_goes_before_the_pool_is_written(pool: Path):
    (pool / MARK).write_text("left by a death right after the rename")
    with Pool(pool) as opened:
        assert not (pool / MARK).exists()
        assert opened.step == 5
    (pool / SUPERBLOCK).unlink()
    refuses(pool, SUPERBLOCK)


def test_a_pool_that_grows_by_a_further_collection_can_die_at_any_moment(pool_root: Path):
    directory = pool_root / "pool"

    def grow() -> None:
        with Pool(directory) as pool:
            EmbeddingBagCollection(pool, ADAGRAD_TABLES, optimizer=RowWiseAdagrad(lr=0.5))
            EmbeddingBagCollection(pool, ADAM_TABLES, optimizer=Adam(lr=0.05))

    made_anew = points = 0
    while True:
        points += 1
        shutil.rmtree(directory, ignore_errors=True)

        def die(at: int = points) -> None:
            _core.kill_at_persist_point(at)
            grow()

        status = forked(die)
        if not (directory / SUPERBLOCK).exists():
            grow()
            made_anew += 1
        assert problems_of(directory) == []
        Pool(directory).close()
        if not os.WIFSIGNALED(status):
            break
    assert made_anew > 4
    assert len(_core.Reader(str(directory)).tables) == len(TABLES)


def test_a_further_collection_takes_no_rows_away_that_were_imported(pool_root: Path):
    import numpy as np

    directory = pool_root / "pool"
    with Pool(directory) as pool:
        EmbeddingBagCollection(pool, ADAGRAD_TABLES, optimizer=RowWiseAdagrad(lr=0.5))
        pool.core.import_rows(0, 3, np.arange(8, dtype=np.float32).view(np.uint8), np.ones(1, np.float32))
        with pytest.raises(Exception, match="no table 'half'"):
            EmbeddingBagCollection(pool, ADAM_TABLES, optimizer=Adam(lr=0.05))
    assert _core.Reader(str(directory)).touched_rows(0, 0, 10) == [3]


# What a repair puts back.


def is_put_back(directory: Path, step: int, wanted: str, *words: str) -> None:
    damaged = files_of(directory)
    report = repair_pool(directory)
    assert report.left == [], report
    assert any(all(word in line for word in words) for line in report.done), report.done
    repaired = files_of(directory)
    assert report.backup is not None
    take_back(report.backup)
    assert files_of(directory) == damaged
    assert repair_pool(directory).left == []
    assert files_of(directory) == repaired
    with Pool(directory) as pool:
        assert pool.step == step
    assert digest(directory) == wanted
    with Pool(directory) as pool:
        assert (pool.step, pool.recovered.clean) == (step, True)


@pytest.mark.parametrize("how", ["removed", "emptied", "cut", "zeroed", "header", "table record", "overwritten"])
def test_a_superblock_is_put_back_from_its_copy(pool: Path, how: str):
    wanted = digest(pool)
    file = pool / SUPERBLOCK
    data = bytearray(file.read_bytes())
    match how:
        case "removed":
            file.unlink()
        case "emptied":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(data[: len(data) // 3])
        case "zeroed":
            file.write_bytes(bytes(len(data)))
        case "header":
            file.write_bytes(bytes(4096) + data[4096:])
        case "table record":
            data[20480 + 512 + 20] ^= 4
            file.write_bytes(data)
        case "overwritten":
            file.write_bytes(b"not a pool at all" * 2000)
    is_put_back(pool, 5, wanted, SUPERBLOCK, COPY)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dense_interval", [1, 3])
@pytest.mark.parametrize("lives", [(5,), (5, 0), (5, 2), (2, 2, 0), (4, 1, 3), (9, 1, 1, 1)])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_pool_that_died_recovers_to_the_same_step_and_rows_without_its_superblock(
    store: str, dense_interval: int, lives: tuple[int, ...], in_flight: bool, pool_root: Path
):
    """lives: steps of each; all of them die."""
    image = pool_root / "0"
    for number, steps in enumerate(lives):
        writer = Tiny(image, dense_interval=dense_interval, made_with=STORES[store])
        writer.steps(steps)
        if in_flight:
            writer.update()
        image = image_of(writer, pool_root / f"{number + 1}")
        writer.pool.close()
    whole = shutil.copytree(image, pool_root / "whole")
    with Pool(whole) as pool:
        step = pool.step
    (image / SUPERBLOCK).unlink()
    is_put_back(image, step, digest(whole), "not closed")


def test_a_copy_that_is_damaged_is_named_and_put_right(pool: Path):
    wanted = digest(pool)
    data = bytearray((pool / COPY).read_bytes())
    data[20] ^= 1
    (pool / COPY).write_bytes(data)
    assert any(COPY in problem for problem in problems_of(pool))
    is_put_back(pool, 5, wanted, COPY)


def test_without_a_copy_nothing_is_guessed(pool: Path):
    for name in (SUPERBLOCK, COPY):
        (pool / name).unlink()
    before = files_of(pool)
    report = repair_pool(pool)
    assert (report.done, report.backup) == ([], None)
    assert any(COPY in line for line in report.refusals), report.refusals
    assert files_of(pool) == before


@pytest.mark.parametrize("store", ["in_place", "row_checksums"])
def test_rows_in_place_without_a_dense_state_are_of_a_step_that_nobody_knows(store: str, pool_root: Path):
    writer = Tiny(pool_root / "pool", saves_dense=False, made_with=STORES[store])
    writer.steps(5)
    writer.pool.close()
    (pool_root / "pool" / SUPERBLOCK).unlink()
    report = repair_pool(pool_root / "pool")
    assert report.done == []
    assert any("dense state" in line for line in report.refusals), report.refusals


def test_a_log_whose_chain_is_broken_is_not_undone_halfway(pool_root: Path):
    writer = Tiny(pool_root / "pool", dense_interval=8)
    writer.steps(5)
    image = image_of(writer, pool_root / "image")
    writer.pool.close()
    log = bytearray((image / "log-0000").read_bytes())
    starts = [at for at in range(0, len(log), 64) if log[at : at + 8] == b"HFRECORD"]
    assert len(starts) > 4
    for at in starts[:-1]:  # the last one looks like one that was never sealed
        (image / "log-0000").write_bytes(log[:at] + bytes(128) + log[at + 128 :])
        (image / SUPERBLOCK).unlink(missing_ok=True)
        report = repair_pool(image)
        assert report.done == [], at
        assert any("log" in line for line in report.refusals)


def take_back(backup: Path) -> None:
    for line in reversed(backup.read_text().splitlines()):
        edit = json.loads(line)
        file = Path(edit["file"])
        if edit["file_bytes"] is None:
            file.unlink()
            continue
        with file.open("r+b") as target:
            target.seek(edit["offset"])
            target.write(bytes.fromhex(edit["before"]))
        os.truncate(file, edit["file_bytes"])
