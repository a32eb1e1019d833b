"""No start of a group, whatever its ranks find of the pool, makes another one over it or removes a part that was
trained."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from group_runs import LOG_STORE, Act, Life, Ranks, digest, small
from holdfast.errors import PoolOfGroup
from holdfast.group.manifest import MANIFEST
from holdfast.pools.pool import Pool
from rank_run import PLACES
from test_group_failures import check_refused, contents

pytestmark = pytest.mark.dear

TIMEOUT = 3.0
STEPS = 6
GRACE = 0.2
CONFIG = small(group={"timeout": TIMEOUT}, train={"steps": STEPS})
MARK = "unpublished"


def run(ranks: Ranks, pool: Path, num_ranks: int = 3, config: dict[str, Any] = CONFIG, **how: Any) -> Life:
    return ranks.run(pool, config, num_ranks, grace=GRACE, **how)


class Apart:
    """Three ranks, each with a storage of its own."""

    def __init__(self, ranks: Ranks, root: Path) -> None:
        self.ranks = ranks
        self.root = root
        self.storages = {rank: root / f"storage-{rank}" for rank in range(3)}

    def run(self, **how: Any) -> Life:
        return run(self.ranks, self.root, storages=self.storages, **how)

    def contents(self) -> dict[str, str]:
        return contents(self.root)

    def joined(self) -> Path:
        """All parts in one directory, as a reader wants them."""
        whole = self.root.with_name(f"{self.root.name}-joined")
        for storage in self.storages.values():
            shutil.copytree(storage, whole, dirs_exist_ok=True)
        return whole


@pytest.fixture(scope="module")
def kept(ranks: Ranks, new_root: Callable[[], Path]) -> Path:
    """Storages of three ranks that have trained, to be copied."""
    root = new_root() / "apart"
    apart = Apart(ranks, root)
    assert apart.run().ended_well
    return root


@pytest.fixture
def apart(kept: Path, ranks: Ranks, pool_root: Path) -> Apart:
    shutil.copytree(kept, pool_root / "apart")
    return Apart(ranks, pool_root / "apart")


def goes_on(apart: Apart) -> None:
    life = apart.run()
    assert life.ended_well, life.errors()
    assert life.opened == STEPS


def test_a_pool_whose_parts_lie_on_storages_of_their_own_goes_on(apart: Apart):
    goes_on(apart)


def test_rank_0_without_its_disk_founds_no_other_pool(apart: Apart):
    """Its mount point is empty; the other ranks have theirs."""
    apart.storages[0].rename(apart.root / "aside")
    before = apart.contents()
    check_refused(apart.run(), "PoolNotFound", "rank 0", MANIFEST)
    apart.storages[0].mkdir(exist_ok=True)
    check_refused(apart.run(), "PoolNotFound", "rank 0", MANIFEST)
    assert apart.contents() == before
    shutil.rmtree(apart.storages[0])
    (apart.root / "aside").rename(apart.storages[0])
    goes_on(apart)


def test_rank_0_without_its_manifest_founds_no_other_pool(apart: Apart):
    """Its own parts are there, and so are the others'."""
    (apart.storages[0] / MANIFEST).unlink()
    before = apart.contents()
    check_refused(apart.run(), "PoolNotFound", "rank 0", MANIFEST, "rank 1")
    assert apart.contents() == before
    shutil.copy(apart.storages[1] / MANIFEST, apart.storages[0])
    goes_on(apart)


def test_parts_without_any_manifest_are_refused_on_whichever_rank_they_are(apart: Apart):
    for storage in apart.storages.values():
        (storage / MANIFEST).unlink()
    for owner in apart.storages:
        alone = Apart(apart.ranks, apart.root.with_name(f"alone-{owner}"))
        shutil.copytree(apart.storages[owner], alone.storages[owner])
        before = alone.contents()
        check_refused(alone.run(), "Corrupted", f"rank {owner}", "no rank has a group.json")
        assert alone.contents() == before


