"""Ranks whose dense part is on a device: rows stay with their owners, vectors and gradients cross over; or owners keep
those of the coming batches in slots of their device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pool_digests import digest_of_tables

from group_runs import Act, Life, Ranks, digest, small
from holdfast.device.options import DeviceConfig
from holdfast.group.remote_rows import device_of_ranks
from holdfast.group.roles import Roles

pytestmark = pytest.mark.dear
GROUPS = {"one process": (1, 0), "2 ranks": (2, 0), "1 trainer, 1 memory rank": (2, 1)}

# With slots for all rows of an owner, or for those of few batches.
SLOTS = {"rows": "scratchpad", "scratchpad_bytes": 200_000}
FEW_SLOTS = {"rows": "scratchpad", "scratchpad_bytes": 4_000}


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
        ({"graphs": True}, "device.graphs: CUDA graphs need a CUDA device"),
        ({"all_reduce": "nccl"}, "device.all_reduce = 'nccl': rank 0: its device is cpu; rank 1: its device is cpu"),
    ],
)
def test_what_a_device_cannot_do_on_ranks_is_refused_by_name(
    device: dict[str, Any], words: str, ranks: Ranks, pool_root: Path
) -> None:
    life = ranks.run(pool_root / "pool", {**small(), "device": device}, 2, grace=0.2)
    assert any(words in message for message in life.errors().values()), life.errors()
    assert not (pool_root / "pool").exists()


@pytest.mark.parametrize(("rows", "where"), [("near_memory", "remote_rows.py"), ("scratchpad", "owned_rows.py")])
def test_what_is_sent_before_it_has_come_is_found(rows: str, where: str, ranks: Ranks, pool_root: Path) -> None:
    options = {"pretended": True, "forgets": True, "device": {**SLOTS, "rows": rows}}
    life = run(ranks, pool_root / "pool", options, "2 ranks")
    assert any(where in problem for problems in said(life, "problems") for problem in problems)


def test_a_rank_with_a_device_that_is_killed_costs_no_bit(ranks: Ranks, pool_root: Path) -> None:
    options = {"pretended": True, "timeout": 5.0}
    assert run(ranks, pool_root / "whole", options, "2 ranks").ended_well
    run(ranks, pool_root / "killed", options, "2 ranks", acts={1: Act(at="commit", nth=3)}, grace=0.2)
    assert run(ranks, pool_root / "killed", options, "2 ranks").ended_well
    assert digest(pool_root / "killed") == digest(pool_root / "whole")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_summed_on_devices_as_on_hosts(num_ranks: int, ranks: Ranks, pool_root: Path) -> None:
    """Of two kinds, of one that some trainers have, and of one that none has. Where a device's are, they stay."""
    lives = {}
    for way, where in (("auto", "cuda:0"), ("host", "cpu")):
        options = {"pretended": True, "mixed": True, "max_norm": 0.05, "device": {"all_reduce": way}}
        options["device"] |= {"rows": "near_memory"}
        lives[way] = ranks.run(pool_root / way, options, num_ranks, loop="device_loops:train")
        assert lives[way].ended_well, lives[way].errors()
        assert set(said(lives[way], "summed_on")) == {where}
        assert all(problems == [] for problems in said(lives[way], "problems"))
        assert all(moved == [] for moved in said(lives[way], "moved"))
    always = ["first.bias", "first.weight", "last.bias", "last.weight"]
    for life in lives.values():
        have = [rank.all_said("have") for rank in life.ranks]
        assert have[0] == [sorted([*always, "sometimes"]) if step % 3 < num_ranks else always for step in range(1, 7)]
        assert all(of_rank == have[0] for of_rank in have)
    assert digest(pool_root / "auto") == digest(pool_root / "host")


