"""Whichever way a step's tensors take from rank to rank: the bits are the same, and so is what a death costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from group_runs import GROUPS, Act, Ranks, digest, run, small, whole

pytestmark = pytest.mark.dear

WAYS = {"through memory": {"shared_memory": True}, "over gloo": {"shared_memory": False}}


@pytest.mark.parametrize("group", GROUPS)
def test_a_run_changes_its_way_after_a_kill_and_no_bit(group: str, ranks: Ranks, pool_root: Path) -> None:
    """Of three trainers as well: numbers are added up in one order, whatever brings them."""
    options = {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3, "timeout": 5.0}
    options |= {"micro_batches": 2, "max_norm": 0.05, "scaler": True, "ahead": 1}
    for way, said in WAYS.items():
        life = run(ranks, pool_root / way, {**options, **said}, group)
        assert life.ended_well, life.errors()
        assert [rank.all_said("way") for rank in life.ranks] == [[way]] * len(life.ranks)
    assert digest(pool_root / "over gloo") == digest(pool_root / "through memory")
    killed = pool_root / "killed"
    run(ranks, killed, {**options, **WAYS["through memory"]}, group, acts={1: Act(at="collective", nth=60)}, grace=0.2)
    assert whole(ranks, killed, {**options, **WAYS["over gloo"]}, group) == digest(pool_root / "over gloo")


def test_a_configured_run_changes_its_way_and_no_bit(ranks: Ranks, pool_root: Path) -> None:
    """So that it goes on where there is no room in shared memory any more."""
    changed, plain = pool_root / "changed", pool_root / "plain"
    for pool, steps, way in ((changed, 5, "through memory"), (changed, 12, "over gloo"), (plain, 12, "through memory")):
        life = ranks.run(pool, small(train={"steps": steps}, group=WAYS[way]), 2)
        assert life.ended_well, life.errors()
    assert digest(changed) == digest(plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_whose_neighbour_dies_end_soon_and_name_it(way: str, group: str, ranks: Ranks, pool_root: Path) -> None:
    """Long before their deadline, in whatever they wait for; and it costs no bit."""
    options = {**WAYS[way], "timeout": 60.0}
    expected = whole(ranks, pool_root / "whole", options, group)
    life = run(ranks, pool_root / "killed", options, group, acts={1: Act(at="commit", nth=4)})
    assert life.struck == {1}, life.errors()
    life.check_that_the_others_ended(within=10.0)
    assert whole(ranks, pool_root / "killed", options, group) == expected


def test_one_rank_that_shares_no_memory_has_all_go_over_gloo(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {}, "2 ranks", acts={1: Act(config=WAYS["over gloo"])})
    assert life.ended_well, life.errors()
    assert [rank.all_said("way") for rank in life.ranks] == [["over gloo"]] * 2
