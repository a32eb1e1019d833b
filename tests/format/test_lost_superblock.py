"""A pool that lost the file which says what it is: nothing is made over what is left, and a repair puts it back."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Pool, _core
from holdfast.digest import digest_pool
from holdfast.embedding import EmbeddingBagCollection
from holdfast.errors import Corrupted, PoolOfGroup
from holdfast.optim import Adam, RowWiseAdagrad
from holdfast.reading import at_rest, open_reader
from holdfast.repair import problems_of
from tiny_pools import ADAGRAD_TABLES, ADAM_TABLES, TABLES, Writer, files_of

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
    from holdfast.tables import normalize_all, to_spec

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
