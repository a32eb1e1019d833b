"""Ranks whose dense part is on a device: rows stay with their owners, vectors and gradients cross over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pool_digests import digest_of_tables

from group_runs import Act, Life, Ranks, digest, small

pytestmark = pytest.mark.dear
GROUPS = {"one process": (1, 0), "2 ranks": (2, 0), "1 trainer, 1 memory rank": (2, 1)}


def run(ranks: Ranks, directory: Path, options: dict[str, Any], group: str, **how: Any) -> Life:
    num_ranks, memory_ranks = GROUPS[group]
    return ranks.run(directory, options, num_ranks, memory_ranks=memory_ranks, loop="device_loops:train", **how)


def said(life: Life, name: str) -> list[Any]:
    return [what for rank in life.ranks for what in rank.all_said(name)]


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}, {"medium": "block", "log_bytes": 60 << 10}])
@pytest.mark.parametrize("group", GROUPS)
def test_a_device_ends_with_the_bits_of_the_processor_and_everything_in_order(
    group: str, options: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    for name, pretended in (("processor", False), ("device", True)):
        life = run(ranks, pool_root / name, {**options, "pretended": pretended}, group)
        assert life.ended_well, life.errors()
        assert all(problems == [] for problems in said(life, "problems"))
    assert digest_of_tables(pool_root / "device") == digest_of_tables(pool_root / "processor")


def test_a_declared_accelerator_trains_beside_a_memory_rank(ranks: Ranks, pool_root: Path) -> None:
    times = {"bottom_forward_s": 1e-4, "top_s": 2e-4, "bottom_backward_s": 1e-4, "link_bandwidth_bytes_per_s": 1e9}
    config = {**small(), "device": {"dial": {"name": "a declared GPU", **times}}}
    life = ranks.run(pool_root / "pool", config, 2, memory_ranks=1)
    assert life.ended_well, life.errors()
    losses = said(life, "loss")
    assert 0.0 in losses and all(loss == 0.0 or math.isnan(loss) for loss in losses)  # a memory rank has none


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_parts_on_a_medium_with_a_dial_end_with_the_same_bits(ranks: Ranks, pool_root: Path, medium: str) -> None:
    pool = {"medium": medium, "log_bytes": 60 << 10}
    for name, slow in (("plain", {}), ("dialled", {"dial": {"like": "cxl-pmem"}, "synchronous": True})):
        life = ranks.run(pool_root / name, small(pool={**pool, **slow}), 3, memory_ranks=1)
        assert life.ended_well, life.errors()
    assert digest_of_tables(pool_root / "dialled") == digest_of_tables(pool_root / "plain")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"rows": "scratchpad"}, "their owners look them up"),
        ({"kind": "cuda", "rows": "near_memory", "graphs": True}, "device.graphs = true is for one process"),
    ],
)
def test_what_a_device_cannot_do_on_ranks_is_refused_by_name(
    device: dict[str, Any], words: str, ranks: Ranks, pool_root: Path
) -> None:
    life = ranks.run(pool_root / "pool", {**small(), "device": device}, 2, grace=0.2)
    assert any(words in message for message in life.errors().values()), life.errors()
    assert not (pool_root / "pool").exists()


def test_gradients_that_are_sent_before_they_have_come_are_found(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"pretended": True, "forgets": True}, "2 ranks")
    assert any("remote_rows.py" in problem for problems in said(life, "problems") for problem in problems)


def test_a_rank_with_a_device_that_is_killed_costs_no_bit(ranks: Ranks, pool_root: Path) -> None:
    options = {"pretended": True, "timeout": 5.0}
    assert run(ranks, pool_root / "whole", options, "2 ranks").ended_well
    run(ranks, pool_root / "killed", options, "2 ranks", acts={1: Act(at="commit", nth=3)}, grace=0.2)
    assert run(ranks, pool_root / "killed", options, "2 ranks").ended_well
    assert digest(pool_root / "killed") == digest(pool_root / "whole")
