"""Ranks on hosts of their own, one of which is cut off or slowed in the middle of training."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from group_runs import LOG_STORE, SLACK_SECONDS, Act, Ranks, digest, small
from namespaces import Network, why_not, why_not_slow

REASON = why_not()
REASON_SLOW = why_not_slow()
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

TIMEOUT = 2.0
GRACE = 0.5
CONFIG = small(group={"timeout": TIMEOUT}, pool={"dense_interval": 2, **LOG_STORE["pool"]})


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """One rank waits once for its test."""
    with Ranks() as ranks:
        yield ranks


@pytest.mark.parametrize(("cut_off", "memory_ranks"), [pytest.param(2, 0, marks=pytest.mark.soak), (2, 1), (0, 0)])
def test_a_rank_that_is_cut_off_is_named_and_the_run_ends_as_one_that_was_not(
    cut_off: int, memory_ranks: int, fresh_ranks: Ranks, pool_root: Path
) -> None:
    ranks, pool, whole = fresh_ranks, pool_root / "pool", pool_root / "whole"
    assert ranks.run(whole, CONFIG, 3, memory_ranks=memory_ranks).ended_well
    with Network(3) as network, ThreadPoolExecutor() as threads:
        hosts = network.hosts
        acts = {1: Act(at="commit", nth=6, do="wait")}
        training = threads.submit(
            ranks.run, pool, CONFIG, 3, memory_ranks=memory_ranks, acts=acts, grace=GRACE, hosts=hosts
        )
        ranks.await_waiting(training)
        hosts[cut_off].cut()
        ranks.go_on.touch()
        life = training.result()
        errors = life.errors()
        assert len(errors) == 3, errors
        assert all(error.startswith("GroupError") for error in errors.values()), errors
        if cut_off == 0:  # with the store: nobody can ask who else is there
            assert all("network is cut off" in errors[rank] for rank in (1, 2)), errors
        else:
            named = f"rank {cut_off} does not answer"
            assert named in errors[0]
            assert named in errors[1] or "nor the group's store" in errors[1]  # rank 0 keeps it, and may end first
            assert "network is cut off" in errors[cut_off]
        ended = [rank.ended for rank in life.ranks]
        assert max(ended) - min(ended) < TIMEOUT + GRACE + SLACK_SECONDS
        hosts[cut_off].mend()
        again = ranks.run(pool, CONFIG, 3, memory_ranks=memory_ranks, hosts=hosts)
        assert again.ended_well, again.errors()
        assert again.opened is not None and again.opened >= life.durable
    assert digest(pool) == digest(whole)


@pytest.mark.skipif(REASON_SLOW is not None, reason=str(REASON_SLOW))
def test_a_rank_that_is_slow_is_waited_for(fresh_ranks: Ranks, pool_root: Path) -> None:
    pool, whole = pool_root / "pool", pool_root / "whole"
    assert fresh_ranks.run(whole, CONFIG, 3).ended_well
    with Network(3) as network:
        network.hosts[1].slow(4_000_000)
        life = fresh_ranks.run(pool, CONFIG, 3, hosts=network.hosts)
    assert life.ended_well, life.errors()
    assert digest(pool) == digest(whole)
