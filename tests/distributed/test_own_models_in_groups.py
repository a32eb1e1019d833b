"""A model, an optimizer and a schedule of one's own train in several ranks as the DLRM does."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from group_runs import SIGKILL, Act, Ranks, digest, small

STEPS = 14
OWN = {
    "model": {"build": "own_models:build", "hidden": 6},
    "optimizer": {"name": "NAdam", "lr": 0.01},
    "scheduler": {"name": "OneCycleLR", "max_lr": 0.02, "total_steps": STEPS},
    "validation": {"num_samples": 200},
}


def own() -> dict[str, object]:
    config = small(train={"steps": STEPS}, group={"timeout": 20.0})
    return {**config, **OWN}


def test_killed_anywhere_two_ranks_end_with_the_digest_of_an_undisturbed_run(ranks: Ranks, pool_root: Path) -> None:
    """Every rank has random numbers, batch statistics and a counter of its own."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    whole = ranks.run(pool_root / "whole", own(), 2)
    assert whole.ended_well, whole.errors()
    durable = 0
    for _ in range(2):
        rank = draw.randrange(2)
        act = Act(at=draw.choice(["train", "commit", "dense"]), nth=draw.randrange(1, 6), after=draw.random() < 0.5)
        life = ranks.run(pool_root / "killed", own(), 2, acts={rank: act})
        assert life.ranks[rank].signal == SIGKILL or life.ended_well
        durable = max(durable, life.durable)
    again = ranks.run(pool_root / "killed", own(), 2)
    assert again.ended_well, again.errors()
    assert again.opened is not None
    assert again.opened >= durable
    assert digest(pool_root / "killed") == digest(pool_root / "whole")
    assert again.evaluations == whole.evaluations
    np.testing.assert_array_less(whole.ranks[0].losses, 2.0)


def test_a_rank_that_only_owns_rows_takes_part(ranks: Ranks, pool_root: Path) -> None:
    life = ranks.run(pool_root / "pool", own(), 3, memory_ranks=1)
    assert life.ended_well, life.errors()


def test_data_without_dense_columns_train_on_two_ranks(ranks: Ranks, pool_root: Path) -> None:
    config = own()
    config["data"] = {"synthetic": {"num_samples": 4000, "rows": [50, 3000], "lookups": [1, 2], "num_dense": 0}}
    for model in (OWN["model"], {"top": [8, 1]}):
        pool = pool_root / str(len(model))
        life = ranks.run(pool, {**config, "model": model}, 2)
        assert life.ended_well, life.errors()


def test_a_model_that_does_not_fit_ends_all_ranks_before_a_pool_is_made(ranks: Ranks, pool_root: Path) -> None:
    life = ranks.run(pool_root / "pool", {**own(), "model": {"build": "own_models:narrow"}}, 2)
    assert not life.ended_well
    assert any("ConfigError" in error and "return logits.squeeze(1)" in error for error in life.errors().values())
    assert not (pool_root / "pool").exists()
