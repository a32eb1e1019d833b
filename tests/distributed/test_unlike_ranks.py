"""A rank that computes otherwise than it did, or than rank 0 does, says so once, and which it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from group_runs import GROUPS, Act, Ranks

CHANGED = "the run goes on where it was, but not with the bits that it would have had without this change: threads: "
MEANS = " (PyTorch cuts its sums by threads)"


@pytest.mark.dear
@pytest.mark.parametrize("group", GROUPS)
def test_a_rank_with_other_threads_than_before_is_named_once(group: str, ranks: Ranks, pool_root: Path) -> None:
    num_ranks, memory_ranks = GROUPS[group]
    trainers = num_ranks - memory_ranks

    def warned(steps: int, *threads: int) -> list[str]:
        """What all ranks say in a life with so many threads by rank; the last number is all further ones'."""
        of_ranks = [threads[min(rank, len(threads) - 1)] for rank in range(num_ranks)]
        acts = {rank: Act(config={"threads": number}) for rank, number in enumerate(of_ranks)}
        options = {"steps": steps}
        loop = "thread_loops:warned"
        life = ranks.run(pool_root / "pool", options, num_ranks, memory_ranks=memory_ranks, acts=acts, loop=loop)
        assert life.ended_well, life.errors()
        return [text for rank in life.ranks for said in rank.all_said("warned") for text in said]

    unlike = [f"rank {rank}: {CHANGED}was 1, is 2{MEANS}" for rank in range(1, trainers)]
    assert warned(2, 1, 2) == unlike  # a new run's, beside rank 0
    assert warned(3, 1, 2) == []
    assert warned(4, 2, 2) == [f"{CHANGED}was 1, is 2{MEANS}"]
    assert warned(5, 1, 1) == [f"{CHANGED}was 2, is 1{MEANS}"]  # the same on all: once
    assert warned(6, 1, 2) == unlike
