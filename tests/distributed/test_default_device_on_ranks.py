"""What `torch.set_default_device` says is where a user's tensors are made, and none of what ranks say to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from group_runs import GROUPS, Act, Ranks, run, whole

pytestmark = pytest.mark.dear

LOOPS: dict[str, dict[str, Any]] = {
    "train": {"ahead": 1, "max_norm": 0.05, "evaluate_every": 4},
    "weighted": {"learned": True},
}


@pytest.mark.parametrize("way", [True, False], ids=["through memory", "over gloo"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_train_and_resume_under_any_default_device(
    group: str, loop: str, way: bool, ranks: Ranks, pool_root: Path
) -> None:
    options = {**LOOPS[loop], "shared_memory": way, "timeout": 5.0}
    expected = whole(ranks, pool_root / "whole", options, group, loop=loop)
    elsewhere = f"elsewhere_loops:{loop}"
    run(ranks, pool_root / "killed", options, group, loop=elsewhere, acts={1: Act(at="commit", nth=3)}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options, group, loop=elsewhere) == expected
