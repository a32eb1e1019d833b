"""What goes wrong in a group ends every rank, soon, with an error that says what and who; what cannot be is refused
before a byte of the pool is written."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError

from group_runs import LOG_STORE, SLACK_SECONDS, Act, Life, Ranks, digest, small
from holdfast import _core
from holdfast.errors import Corrupted
from holdfast.group.founding import LOCK_FILE
from holdfast.group.manifest import MANIFEST
from holdfast.group.notices import Notices, what_became_of

pytestmark = pytest.mark.dear

TIMEOUT = 1.0
PATIENCE = 60.0
GRACE = 0.5
SHORT = small(group={"timeout": TIMEOUT})  # where somebody is waited for in vain
LONG = small(group={"timeout": PATIENCE})  # longer than a busy machine takes to start a process


def run(ranks: Ranks, pool: Path, num_ranks: int = 3, config: dict[str, Any] = LONG, **befalls: Any) -> Life:
    return ranks.run(pool, config, num_ranks, grace=GRACE, **befalls)


def trained(ranks: Ranks, pool: Path, num_ranks: int = 3, *, steps: int = 12, memory_ranks: int = 0) -> Path:
    config = {**LONG, "train": {**LONG["train"], "steps": steps}}
    life = run(ranks, pool, num_ranks, config, memory_ranks=memory_ranks)
    assert life.ended_well, life.errors()
    return pool


@pytest.fixture(scope="module")
def kept(ranks: Ranks, new_root: Callable[[], Path]) -> Path:
    """Of three ranks and 4 steps, to be copied."""
    return trained(ranks, new_root() / "kept", steps=4)


def contents(pool: Path) -> dict[str, str]:
    """What the pool's files hold, but for the lock's."""
    files = (path for path in sorted(pool.rglob("*")) if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(pool)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_refused(life: Life, kind: str, *words: str) -> None:
    """On all ranks, with the same words."""
    for rank in life.ranks:
        assert rank.error == kind, f"rank {rank.number}: {rank.error}: {rank.message}"
        for word in words:
            assert word in rank.message
        assert rank.opened is None


# What breaks while they train.


@pytest.mark.parametrize("do", ["kill", "stop"])
def test_a_rank_0_that_ends_while_it_deals_out_the_shards_is_missed(do: str, ranks: Ranks, pool_root: Path) -> None:
    pool = trained(ranks, pool_root / "pool", 2, steps=4)
    life = run(ranks, pool, 3, SHORT, acts={0: Act(at="dealing", do=do)})
    assert life.struck == {0}
    life.check_that_the_others_ended(within=TIMEOUT + GRACE)
    trained(ranks, pool, steps=6)


@pytest.mark.parametrize(("place", "num_ranks"), [("dealing", 3), ("retiring", 3), ("retiring", 2)])
def test_rank_0_may_take_longer_than_the_timeout_to_deal_out_shards_and_to_remove_old_parts(
    place: str, num_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    pool = trained(ranks, pool_root / "pool", 2, steps=4)
    with ThreadPoolExecutor(1) as beside:
        life = beside.submit(run, ranks, pool, num_ranks, SHORT, acts={0: Act(at=place, do="wait")})
        ranks.await_waiting(life)
        time.sleep(2 * TIMEOUT)
        ranks.go_on.touch()
        assert life.result().ended_well, life.result().errors()


@pytest.mark.parametrize(
    ("place", "nth", "victim", "memory_ranks"),
    [("train", 4, 0, 0), ("train", 4, 1, 0), ("commit", 4, 2, 1), ("settle", 1, 1, 0)],
)
def test_a_stalled_rank_is_named_by_all_others_in_time(
    place: str, nth: int, victim: int, memory_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    acts = {victim: Act(at=place, nth=nth, do="stop")}
    life = run(ranks, pool_root / "pool", config=SHORT, memory_ranks=memory_ranks, acts=acts)
    assert life.struck == {victim}
    life.check_that_the_others_ended(within=TIMEOUT + GRACE)
    for rank in life.ranks:
        if rank.number != victim:
            assert f"rank {victim} does not answer within 1 s" in rank.message
            assert "step " in rank.message


@pytest.mark.parametrize(
    ("broke", "word", "became"),
    [
        ("Connection closed by peer [10.77.0.2]:34501.", "gave up on vectors", "rank 2 does not answer within 5 s"),
        ("Connection closed by peer [10.77.0.2]:34501.", "lost a connection, waiting for ids", "rank 2 died or was"),
        ("Timed out waiting 5000ms", "lost a connection, waiting for ids", "rank 2 does not answer within 5 s"),
    ],
)
def test_a_silent_rank_did_not_die_where_one_that_gave_up_on_it_is_who_closed_the_connection(
    broke: str, word: str, became: str
) -> None:
    assert what_became_of([2], RuntimeError(broke), [word], timeout=5.0).startswith(became)


def test_of_several_that_are_silent_it_is_said_that_one_died() -> None:
    became = what_became_of([1, 2], RuntimeError("Connection closed by peer"), [], timeout=5.0)
    assert became == "at least one of ranks 1, 2 died or was stopped"


def test_ranks_that_wait_for_different_things_are_told_that_they_make_different_calls() -> None:
    store = HashStore()
    flushing, looking_up = (
        Notices(store, rank=rank, world_size=2, timeout=5.0, stopping=lambda: False) for rank in range(2)
    )
    looking_up.leave("gave up on counts")
    failure = flushing.failure("rows to be durable", RuntimeError("Operation timed out"))
    assert "rank 1 waited for counts meanwhile: all ranks have to make the same calls" in str(failure)
    failure = looking_up.failure("counts", RuntimeError("a message of 1024 bytes where 56 were to come"))
    assert "rank 0 waited for rows to be durable meanwhile: all ranks have to make the same calls" in str(failure)
    failure = flushing.failure("counts", RuntimeError("Operation timed out"))
    assert "counts: the connection between ranks that are all there broke (Operation timed out)" in str(failure)


def test_a_rank_that_stalled_and_comes_back_is_told_that_others_gave_up() -> None:
    store = HashStore()
    other, stalled = (Notices(store, rank=rank, world_size=2, timeout=5.0, stopping=lambda: False) for rank in range(2))
    other.leave("gave up on vectors")
    failure = stalled.failure("counts", RuntimeError("rank 0 has closed its channel"))
    assert "rank 0 gave up on vectors after 5 s, in which this rank or another one stalled" in str(failure)


class _GoneStore(HashStore):
    def set(self, key: str, value: str) -> None:
        raise DistNetworkError("Broken pipe")


def test_what_rank_0_did_is_its_answer_though_the_store_has_gone_meanwhile() -> None:
    notices = Notices(_GoneStore(), rank=0, world_size=2, timeout=5.0, stopping=lambda: False)
    with notices.saying_that_it_lives("rank 0 to look"):
        pass

    def look() -> None:
        with notices.saying_that_it_lives("rank 0 to look"):
            raise Corrupted("a log")

    with pytest.raises(Corrupted, match="a log"):
        look()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_is_named_without_waiting_for_the_timeout(victim: int, ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", config=LONG, acts={victim: Act(at="train", nth=4)})
    life.check_that_the_others_ended(within=GRACE)
    assert [f"rank {victim} died or was stopped" in error for error in life.errors().values()] == [True, True]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_dead_rank_is_named_by_one_that_waited_for_another(
    shared_memory: bool, ranks: Ranks, pool_root: Path
) -> None:
    options = {"timeout": 20.0, "shared_memory": shared_memory}
    loop = "program_loops:waits_for_one_that_waits_for_the_dead"
    life = ranks.run(pool_root / "pool", options, 3, memory_ranks=1, loop=loop)
    assert ["rank 2 died or was stopped" in error for error in life.errors().values()] == [True, True], life.errors()


def test_a_rank_that_never_comes_is_named(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", config=SHORT, acts={1: Act(at="group", do="stop")})
    for rank in (life.ranks[0], life.ranks[2]):
        assert rank.error == "GroupError"
        assert "waiting for all ranks to be there: rank 1 does not answer" in rank.message
        assert rank.ended < TIMEOUT + GRACE + SLACK_SECONDS  # gloo would try more than once
    assert not (pool_root / "pool").exists()


def test_sigterm_in_a_broken_group_does_not_wait_for_the_others(ranks: Ranks, pool_root: Path) -> None:
    pool = pool_root / "pool"
    acts = {1: Act(at="train", nth=4, do="stop"), 0: Act(at="train", nth=4, do="term")}
    life = run(ranks, pool, 2, LONG, acts=acts)
    life.check_that_the_others_ended(within=2.0 + GRACE)
    assert "rank 1" in life.errors()[0]
    assert trained(ranks, pool, 2)


@pytest.mark.parametrize(("place", "nth"), [("train", 5), ("evaluation", 1), ("evaluation", 4)])
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_rank_of_a_healthy_group_ends_all_cleanly(
    asked: int, place: str, nth: int, ranks: Ranks, pool_root: Path
) -> None:
    pool = pool_root / "pool"
    with_evaluation = small(validation={"num_samples": 100}, train={"eval_every": 6, "eval_batch_size": 30})
    whole = run(ranks, pool_root / "whole", 2, with_evaluation)
    life = run(ranks, pool, 2, with_evaluation, acts={asked: Act(at=place, nth=nth, do="term")})
    assert life.ended_well, life.errors()
    assert all(rank.closed and rank.all_said("stopped") == [True] for rank in life.ranks)
    assert 5 <= life.durable <= 7
    after = run(ranks, pool, 2, with_evaluation)
    assert after.opened == life.durable
    assert after.evaluations[-1] == whole.evaluations[-1]
    assert digest(pool) == digest(pool_root / "whole")


@pytest.mark.parametrize(
    ("what", "act", "memory_ranks"),
    [
        ("NonFiniteLoss", Act(at="train", nth=5, do="spoil"), 0),
        ("PoolFull", Act(at="commit", nth=5, do="full"), 0),
        ("PoolFull", Act(at="commit", nth=5, do="full"), 2),
        ("PoolFull", Act(at="settle", nth=1, do="full"), 0),
    ],
)
def test_what_one_rank_fails_with_the_others_end_with_and_the_pool_goes_on(
    what: str, act: Act, memory_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    whole = trained(ranks, pool_root / "whole", memory_ranks=memory_ranks)
    pool = pool_root / "pool"
    life = run(ranks, pool, memory_ranks=memory_ranks, acts={1: act})
    assert life.ranks[1].error == what
    for rank in (life.ranks[0], life.ranks[2]):
        assert rank.error == "GroupError"
        assert f"rank 1 failed: {what}" in rank.message
    assert digest(trained(ranks, pool, memory_ranks=memory_ranks)) == digest(whole)


def test_a_group_that_goes_on_says_what_its_opening_found(ranks: Ranks, pool_root: Path) -> None:
    run(ranks, pool_root / "pool", acts={1: Act(at="commit", nth=5)})
    for found in ("not closed cleanly; the newest step that all ranks have is", "closed cleanly at step"):
        life = run(ranks, pool_root / "pool")
        assert life.ended_well, life.errors()
        assert found in life.ranks[1].all_said("start")[0]  # the others closed their own parts in either life


@pytest.mark.parametrize("place", ["first_dense", "survey"])
def test_what_one_rank_meets_while_the_group_opens_all_raise(place: str, ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", acts={0: Act(at=place, do="full")})
    assert life.ranks[0].error == "PoolFull"
    assert all("PoolFull" in error and "rank 0" in error for rank, error in life.errors().items() if rank != 0)
    assert len(life.errors()) == 3
    assert trained(ranks, pool_root / "pool")


# What is refused.


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (Act(config={"train": {**LONG["train"], "batch_size": 48}}), ("rank 2", "train.batch_size")),
        (Act(config={"group": {**LONG["group"], "split_rows": 2}}), ("rank 2", "group.split_rows")),
        (Act(version="0.0.0"), ("rank 2", "0.0.0")),
        (Act(memory_ranks=1), ("rank 2", "--memory-ranks 1", "rank 0 has 0")),
    ],
    ids=["batch_size", "split_rows", "version", "memory_ranks"],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_ranks_that_differ_are_refused(
    is_new: bool, act: Act, words: tuple[str, ...], ranks: Ranks, kept: Path, pool_root: Path
) -> None:
    pool = pool_root / "pool"
    if not is_new:
        shutil.copytree(kept, pool)
    before = contents(pool)
    check_refused(run(ranks, pool, acts={2: act}), "ConfigError", *words)
    assert contents(pool) == before


def test_fewer_shards_than_owners_are_refused(ranks: Ranks, pool_root: Path) -> None:
    few = small(group={"shards": 2, "timeout": PATIENCE})
    pool = pool_root / "pool"
    check_refused(run(ranks, pool, 3, few), "ConfigError", "group.shards = 2", "3 ranks")
    assert contents(pool) == {}
    assert run(ranks, pool, 2, few).ended_well
    before = contents(pool)
    check_refused(run(ranks, pool, 3, few), "ConfigError", "group.shards = 2", "3 ranks")
    assert contents(pool) == before
    assert run(ranks, pool, 3, few, memory_ranks=2).ended_well


def a_writer_of(pool: Path, number: int) -> Path:
    return pool / "writers-1" / f"{number:04}"


def remove_shard(pool: Path) -> None:
    shutil.rmtree(pool / "shard-0003")


def remove_table(pool: Path) -> None:
    next(iter((pool / "shard-0003").iterdir())).unlink()


def swap_writers(pool: Path) -> None:
    a_writer_of(pool, 0).rename(pool / "aside")
    a_writer_of(pool, 1).rename(a_writer_of(pool, 0))
    (pool / "aside").rename(a_writer_of(pool, 1))


def remove_writer(pool: Path) -> None:
    shutil.rmtree(a_writer_of(pool, 1))


def remove_dense(pool: Path) -> None:
    shutil.rmtree(pool / "dense")


def flip_manifest(pool: Path) -> None:
    manifest = bytearray((pool / MANIFEST).read_bytes())
    manifest[manifest.index(b"owner_of") + 14] ^= 1
    (pool / MANIFEST).write_bytes(manifest)


def cut_manifest(pool: Path) -> None:
    manifest = (pool / MANIFEST).read_bytes()
    (pool / MANIFEST).write_bytes(manifest[: len(manifest) // 2])


def empty_manifest(pool: Path) -> None:
    (pool / MANIFEST).write_bytes(b"")


def foreign_manifest(pool: Path) -> None:
    (pool / MANIFEST).write_text('{"format": "something else"}')


def later_manifest(pool: Path) -> None:
    said = json.loads((pool / MANIFEST).read_text())
    (pool / MANIFEST).write_text(json.dumps({**said, "version": 4}))


def foreign_writer(pool: Path) -> None:
    shutil.rmtree(a_writer_of(pool, 1))
    shutil.copytree(a_writer_of(pool.parent / "other", 1), a_writer_of(pool, 1))


DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (remove_shard, ("Corrupted", "PoolNotFound"), "shard-0003"),
    (remove_table, ("Corrupted", "PoolNotFound"), "shard-0003"),
    (remove_writer, ("PoolNotFound",), "writers-1/0001"),
    (remove_dense, ("PoolNotFound", "Corrupted"), "dense"),
    (swap_writers, ("Corrupted",), "put the directories back"),
    (foreign_writer, ("Corrupted",), "of another one"),
    (flip_manifest, ("Corrupted",), MANIFEST),
    (cut_manifest, ("Corrupted",), MANIFEST),
    (empty_manifest, ("Corrupted",), MANIFEST),
    (foreign_manifest, ("FormatMismatch",), MANIFEST),
    (later_manifest, ("FormatMismatch",), "version 4"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=[case[0].__name__ for case in DAMAGES])
def test_a_damaged_pool_is_refused_by_all_ranks_and_nothing_is_written(
    damage: tuple[Callable[[Path], None], tuple[str, ...], str], ranks: Ranks, kept: Path, pool_root: Path
) -> None:
    inflict, kinds, word = damage
    pool = pool_root / "pool"
    shutil.copytree(kept, pool)
    if inflict is foreign_writer:
        trained(ranks, pool_root / "other", steps=4)
    inflict(pool)
    before = contents(pool)
    life = run(ranks, pool)
    assert life.ranks[0].error in kinds, life.errors()
    check_refused(life, str(life.ranks[0].error), word)
    assert contents(pool) == before


@pytest.mark.parametrize("store", [{}, LOG_STORE], ids=["in_place", "log_store"])
def test_an_older_copy_of_one_writer_is_refused(store: dict[str, Any], ranks: Ranks, pool_root: Path) -> None:
    config = small(group={"timeout": PATIENCE}, train={"steps": 4}, **store)
    pool, copy = pool_root / "pool", pool_root / "copy"
    assert run(ranks, pool, 2, config).ended_well
    shutil.copytree(pool, copy)
    assert run(ranks, pool, 2, {**config, "train": {**config["train"], "steps": 12}}).ended_well
    owned = json.loads((pool / MANIFEST).read_text())["owner_of"]
    parts = [a_writer_of(Path(), 1), *(Path(f"shard-{shard:04}") for shard, owner in enumerate(owned) if owner == 1)]
    for part in parts:
        shutil.rmtree(pool / part)
        shutil.copytree(copy / part, pool / part)
    before = contents(pool)
    check_refused(run(ranks, pool, 2, config), "Corrupted", "older copy")
    assert contents(pool) == before


def test_a_pool_of_one_process_is_refused_by_a_group(ranks: Ranks, pool_root: Path) -> None:
    pool = pool_root / "pool"
    assert ranks.run(pool, LONG, 1, plain=True).ended_well
    before = contents(pool)
    check_refused(run(ranks, pool, 2), "PoolExists", "one process")
    assert contents(pool) == before
    assert ranks.run(pool, LONG, 1, plain=True).ended_well


def test_a_pool_of_a_group_goes_on_in_one_process_that_knows_of_none(ranks: Ranks, pool_root: Path) -> None:
    pool = trained(ranks, pool_root / "pool", 2, steps=4)
    life = ranks.run(pool, LONG, 1, plain=True)
    assert life.ended_well, life.errors()
    assert life.opened == 4


def test_two_groups_on_one_pool_are_refused_and_the_first_goes_on(ranks: Ranks, pool_root: Path) -> None:
    whole = trained(ranks, pool_root / "whole", 2)
    pool = pool_root / "pool"
    with Ranks() as others, ThreadPoolExecutor() as pool_of_threads:
        first = pool_of_threads.submit(run, ranks, pool, 2, LONG, acts={1: Act(at="commit", nth=6, do="wait")})
        ranks.await_waiting(first)
        second, holder = run(others, pool, 2), (pool / LOCK_FILE).read_text()
        ranks.go_on.touch()
        check_refused(second, "PoolBusy", f"another group, whose rank 0 is process {holder};")
        assert first.result().ended_well
    assert digest(pool) == digest(whole)


def test_a_group_beside_one_process_that_reads_the_pool_goes_on(ranks: Ranks, pool_root: Path) -> None:
    """Readers take no lock."""
    pool = trained(ranks, pool_root / "pool", 2, steps=4)
    reader = _core.Reader(str(a_writer_of(pool, 1)))
    assert trained(ranks, pool, 2)
    assert reader.header
