"""A program's ranks may open one pool after another, and one again after an error, in the same processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pool_digests import digest_of_tables

from group_runs import Ranks, digest, whole

pytestmark = pytest.mark.dear

MEETINGS = ["rank 0's store", "torchrun's store", "the program's own process group"]


@pytest.fixture
def meeting(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of program_loops.py."""
    if request.param != "torchrun's store":
        yield {"init": request.param != "rank 0's store"}
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"store_port": store.port}


def test_a_pool_that_a_launcher_began_with_one_rank_takes_more_later(ranks: Ranks, pool_root: Path) -> None:
    for opened, num_ranks in ((0, 1), (3, 2), (6, 1)):
        options = {"loop": "train", "steps": opened + 3}
        life = ranks.run(pool_root / "pool", options, num_ranks, loop="program_loops:started_by_a_launcher")
        assert life.ended_well, life.errors()
        assert life.opened == opened


def test_a_child_that_leaves_the_block_of_a_pool_of_its_parent_ends_no_rank(ranks: Ranks, pool_root: Path) -> None:
    life = ranks.run(pool_root / "forking", {"steps": 5}, 2, loop="program_loops:with_a_child_that_ends")
    assert life.ended_well, life.errors()
    assert digest(pool_root / "forking") == whole(ranks, pool_root / "whole", {"steps": 5})


def test_a_pool_that_was_made_without_a_launcher_opens_under_one_of_one_rank(ranks: Ranks, pool_root: Path) -> None:
    assert ranks.run(pool_root / "pool", {"steps": 3}, 1, loop="rows_alone").ended_well
    options = {"loop": "rows_alone", "steps": 6}
    life = ranks.run(pool_root / "pool", options, 1, loop="program_loops:started_by_a_launcher")
    assert life.ended_well, life.errors()
    assert life.opened == 3


@pytest.mark.parametrize("meeting", MEETINGS, indirect=True)
@pytest.mark.parametrize(("num_ranks", "memory_ranks"), [(2, 0), (3, 1)])
def test_a_program_opens_one_pool_after_another_and_the_first_again(
    num_ranks: int, memory_ranks: int, meeting: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    together = {"memory_ranks": memory_ranks, "loop": "program_loops:one_after_another"}
    life = ranks.run(pool_root / "in turn", {**meeting, "timeout": 8.0}, num_ranks, **together)
    assert life.ended_well, life.errors()
    assert life.ranks[0].all_said("opened") == [0, 0, 3]
    for name, steps in (("first", 6), ("second", 4)):
        alone = ranks.run(pool_root / name, {"steps": steps}, num_ranks, memory_ranks=memory_ranks, loop="train")
        assert alone.ended_well, alone.errors()
        assert digest(pool_root / "in turn" / name) == digest(pool_root / name)


@pytest.mark.parametrize("meeting", MEETINGS, indirect=True)
@pytest.mark.parametrize("order", [[1, 2], [2, 1]])
def test_a_program_trains_two_pools_at_once_and_closes_them_in_any_order(
    order: list[int], meeting: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    steps = {number: 3 + number for number in order}
    for directory, given in [("both", steps), *((f"alone-{number}", {number: steps[number]}) for number in order)]:
        options = {**meeting, "steps": given, "timeout": 8.0}
        life = ranks.run(pool_root / directory, options, 2, loop="program_loops:at_once")
        assert life.ended_well, life.errors()
    for number in order:
        # The dense states differ, for each has the numbers that the process's generators draw next.
        both, alone = (pool_root / directory / str(number) for directory in ("both", f"alone-{number}"))
        assert digest_of_tables(both) == digest_of_tables(alone)


@pytest.mark.parametrize("meeting", MEETINGS, indirect=True)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_pool_that_is_closed_takes_nothing_from_those_that_are_open(
    shared_memory: bool, fails: bool, meeting: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    options = {**meeting, "fails": fails, "shared_memory": shared_memory, "timeout": 8.0}
    life = ranks.run(pool_root / "pools", options, 2, loop="program_loops:by_turns")
    assert life.ended_well, life.errors()
    # The program's own process group is its own to end.
    assert {left for rank in life.ranks for left in rank.all_said("left")} == {bool(meeting.get("init"))}


@pytest.mark.parametrize("meeting", MEETINGS, indirect=True)
@pytest.mark.parametrize("fails", [0, 1])
def test_a_program_that_catches_an_error_opens_its_pool_again_and_goes_on_exactly(
    fails: int, meeting: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    options = {**meeting, "fails": fails, "timeout": 8.0}
    life = ranks.run(pool_root / "again", options, 2, loop="program_loops:until_it_works", grace=0.2)
    assert life.ended_well, life.errors()
    for rank in life.ranks:
        (caught,) = rank.all_said("caught")
        error = "ZeroDivisionError: in the program's own report"
        assert caught == error if rank.number == fails else caught.endswith(f"rank {fails} failed: {error}")
    assert life.ranks[0].all_said("opened") == [0, 4]
    assert digest(pool_root / "again") == whole(ranks, pool_root / "whole", {})