def test_a_lost_manifest_of_a_pool_on_shared_storage_is_no_new_pool(ranks: Ranks, pool_root: Path):
    pool = pool_root / "pool"
    assert run(ranks, pool).ended_well
    manifest = (pool / MANIFEST).read_bytes()
    (pool / MANIFEST).unlink()
    before = contents(pool)
    check_refused(run(ranks, pool), "Corrupted", MANIFEST, "nothing was changed")
    with pytest.raises(PoolOfGroup, match=MANIFEST):
        Pool(pool)
    assert contents(pool) == before
    (pool / MANIFEST).write_bytes(manifest)
    assert run(ranks, pool).opened == STEPS


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_whose_disk_was_replaced_by_an_empty_one_is_named(rank: int, apart: Apart):
    shutil.rmtree(apart.storages[rank])
    before = apart.contents()
    check_refused(apart.run(), "PoolNotFound", f"rank {rank}", f"writers-1/{rank:04}", "copy")
    assert apart.contents() == before


def test_ranks_that_are_started_on_each_others_machines_are_told_to_start_where_they_were(apart: Apart):
    apart.storages[0], apart.storages[1] = apart.storages[1], apart.storages[0]
    before = apart.contents()
    life = apart.run()
    check_refused(life, "PoolNotFound", "cannot be reached from its machine: start the ranks where they were")
    assert "dense, the dense states of the pool that rank 0 has" in life.ranks[0].message
    assert apart.contents() == before
    apart.storages[0], apart.storages[1] = apart.storages[1], apart.storages[0]
    goes_on(apart)


def test_a_manifest_of_another_pool_on_one_rank_is_refused(apart: Apart):
    other = Apart(apart.ranks, apart.root.with_name("other"))
    assert other.run().ended_well
    shutil.rmtree(apart.storages[2])
    shutil.copytree(other.storages[2], apart.storages[2])
    before = apart.contents()
    check_refused(apart.run(), "Corrupted", "rank 2", "another")
    assert apart.contents() == before


def test_an_older_manifest_never_removes_the_generation_in_force(ranks: Ranks, pool_root: Path):
    pool = pool_root / "pool"
    assert run(ranks, pool, 2).ended_well
    older = (pool / MANIFEST).read_bytes()
    assert run(ranks, pool, 3).ended_well
    newer = (pool / MANIFEST).read_bytes()
    assert (pool / "writers-2").is_dir() and not (pool / "writers-1").exists()
    (pool / MANIFEST).write_bytes(older)
    before = contents(pool)
    for num_ranks in (2, 3, 4):
        check_refused(run(ranks, pool, num_ranks), "Corrupted", "writers-2", "older")
    assert contents(pool) == before
    (pool / MANIFEST).write_bytes(newer)
    assert run(ranks, pool, 3).opened == STEPS


def test_files_that_are_no_parts_stay_where_they_are(ranks: Ranks, pool_root: Path):
    pool = pool_root / "pool"
    for name in ("writers-1.bak/0000/log-0000", "shard-copy/x", "metrics.jsonl", "dense/notes", "shard-0000/notes"):
        (pool / name).parent.mkdir(parents=True, exist_ok=True)
        (pool / name).write_text("mine")
    before = contents(pool)
    life = run(ranks, pool, 2, acts={1: Act(at="dealing", after=True)})
    assert life.struck
    assert run(ranks, pool, 2).ended_well
    assert run(ranks, pool, 3).ended_well
    assert before.items() <= contents(pool).items()


def a_plain_pool(ranks: Ranks, pool: Path) -> None:
    assert ranks.run(pool, CONFIG, 1, plain=True).ended_well


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pool_of_one_process_on_any_rank_is_refused(rank: int, ranks: Ranks, pool_root: Path):
    apart = Apart(ranks, pool_root / "apart")
    a_plain_pool(ranks, apart.storages[rank])
    before = apart.contents()
    check_refused(apart.run(), "PoolExists", "one process")
    (apart.storages[rank] / "pool.holdfast").rename(pool_root / "aside")
    del before[f"storage-{rank}/pool.holdfast"]
    check_refused(apart.run(), "Corrupted", f"rank {rank}")
    assert apart.contents() == before


