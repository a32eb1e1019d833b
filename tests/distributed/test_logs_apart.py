"""Row logs of a group on a medium of their own: exact over kills and other numbers of ranks, and none is left over."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from group_runs import Act, Ranks, digest

pytestmark = pytest.mark.dear

IN_A_LOG: dict[str, Any] = {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3, "timeout": 5.0}


@pytest.mark.parametrize(("num_ranks", "memory_ranks"), [(2, 0), (3, 1)], ids=["2 ranks", "2 trainers, 1 memory rank"])
def test_kills_and_a_new_number_of_ranks_cost_no_bit_and_leave_a_log_for_each_owner(
    num_ranks: int, memory_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    logs = pool_root / "logs"
    logs.mkdir()
    options, apart = IN_A_LOG, {**IN_A_LOG, "logs": str(logs)}
    draw = random.Random(f"{num_ranks} {memory_ranks}")
    expected, directory = pool_root / "expected", pool_root / "killed"
    for pool, how in ((expected, options), (directory, apart)):
        if pool == directory:
            for _ in range(3):
                act = Act(
                    at=draw.choice(["commit", "dense", "settle"]), nth=draw.randrange(1, 6), after=draw.random() < 0.5
                )
                ranks.run(
                    pool,
                    how,
                    num_ranks,
                    memory_ranks=memory_ranks,
                    loop="train",
                    acts={draw.randrange(num_ranks): act},
                    grace=0.2,
                )
        assert ranks.run(pool, how, num_ranks, memory_ranks=memory_ranks, loop="train").ended_well
    assert digest(directory) == digest(expected)
    num_owners = memory_ranks or num_ranks
    assert len(list(logs.glob("*.row-log"))) == num_owners
    assert all(path.is_symlink() for path in directory.glob("writers-*/*/row-log-0000"))
    # Shards are dealt out to other owners: their logs lie where the others lay, which are gone.
    for pool, how in ((expected, options), (directory, apart)):
        assert ranks.run(pool, {**how, "steps": 11}, 4, loop="train").ended_well
    assert digest(directory) == digest(expected)
    assert len(list(logs.glob("*.row-log"))) == 4
