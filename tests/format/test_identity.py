"""A file of another pool, however alike, is never taken for one of this: opening refuses it, and verify names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import SUPERBLOCK
from format_doc import CONSTANTS
from holdfast import Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.repair import problems_of
from holdfast.errors import Corrupted
from holdfast.pools.directory import SUPERBLOCK_COPY
from tiny_pools import RoomyWriter, files_of

NEWEST = CONSTANTS["version"]
KINDS = {"in place": {}, "row checksums": {"row_checksums": True}, "log store": {"log_store": True}}


def made(directory: Path, kind: str, *, is_closed: bool, version: int = NEWEST) -> Path:
    """A pool after five steps; all of them are alike to the bit, but for whose they are."""
    writer = RoomyWriter(directory, made_with={**KINDS[kind], "format_version": version})
    writer.steps(5)
    if is_closed:
        writer.pool.close()
        return directory
    writer.pool.flush()
    writer.update()
    files = files_of(directory)
    writer.pool.close()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "died in a step"])
@pytest.mark.parametrize("version", [NEWEST, 3])
def test_every_file_of_another_pool_is_refused_and_named(
    new_root: Callable[[], Path], kind: str, is_closed: bool, version: int
):
    ours = made(new_root() / "ours", kind, is_closed=is_closed)
    theirs = made(new_root() / "theirs", kind, is_closed=is_closed, version=version)
    own = files_of(ours)
    for name in sorted((own.keys() & files_of(theirs).keys()) - {"lock"}):
        shutil.copy(theirs / name, ours / name)
        before = files_of(ours)
        if name != SUPERBLOCK_COPY:  # only repairs read it
            with pytest.raises(Corrupted) as raised:
                Pool(ours)
            if name != SUPERBLOCK:
                assert Path(name).name in str(raised.value)
                assert version < 4 or "belongs to another pool" in str(raised.value)
        assert problems_of(ours), name
        assert files_of(ours) == before
        (ours / name).write_bytes(own[name])
    with Pool(ours) as pool:
        assert pool.step == 5


def test_two_files_of_one_pool_that_changed_places_are_refused(new_root: Callable[[], Path]):
    ours = made(new_root() / "ours", "in place", is_closed=True)
    shard = ours / "shard-0000"
    first, second = shard / "table-0000.state", shard / "table-0000.touched"
    of_first = first.read_bytes()
    label = of_first[-4096:]
    second.write_bytes(second.read_bytes()[:-4096] + label)
    with pytest.raises(Corrupted, match="another of this pool's files"):
        Pool(ours)


def test_pools_of_older_versions_and_of_todays_have_the_same_rows(new_root: Callable[[], Path], kind: str):
    pools = [made(new_root() / "pool", kind, is_closed=True, version=version) for version in (NEWEST, 3)]
    digests = [digest_pool(_core.Reader(str(pool))).whole for pool in pools]
    assert digests[0] == digests[1]
    versions = [_core.header_in(str(pool))["format_version"] for pool in pools]
    assert versions == [NEWEST, 2 if kind == "log store" else 1]
    for pool in pools:
        writer = RoomyWriter(pool)
        writer.steps(3)
        writer.pool.close()
    assert digest_pool(_core.Reader(str(pools[0]))).whole == digest_pool(_core.Reader(str(pools[1]))).whole