# Deaths while the pool is made, or dealt out anew.

STORES: dict[str, dict[str, Any]] = {"in_place": {}, "log_store": LOG_STORE}


def config_of(store: str) -> dict[str, Any]:
    return small(group={"timeout": TIMEOUT}, train={"steps": STEPS}, **STORES[store])


@pytest.fixture(scope="module")
def trained(ranks: Ranks, new_root: Callable[[], Path]) -> Callable[[str], tuple[Path, str]]:
    """By store: a pool of two ranks to be copied, and its digest."""

    @functools.cache
    def train(store: str) -> tuple[Path, str]:
        pool = new_root() / "kept"
        assert run(ranks, pool, 2, config_of(store)).ended_well
        return pool, digest(pool)

    return train


def deaths(*places: str, points: range) -> list[Act]:
    return [Act(persist_point=point) for point in points] + [
        Act(at=place, after=after) for place in places for after in (False, True)
    ]


def sampled(acts: list[Act], is_sample: bool) -> list[Act]:
    return acts[1::2] if is_sample else acts


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "shared"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "acts",
    [deaths(points=range(1, 41, 8)), deaths("making_parts", "manifest", "published", points=range(0))],
    ids=["points", "places"],
)
def test_a_founding_that_dies_anywhere_is_begun_anew(
    store: str,
    is_apart: bool,
    victim: int,
    acts: list[Act],
    ranks: Ranks,
    trained: Any,
    pool_root: Path,
    is_sample: bool,
):
    acts = sampled(acts, is_sample)
    _, wanted = trained(store)
    storages = {rank: pool_root / f"storage-{rank}" for rank in (0, 1)} if is_apart else None
    pool = pool_root / "pool"
    struck = 0
    for act in acts:
        for path in (pool, *(storages or {}).values()):
            shutil.rmtree(path, ignore_errors=True)
        struck += bool(run(ranks, pool, 2, config_of(store), acts={victim: act}, storages=storages).struck)
        life = run(ranks, pool, 2, config_of(store), storages=storages)
        assert life.ended_well, f"{act}: {life.errors()}"
        for storage in (storages or {0: pool}).values():
            assert not list(storage.rglob(MARK))
        for storage in (storages or {}).values():
            shutil.copytree(storage, pool, dirs_exist_ok=True)
        assert digest(pool) == wanted, act
    assert struck >= len(acts) // 2


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "acts",
    [deaths(points=range(1, 60, 9)), deaths("dealing", "manifest", "retiring", "published", points=range(0))],
    ids=["points", "places"],
)
def test_a_dealing_out_that_dies_anywhere_leaves_the_pool(
    store: str, acts: list[Act], ranks: Ranks, trained: Any, pool_root: Path, is_sample: bool
):
    acts = sampled(acts, is_sample)
    kept, wanted = trained(store)
    pool = pool_root / "pool"
    struck = 0
    for act in acts:
        shutil.rmtree(pool, ignore_errors=True)
        shutil.copytree(kept, pool)
        struck += bool(run(ranks, pool, 1, config_of(store), acts={0: act}).struck)
        life = run(ranks, pool, 3, config_of(store))
        assert life.ended_well, f"{act}: {life.errors()}"
        assert life.opened == STEPS
        assert digest(pool) == wanted
        assert not list(pool.rglob(MARK))
        assert len(list(pool.glob("writers-*"))) == 1, f"{act}: {sorted(pool.iterdir())}"
    assert struck >= len(acts) // 2


def test_every_place_of_a_founding_is_one_where_ranks_can_be_killed():
    assert {"making_parts", "published", "retiring"} <= set(PLACES)