def test_one_trainer_that_sums_on_its_host_has_all_do_so(ranks: Ranks, pool_root: Path) -> None:
    options = {"pretended": True, "device": {"rows": "near_memory"}}
    by_rank = {"1": {"rows": "near_memory", "all_reduce": "host"}}
    life = run(ranks, pool_root / "pool", {**options, "device_of_rank": by_rank}, "2 ranks")
    assert life.ended_well, life.errors()
    assert set(said(life, "summed_on")) == {"cpu"}


# Loops, their options, and bytes for few slots of each of two ranks, or of three.
LOOPS = {
    "fp16 rows": ("device_loops:train", {"data_type": "fp16", "max_norm": 0.05}, (4000, 4000)),
    "rows on a disk": (
        "device_loops:train",
        {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 4},
        (4000, 4000),
    ),
    "two collections, announced": (
        "own_loops:train",
        {"ahead": 2, "max_norm": 0.05, "evaluate_every": 2},
        (3000, 3000),
    ),
    "a loss that overflows": (
        "own_loops:train",
        {"scaler": True, "overflow_at": 3, "dense_interval": 4, "ahead": 3},
        (6000, 6000),
    ),
    "learned weights": ("own_loops:weighted", {"pairs": True, "learned": True, "ahead": 1}, (4000, 4000)),
    "keys": (
        "keyed_loops:train",
        {"ahead": 2, "ttl_steps": 4, "evaluate_every": 3, "dense_interval": 5},
        (12000, 8000),
    ),
    "keys that make room": (
        "keyed_loops:train",
        {"dense": True, "max_keys": 64, "admit_after": 2},
        (50000, 50000),
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_owners_in_slots_end_with_the_bits_of_owners_near_memory(
    loop: str, num_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    trains, given, few = LOOPS[loop]
    options = {**given, "steps": 12}
    few_slots = {**SLOTS, "scratchpad_bytes": few[num_ranks - 2]}
    scores, brought = [], []
    direct = () if "medium" in given else (("direct", {**few_slots, "rows": "direct"}),)
    for name, device in (("near", {"rows": "near_memory"}), ("slots", SLOTS), ("few", few_slots), *direct):
        life = ranks.run(pool_root / name, {**options, "device": device}, num_ranks, loop=trains)
        assert life.ended_well, life.errors()
        scores.append((said(life, "score"), said(life, "weights")))
        brought.append(sum(of.get("device_rows_missed", 0) for of in said(life, "traffic")))
        assert digest_of_tables(pool_root / name) == digest_of_tables(pool_root / "near")
    assert all(score == scores[0] for score in scores)
    assert brought[0] == 0 < brought[1] < min(brought[2:])  # rows of few slots came, went, and came again


def test_owners_in_slots_take_a_backward_pass_of_each_of_two_losses(ranks: Ranks, pool_root: Path) -> None:
    options = {"pairs": True, "two_losses": True}
    found = []
    for name, device in (("near", {"rows": "near_memory"}), ("slots", SLOTS)):
        life = ranks.run(pool_root / name, {**options, "device": device}, 2, loop="own_loops:weighted")
        assert life.ended_well, life.errors()
        found.append([*said(life, "score"), *(weight for weights in said(life, "weights") for weight in weights)])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_type": "fp16"},
        {"medium": "block", "dense_interval": 3},
        {"device": {**FEW_SLOTS, "rows": "direct"}, "mixed": True},
    ],
)
def test_slots_of_a_device_are_read_and_written_in_order(
    options: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    near = {**options, "device": {}}
    for name, device in (("near", near), ("slots", {"pretended": True, "device": FEW_SLOTS, **options})):
        life = run(ranks, pool_root / name, device, "2 ranks")
        assert life.ended_well, life.errors()
        assert all(problems == [] for problems in said(life, "problems"))
    assert digest_of_tables(pool_root / "slots") == digest_of_tables(pool_root / "near")


@pytest.mark.parametrize("dense_interval", [1, 4])
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("nth", [2, 5])
def test_a_rank_that_dies_ahead_of_its_part_costs_no_bit(
    nth: int, killed: int, dense_interval: int, ranks: Ranks, pool_root: Path
) -> None:
    """The life after it goes on near memory, and the last one in slots again."""
    loop = {"loop": "own_loops:train"}
    options = {"timeout": 5.0, "dense_interval": dense_interval, "ahead": 1, "device": SLOTS}
    assert ranks.run(pool_root / "whole", options, 2, **loop).ended_well
    near = {**options, "device": {}}
    for act, of_life in ((Act(at="commit", nth=nth), options), (Act(at="commit", nth=1), near)):
        life = ranks.run(pool_root / "killed", of_life, 2, acts={killed: act}, grace=0.2, **loop)
        assert not life.ended_well
    assert ranks.run(pool_root / "killed", options, 2, **loop).ended_well
    assert digest(pool_root / "killed") == digest(pool_root / "whole")


@pytest.mark.parametrize("persist_point", [3, 17, 40, 71])
def test_a_part_that_ends_while_it_takes_what_a_device_did_goes_back_with_all(
    persist_point: int, ranks: Ranks, pool_root: Path
) -> None:
    loop = {"loop": "own_loops:train"}
    options = {"timeout": 5.0, "dense_interval": 3, "device": SLOTS}
    assert ranks.run(pool_root / "whole", options, 2, **loop).ended_well
    ranks.run(pool_root / "killed", options, 2, acts={1: Act(persist_point=persist_point)}, grace=0.2, **loop)
    assert ranks.run(pool_root / "killed", options, 2, **loop).ended_well
    assert digest(pool_root / "killed") == digest(pool_root / "whole")


def test_a_small_log_is_never_full_of_steps_that_a_device_is_ahead(ranks: Ranks, pool_root: Path) -> None:
    options = {"steps": 40, "device": SLOTS, "log_bytes": 40 << 10, "dense_interval": 1000}
    life = ranks.run(pool_root / "pool", options, 2, loop="device_loops:train")
    assert life.ended_well, life.errors()


REFUSED = {
    "memory ranks": ({"device": SLOTS}, 1, "ConfigError: device.rows = 'scratchpad': memory ranks own the rows"),
    "direct, memory ranks": (
        {"device": {"rows": "direct"}}, 1, "ConfigError: device.rows = 'direct': memory ranks own the rows",
    ),
    "direct, a disk": (
        {"device": {"rows": "direct"}, "medium": "block"}, 0,
        "ConfigError: device.rows = 'direct' needs rows that are kept in place",
    ),
    "two forward passes": ({"device": SLOTS, "micro_batches": 2}, 0, "StepError: a second forward pass"),
    "too few slots": (
        {"device": {**SLOTS, "scratchpad_bytes": 400}}, 0, "WindowTooLarge: one batch has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_slots_on_ranks_cannot_do_is_refused_by_name(what: str, ranks: Ranks, pool_root: Path) -> None:
    options, memory_ranks, words = REFUSED[what]
    life = ranks.run(pool_root / "pool", options, 2, memory_ranks=memory_ranks, loop="own_loops:train", grace=0.2)
    assert any(message.startswith(words) for message in life.errors().values()), life.errors()


@pytest.mark.parametrize(("memory_ranks", "way"), [(0, "scratchpad"), (1, "near_memory")])
def test_where_nothing_is_said_rows_are_kept_where_their_owners_have_a_device(memory_ranks: int, way: str) -> None:
    assert device_of_ranks(DeviceConfig(kind="cuda"), Roles(world_size=2, memory_ranks=memory_ranks)).way == way


def test_the_command_line_trains_in_slots_on_ranks(ranks: Ranks, pool_root: Path) -> None:
    config = small(train={"steps": 6})
    for name, device in (
        ("near", {"rows": "near_memory"}),
        ("slots", {"rows": "scratchpad", "scratchpad_bytes": 1 << 20}),
    ):
        life = ranks.run(pool_root / name, {**config, "device": device}, 2)
        assert life.ended_well, life.errors()
    assert digest(pool_root / "slots") == digest(pool_root / "near")
