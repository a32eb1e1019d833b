"""Ranks whose devices are real: all of them have one GPU, and NCCL is told that each is on a host of its own.

What is true of any device is tested on one that is only pretended (test_devices_on_ranks.py); here are CUDA and NCCL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool_digests import digest_of_tables

from group_runs import Act, Life, Ranks, digest, small

pytestmark = [
    pytest.mark.dear,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

NCCL = {"all_reduce": "nccl"}
WAYS = {
    "near_memory": {"rows": "near_memory"},
    "few slots": {"rows": "scratchpad", "scratchpad_bytes": 4_000},
    "direct": {"rows": "direct", "scratchpad_bytes": 4_000},
}


def train(ranks: Ranks, directory: Path, num_ranks: int, options: dict[str, Any], **how: Any) -> Life:
    options = {"real": True, "mixed": True, "timeout": 30.0, "steps": 9, **options}
    life = ranks.run(directory, options, num_ranks, loop="device_loops:train", hung_after=150.0, **how)
    assert "acts" in how or life.ended_well, life.errors()
    return life


def run(ranks: Ranks, directory: Path, num_ranks: int, **sections: Any) -> Life:
    """By the command line's own trainer."""
    group = {"shards": 8, "split_rows": 1000, "timeout": 30.0}
    life = ranks.run(directory, small(group=group, **sections), num_ranks, hung_after=150.0)
    assert life.ended_well, life.errors()
    return life


def said(life: Life, name: str) -> set[Any]:
    return {what for rank in life.ranks for what in rank.all_said(name)}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_costs_no_bit_and_the_others_end(
    way: str, num_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    options = {"device": {**WAYS[way], **NCCL}, "dense_interval": 1 if way == "near_memory" else 3}
    assert said(train(ranks, pool_root / "whole", num_ranks, options), "summed_on") == {"cuda:0"}
    acts = {1: Act(at="commit", nth=5)}
    killed = train(ranks, pool_root / "killed", num_ranks, options, acts=acts, grace=0.2)
    killed.check_that_the_others_ended(within=6.0)
    train(ranks, pool_root / "killed", num_ranks, options)
    assert digest(pool_root / "killed") == digest(pool_root / "whole")


def test_a_rank_that_dies_in_a_sum_is_waited_for_no_longer_than_the_deadline(ranks: Ranks, pool_root: Path) -> None:
    options = {"device": {**WAYS["near_memory"], **NCCL}, "timeout": 8.0}
    acts = {1: Act(at="device sum", nth=5)}
    train(ranks, pool_root / "pool", 2, options, acts=acts, grace=0.2).check_that_the_others_ended(within=10.0)


def test_two_ranks_have_the_same_bits_from_gpu_to_gpu_and_from_host_to_host(ranks: Ranks, pool_root: Path) -> None:
    for name, where in (("nccl", "cuda:0"), ("host", "cpu"), ("auto", "cpu")):  # auto: they have one GPU
        options = {"device": {**WAYS["near_memory"], "all_reduce": name}}
        assert said(train(ranks, pool_root / name, 2, options), "summed_on") == {where}
        assert digest(pool_root / name) == digest(pool_root / "nccl")


def test_all_ways_to_rows_end_with_the_same_tables(ranks: Ranks, pool_root: Path) -> None:
    for way in ("few slots", "direct"):
        train(ranks, pool_root / way, 2, {"device": {**WAYS[way], **NCCL}, "mixed": False})
    assert digest_of_tables(pool_root / "few slots") == digest_of_tables(pool_root / "direct")


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(2, 24), (2, 25), (3, 25)])
def test_replays_on_ranks_end_with_the_bits_of_what_is_written(
    num_ranks: int, batch_size: int, ranks: Ranks, pool_root: Path
) -> None:
    """Of an optimizer that is the same: Adam counts its steps on the device where it is to be replayed."""
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    for name, graphs in (("written", False), ("replayed", True)):
        device = {"kind": "cuda", "rows": "near_memory", "graphs": graphs, **NCCL}
        sections = {"train": {"batch_size": batch_size, "steps": 12}, "optimizer": optimizer}
        run(ranks, pool_root / name, num_ranks, device=device, **sections)
    assert digest(pool_root / "written") == digest(pool_root / "replayed")


def test_compiled_parts_and_replays_of_ranks_that_are_killed(ranks: Ranks, pool_root: Path) -> None:
    device = {"kind": "cuda", "rows": "scratchpad", "compile": True, "graphs": True, "scratchpad_bytes": 20_000, **NCCL}
    for steps in (5, 12):  # the second life compiles and records anew
        run(ranks, pool_root / "lives", 2, device=device, train={"batch_size": 24, "steps": steps})
    run(ranks, pool_root / "whole", 2, device=device, train={"batch_size": 24, "steps": 12})
    assert digest(pool_root / "lives") == digest(pool_root / "whole")
