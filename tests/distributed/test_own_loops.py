"""A loop of anybody's own runs in several processes as it does in one: exact over kills, or refused by name."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from group_runs import GROUPS, Act, Life, Ranks, digest, run, whole
from holdfast.admin.inspection import inspect_pool
from holdfast.errors import ConfigError
from holdfast.pools.read_only import at_rest, layout_of, open_reader

pytestmark = pytest.mark.dear

STORES: dict[str, dict[str, Any]] = {
    "in place": {},
    "log": {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3},
}


def rows_of(directory: Path, table: int, count: int, dim: int) -> np.ndarray[Any, Any]:
    weights = np.zeros(count * dim * 4, np.uint8)
    with at_rest(directory) as (reader, _):
        state = np.zeros(count * layout_of(reader.tables[table]).state_bytes, np.uint8)
        reader.read_rows(table, 0, count, weights, state)
    return weights.view(np.float32).reshape(count, dim)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_rank_that_is_killed_in_a_loop_of_ones_own_costs_no_bit(
    group: str, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "timeout": 5.0}
    expected = whole(ranks, pool_root / "whole", options, group)
    draw = random.Random(f"{group} {store}")
    directory = pool_root / "killed"
    for _ in range(3):
        victim, nth = draw.randrange(GROUPS[group][0]), draw.randrange(1, 6)
        place = draw.choice(["commit", "dense", "settle", "collective", "note"])
        act = Act(at=place, nth=nth * 9 if place == "collective" else nth, after=draw.random() < 0.5)
        run(ranks, directory, options, group, acts={victim: act}, grace=0.2)
    assert whole(ranks, directory, options, group) == expected


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_sequences_on_ranks_that_are_killed_end_with_the_same_bits(
    group: str, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "timeout": 5.0, "sequences": True, "ahead": 2}
    expected = whole(ranks, pool_root / "whole", options, group)
    draw = random.Random(f"{store} {group}")
    for _ in range(2):
        act = Act(at=draw.choice(["commit", "dense", "collective"]), nth=draw.randrange(1, 6))
        run(ranks, pool_root / "killed", options, group, acts={draw.randrange(GROUPS[group][0]): act}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options, group) == expected
    assert whole(ranks, pool_root / "bags", {**options, "sequences": False}, group) != expected


@pytest.mark.parametrize("persist_point", [3, 11, 24])
def test_a_rank_that_is_killed_at_a_store_to_its_pool_costs_no_bit(
    persist_point: int, ranks: Ranks, pool_root: Path
) -> None:
    expected = whole(ranks, pool_root / "whole", {})
    act = Act(persist_point=persist_point)
    run(ranks, pool_root / "killed", {"timeout": 5.0}, acts={persist_point % 2: act}, grace=0.2)
    assert whole(ranks, pool_root / "killed", {}) == expected


def test_each_rank_gets_back_the_plain_values_that_were_its_own(ranks: Ranks, pool_root: Path) -> None:
    def ended(directory: Path, num_ranks: int, steps: int) -> list[tuple[float, float]]:
        """Of each rank the sum of its losses, and that before the last step."""
        life = ranks.run(directory, {"steps": steps}, num_ranks, loop="own_loops:train")
        assert life.ended_well, life.errors()
        last = [(rank.all_said("sum")[-1], rank.all_said("loss")[-1]) for rank in life.ranks]
        return [(total, total - loss) for total, loss in last]

    whole = ended(pool_root / "whole", 2, 8)
    assert whole[0] != whole[1]
    run(ranks, pool_root / "killed", {"timeout": 5.0}, acts={1: Act(at="commit", nth=5)}, grace=0.2)
    assert ended(pool_root / "killed", 2, 8) == whole
    of_three = [before for _, before in ended(pool_root / "killed", 3, 9)]
    first, second = (total for total, _ in whole)
    assert of_three == pytest.approx([first, second, first])  # the third was not there, and begins with rank 0's


def test_memory_ranks_change_no_bit(ranks: Ranks, pool_root: Path) -> None:
    assert whole(ranks, pool_root / "2", {}) == whole(ranks, pool_root / "4", {}, "2 trainers, 2 memory ranks")


@pytest.mark.parametrize("group", ["2 ranks", "2 trainers, 2 memory ranks"])
def test_batches_that_are_announced_ahead_change_no_bit(group: str, ranks: Ranks, pool_root: Path) -> None:
    options = {**STORES["log"]}
    expected = whole(ranks, pool_root / "0", options, group)
    assert whole(ranks, pool_root / "3", {**options, "ahead": 3}, group) == expected


@pytest.mark.parametrize("group", GROUPS)
def test_waiting_for_rows_between_dense_states_changes_no_bit(group: str, ranks: Ranks, pool_root: Path) -> None:
    options = {**STORES["log"], "dense_interval": 4}
    expected = whole(ranks, pool_root / "without", options, group)
    assert whole(ranks, pool_root / "with", {**options, "settle_every": 1}, group) == expected


def test_a_rank_that_has_fewer_batches_is_named_as_such_and_not_as_dead(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"steps": 4, "fewer_on_rank_1": 2, "flush": False, "timeout": 5.0})
    assert "rank 1 ended after step 2 and closed its pool; all ranks have to make the same steps" in life.errors()[0]


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("bags", [0, 4])
def test_a_rank_whose_part_of_a_batch_has_no_ids_trains_with_the_others(
    bags: int, shared_memory: bool, ranks: Ranks, pool_root: Path
) -> None:
    options = {"bags": bags, "steps": 2, "shared_memory": shared_memory, "timeout": 5.0}
    life = run(ranks, pool_root / "pool", options, loop="ids_on_rank_0_alone")
    assert life.ended_well, life.errors()
    moved = rows_of(pool_root / "pool", 0, 7, 6)
    assert np.all(np.abs(moved[:6] + 0.5) < 0.2)  # by two steps of 0.5 times half the gradient, from within 0.16
    assert np.all(np.abs(moved[6]) < 0.2)


@pytest.mark.parametrize("group", GROUPS)
def test_evaluation_between_steps_leaves_no_trace(group: str, ranks: Ranks, pool_root: Path) -> None:
    expected = whole(ranks, pool_root / "without", {}, group)
    assert whole(ranks, pool_root / "with", {"evaluate_every": 3, "ahead": 2}, group) == expected


@pytest.mark.parametrize("group", ["2 ranks", "2 trainers, 2 memory ranks"])
def test_accumulated_and_clipped_gradients_are_exact_over_a_kill(group: str, ranks: Ranks, pool_root: Path) -> None:
    options = {"micro_batches": 3, "max_norm": 0.05, "scaler": True, "ahead": 1, "timeout": 5.0}
    life = run(ranks, pool_root / "whole", options, group)
    norms = [rank.all_said("norm") for rank in life.ranks[:2]]
    assert norms[0] == norms[1]
    assert min(norms[0]) > options["max_norm"]  # so it clipped
    run(ranks, pool_root / "killed", options, group, acts={1: Act(at="commit", nth=5)}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options, group) == digest(pool_root / "whole")


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(ranks: Ranks, pool_root: Path) -> None:
    options = {"scaler": True, "dropout": 0.0, "steps": 4}
    before = whole(ranks, pool_root / "pool", {**options, "steps": 3})
    rows = rows_of(pool_root / "pool", 0, 3000, 6)
    assert whole(ranks, pool_root / "pool", {**options, "overflow_at": 4}) != before  # its step counts
    assert np.array_equal(rows, rows_of(pool_root / "pool", 0, 3000, 6))
    assert np.isfinite(rows).all()


def test_a_skipped_step_is_no_step_of_the_row_optimizer_after_a_kill_either(ranks: Ranks, pool_root: Path) -> None:
    """Adam divides by what its number of steps gives."""
    options = {"scaler": True, "overflow_at": 2, "timeout": 5.0}
    expected = whole(ranks, pool_root / "whole", options)
    run(ranks, pool_root / "killed", options, acts={1: Act(at="commit", nth=5)}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options) == expected
    with at_rest(pool_root / "whole") as (reader, _):
        assert reader.commit["row_updates"] == reader.commit["step"] - 1


def model_of(directory: Path) -> dict[str, torch.Tensor]:
    from holdfast.state import state_tree

    with at_rest(directory) as (reader, _):
        state = reader.dense_state()
    assert state is not None
    model: dict[str, torch.Tensor] = state_tree.unpack(*state[1:])["model"]
    return model


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_relaxed_recovery_keeps_the_newest_rows_that_all_have_beside_an_older_dense_state(
    group: str, store: str, ranks: Ranks, pool_root: Path, is_sample: bool
) -> None:
    persist_points = (9,) if is_sample else (1, 4, 9, 15)  # of rank 0, which is killed there while it opens the pool
    options = {**STORES[store], "log_bytes": 1 << 20, "dense_interval": 4, "timeout": 5.0}
    owner = GROUPS[group][0] - 1
    run(ranks, pool_root / "killed", options, group, acts={owner: Act(at="commit", nth=8)}, grace=0.2)
    step = int(open_reader(pool_root / "killed").commit["step"])  # of the rows that all have
    assert 4 < step < 8
    relaxed = {**options, "recovery": "relaxed", "steps": step, "flush": False}
    shutil.copytree(pool_root / "killed", pool_root / "exact")
    for persist_point in persist_points:
        shutil.copytree(pool_root / "killed", pool_root / f"{persist_point}")
        run(
            ranks, pool_root / f"{persist_point}", relaxed, group, acts={0: Act(persist_point=persist_point)}, grace=0.2
        )
    for name in ("killed", *map(str, persist_points)):
        life = run(ranks, pool_root / name, relaxed, group)
        assert (life.ended_well, life.opened) == (True, step), life.errors()
    assert {digest(pool_root / f"{point}") for point in persist_points} == {digest(pool_root / "killed")}
    whole(ranks, pool_root / "rows", {**options, "steps": step}, group)
    whole(ranks, pool_root / "dense", {**options, "steps": 4}, group)
    for table, count in enumerate((3000, 40, 700)):
        kept, there = (rows_of(pool_root / name, table, count, 6) for name in ("killed", "rows"))
        np.testing.assert_array_equal(kept, there)
    older, kept_model = model_of(pool_root / "dense"), model_of(pool_root / "killed")
    assert all(torch.equal(older[name], kept_model[name]) for name in older)
    assert run(ranks, pool_root / "exact", options, group).opened == 4


@pytest.mark.parametrize("group", GROUPS)
def test_relaxed_recovery_of_rows_that_were_half_taken_back_is_the_exact_one(
    group: str, ranks: Ranks, pool_root: Path, is_sample: bool
) -> None:
    """All ranks die while an exact recovery takes rows in place back."""
    options = {"log_bytes": 1 << 20, "dense_interval": 4, "timeout": 5.0}
    owner = GROUPS[group][0] - 1
    run(ranks, pool_root / "killed", options, group, acts={owner: Act(at="commit", nth=8)}, grace=0.2)
    step = int(open_reader(pool_root / "killed").commit["step"])
    exact = {**options, "steps": step, "flush": False}
    relaxed = {**exact, "recovery": "relaxed"}
    expected = {}
    for name, how in (("exact", exact), ("relaxed", relaxed)):
        shutil.copytree(pool_root / "killed", pool_root / name)
        life = run(ranks, pool_root / name, how, group)
        assert life.ended_well, life.errors()
        expected[life.opened] = digest(pool_root / name)
    assert list(expected) == [4, step]
    opened = []
    for persist_point in (2, 6, 7, 12) if is_sample else range(2, 16):
        pool = pool_root / f"{persist_point}"
        shutil.copytree(pool_root / "killed", pool)
        acts = {rank: Act(persist_point=persist_point) for rank in range(GROUPS[group][0])}
        run(ranks, pool, {**exact, "steps": 4}, group, acts=acts, grace=0.2)
        told = inspect_pool(pool)["recovery"]
        life = run(ranks, pool, relaxed, group)
        assert life.ended_well, life.errors()
        opened.append(life.opened)
        assert (told["exact_step"], told["relaxed_step"]) == (4, life.opened), told["would"]
        assert digest(pool) == expected[life.opened], f"killed at persist point {persist_point}"
    assert (opened[0], opened[-1]) == (step, 4)


def test_relaxed_recovery_over_other_ranks_keeps_the_newest_rows_too(ranks: Ranks, pool_root: Path) -> None:
    options = {"log_bytes": 1 << 20, "dense_interval": 4, "timeout": 5.0}
    run(ranks, pool_root / "pool", options, "3 ranks", acts={1: Act(at="commit", nth=8)}, grace=0.2)
    step = int(open_reader(pool_root / "pool").commit["step"])
    life = run(ranks, pool_root / "pool", {**options, "recovery": "relaxed", "steps": step}, "2 ranks")
    assert (life.ended_well, life.opened) == (True, step), life.errors()


def test_rows_are_those_of_one_process(ranks: Ranks, pool_root: Path) -> None:
    alone = ranks.run(pool_root / "1", {}, 1, loop="rows_alone")
    assert alone.ended_well, alone.errors()
    for group in GROUPS:
        assert whole(ranks, pool_root / group, {}, group, loop="rows_alone")
        for table, count in ((0, 3000), (1, 700)):
            one, many = (rows_of(pool_root / name, table, count, 6) for name in ("1", group))
            if group == "3 ranks":  # a third is no float
                np.testing.assert_allclose(many, one, atol=1e-6)
            else:
                np.testing.assert_array_equal(many, one)


def weights_said(life: Life, step: int) -> list[float]:
    """The gradients of all trainers' weights in a step, as of the mean over all samples, feature by feature."""
    said = [
        (saying["weights"], sum(1 for other in life.ranks if other.all_said("weights")))
        for rank in life.ranks
        for saying in rank.said
        if saying.get("at") == step
    ]
    return sorted(weight / trainers for weights, trainers in said for weight in weights)


def test_weighted_bags_and_the_gradients_of_their_weights_are_those_of_one_process(
    ranks: Ranks, pool_root: Path
) -> None:
    alone = ranks.run(pool_root / "1", {}, 1, loop="weighted")
    assert alone.ended_well, alone.errors()
    for group in GROUPS:
        life = run(ranks, pool_root / group, {}, group, loop="weighted")
        assert life.ended_well, life.errors()
        is_exact = group != "3 ranks"  # a third is no float
        for step in range(1, 7):
            one, many = weights_said(alone, step), weights_said(life, step)
            assert one == many if is_exact else np.allclose(one, many, atol=1e-5)
        for table, count in ((0, 3000), (1, 700)):
            one_rows, rows = (rows_of(pool_root / name, table, count, 6) for name in ("1", group))
            np.testing.assert_allclose(rows, one_rows, atol=0 if is_exact else 1e-6)


@pytest.mark.parametrize("how", [{}, {"two_losses": True}], ids=["a loss", "two losses"])
def test_parts_of_weighted_bags_add_up_to_those_of_one_process(
    how: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    options = {"pairs": True, **how}
    alone = ranks.run(pool_root / "1", options, 1, loop="weighted")
    assert alone.ended_well, alone.errors()
    for group in GROUPS:
        life = run(ranks, pool_root / group, options, group, loop="weighted")
        assert life.ended_well, life.errors()
        for step in range(1, 7):
            assert np.allclose(weights_said(alone, step), weights_said(life, step), atol=1e-5)
        one_rows, rows = (rows_of(pool_root / name, 2, 3000, 6) for name in ("1", group))
        np.testing.assert_allclose(rows, one_rows, atol=1e-6)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_weighted_bags_are_exact_over_kills_and_announcements(
    group: str, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "pairs": True, "timeout": 5.0}
    for how in ({"learned": True}, {"ahead": 2}):
        directory = pool_root / next(iter(how))
        expected = whole(ranks, directory / "whole", {**options, **how, "ahead": 0}, group, loop="weighted")
        act = Act(at="collective", nth=60, after=True)
        run(ranks, directory / "killed", {**options, **how}, group, acts={1: act}, grace=0.2, loop="weighted")
        assert whole(ranks, directory / "killed", {**options, **how}, group, loop="weighted") == expected


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_that_are_captured_ahead_change_no_bit(
    group: str, store: str, ahead: int, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "steps": 8, "timeout": 5.0}
    expected = whole(ranks, pool_root / "without", options, group, loop="weighted")
    options = {**options, "capture_ahead": True, "ahead": ahead}
    for nth in (3, 6):
        act = Act(at="commit", nth=nth)
        run(ranks, pool_root / "killed", options, group, acts={1: act}, grace=0.2, loop="weighted")
    life = run(ranks, pool_root / "with", options, group, loop="weighted")
    assert life.ended_well, life.errors()
    captured = [rank.all_said("captured") for rank in life.ranks[: GROUPS[group][0] - GROUPS[group][1]]]
    owns_rows = GROUPS[group][1] == 0
    assert all(any(of_rank) == (owns_rows and store == "in place") for of_rank in captured)  # a row log has no need
    assert digest(pool_root / "with") == expected
    assert whole(ranks, pool_root / "killed", options, group, loop="weighted") == expected


def test_a_weight_that_is_no_number_ends_the_step_on_all_ranks(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"not_finite_at": 4}, loop="weighted")
    assert {rank.error for rank in life.ranks} <= {"NonFiniteLoss", "GroupError"}, life.errors()
    assert life.ranks[1].error == "NonFiniteLoss", life.errors()
    again = run(ranks, pool_root / "pool", {}, loop="weighted")
    assert again.ended_well, again.errors()
    assert again.opened == 3
    (recovered,) = again.ranks[0].all_said("recovered")
    # Whether rank 0 had committed the step itself before it heard of rank 1's weight.
    rolled_back = "the newest step that all ranks have is 3, rank 0 rolled back 1 step" in recovered
    assert rolled_back or "closed cleanly at step 3" in recovered, recovered


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_rows_that_overflow_end_the_step_on_all_ranks(group: str, store: str, ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {**STORES[store], "overflows_at": 4}, group, loop="weighted")
    assert {rank.error for rank in life.ranks} <= {"NonFiniteLoss", "GroupError"}, life.errors()
    assert "NonFiniteLoss" in {rank.error for rank in life.ranks}, life.errors()
    again = run(ranks, pool_root / "pool", STORES[store], group, loop="weighted")
    assert again.ended_well, again.errors()
    assert again.opened == 3


def test_whoever_uses_a_closed_pool_is_told_so(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"goes_on": True}, loop="weighted")
    assert life.ended_well, life.errors()
    for rank in life.ranks:
        assert rank.all_said("refused") == ["the pool is closed"] * 3


@pytest.mark.parametrize("group", ["2 ranks", "2 trainers, 2 memory ranks"])
def test_a_loop_that_resumes_once_more_in_its_process_is_where_it_was(
    group: str, ranks: Ranks, pool_root: Path
) -> None:
    """The newest dense state may be on its way when it does."""
    expected = whole(ranks, pool_root / "whole", {"learned": True}, group, loop="weighted")
    life = run(ranks, pool_root / "pool", {"learned": True, "resumes_before": 5}, group, loop="weighted")
    assert life.ended_well, life.errors()
    for rank in life.ranks[:2]:
        assert (rank.all_said("resumed"), rank.all_said("kept")) == ([4], [True])
    assert digest(pool_root / "pool") == expected


@pytest.mark.parametrize("group", ["2 ranks", "2 trainers, 2 memory ranks"])
def test_a_dense_gradient_that_is_no_number_leaves_none_in_the_pool(group: str, ranks: Ranks, pool_root: Path) -> None:
    """The loss is finite; whose gradient it was, all ranks have its mean."""
    options = {"learned": True}
    expected = whole(ranks, pool_root / "whole", options, group, loop="weighted")
    life = run(ranks, pool_root / "pool", {**options, "no_gradient_at": 4}, group, loop="weighted")
    assert life.ranks[0].error == "NonFiniteLoss", life.errors()
    assert "model.weight is not finite at the end of step 4" in life.errors()[0]
    again = run(ranks, pool_root / "pool", options, group, loop="weighted")
    assert again.ended_well, again.errors()
    assert again.opened == 3
    assert digest(pool_root / "pool") == expected


def test_a_data_loader_with_workers_is_exact_over_a_kill(ranks: Ranks, pool_root: Path) -> None:
    expected = whole(ranks, pool_root / "whole", {}, loop="with_data_loader")
    act = Act(at="commit", nth=6)
    run(ranks, pool_root / "killed", {"timeout": 5.0}, loop="with_data_loader", acts={1: act}, grace=0.2)
    assert whole(ranks, pool_root / "killed", {}, loop="with_data_loader") == expected


def test_a_script_that_has_a_process_group_of_its_own_keeps_it(ranks: Ranks, pool_root: Path) -> None:
    expected = whole(ranks, pool_root / "without", {}, loop="with_data_loader")
    options = {"initialised": True, "timeout": 5.0}
    act = Act(at="commit", nth=6)
    run(ranks, pool_root / "with", options, loop="with_data_loader", acts={1: act}, grace=0.2)
    assert whole(ranks, pool_root / "with", options, loop="with_data_loader") == expected


def test_ranks_that_do_not_end_at_one_step_end_with_an_error(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"uneven": True, "timeout": 3.0}, loop="with_data_loader", grace=0.2)
    assert life.ranks[0].error == "GroupError", life.errors()
    again = run(ranks, pool_root / "pool", {}, loop="with_data_loader")
    assert again.ended_well, again.errors()
    assert again.opened == 7


def test_a_pool_goes_on_with_other_ranks_and_with_one_process(ranks: Ranks, pool_root: Path) -> None:
    for group, steps in (("2 ranks", 3), ("3 ranks", 5), ("2 trainers, 2 memory ranks", 7)):
        assert run(ranks, pool_root / "pool", {"steps": steps}, group).ended_well
    alone = ranks.run(pool_root / "pool", {"steps": 9}, 1, loop="train")
    assert alone.ended_well, alone.errors()
    assert alone.opened == 7


def test_machines_of_different_memories_open_a_pool_together(ranks: Ranks, pool_root: Path) -> None:
    for steps in (2, 3):
        life = ranks.run(pool_root / "pool", {"steps": steps}, 2, loop="on_unlike_machines")
        assert life.ended_well, life.errors()
    assert life.opened == 2


def test_ranks_whose_gradients_were_not_averaged_are_found(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"skip_averages_at": 4})
    for message in life.errors().values():
        assert "the dense parameters of rank 1 differ from rank 0's" in message
    assert life.durable <= 4


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("odd", "dense_interval"),
    [("odd_lr_at", 1), ("rows_not_updated_at", 1), ("words_not_updated_at", 1), ("words_not_updated_at", 3)],
)
def test_ranks_that_do_not_update_rows_alike_are_found(
    odd: str, dense_interval: int, group: str, ranks: Ranks, pool_root: Path
) -> None:
    """As where a schedule looks at the loss of a rank: the others' rows would learn at another rate."""
    life = run(ranks, pool_root / "pool", {odd: 4, "timeout": 5.0, "dense_interval": dense_interval}, group)
    assert not life.ended_well
    assert any(
        "the row optimizers of rank 1 have other settings than rank 0's" in each for each in life.errors().values()
    )
    assert life.durable <= 4


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("relaxed", "ConfigError", "has recovery"),
        ("device", "ConfigError", "give all of its collections the same device.rows"),
        ("tables", "ConfigError", "rank 1 has tables = ['item'], rank 0 has ['item', 'shop']: make them the same"),
        ("policy", "ConfigError", "rank 1 has table 'item': ttl_steps = 4, rank 0 has 3: make them the same"),
        ("interval", "ConfigError", "has dense_interval"),
        ("thread", "StepError", "before the loader's first batch"),
        ("late", "StepError", "make all of them before"),
        ("serve", "StepError", "trains"),
        ("ddp", "ConfigError", "average_gradients"),
        ("sharded", "ConfigError", "a part of '0.weight' is on each rank"),
        ("order", "StepError", "keep their order"),
        ("bare", "StepError", "commit with a Checkpoint"),
    ],
)
def test_what_a_group_cannot_do_is_refused_by_name(
    what: str, error: str, words: str, ranks: Ranks, pool_root: Path
) -> None:
    life = run(ranks, pool_root / "pool", {"what": what, "timeout": 3.0}, loop="refused", grace=0.2)
    said = [f"{rank.error}: {rank.message}" for rank in life.ranks]
    assert any(text.startswith(f"{error}: ") and words in text for text in said), said


def test_generators_and_buffers_of_every_rank_come_back(ranks: Ranks, pool_root: Path) -> None:
    """What one rank's dense state alone would not hold: were rank 1 given rank 0's, the digest would be another."""
    from holdfast.group.rank_states import unpack
    from holdfast.state import state_tree

    whole(ranks, pool_root / "pool", {})
    with at_rest(pool_root / "pool") as (reader, _):
        state = reader.dense_state()
    assert state is not None
    tree = state_tree.unpack(*state[1:])
    of_rank_1 = unpack(tree["state_of_ranks"]["1"])
    running = "over.1.running_mean"
    assert not torch.equal(of_rank_1["buffers"][running], tree["model"][running])
    assert set(tree["rng_of_ranks"]) == {"1"}


TWO_TOWER = Path(__file__).parent / "users" / "two_tower.py"


def torchrun(directory: Path, *options: str) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "MKL_CBWR": "AUTO,STRICT", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(TWO_TOWER), str(directory), *options]
    return subprocess.run(command, env=variables, capture_output=True, check=False, timeout=200).returncode


@pytest.mark.thorough
def test_a_script_under_torchrun_ends_with_the_same_bits_after_a_kill(pool_root: Path) -> None:
    assert torchrun(pool_root / "killed", "--kill", "1:9") != 0
    assert torchrun(pool_root / "killed") == 0
    assert torchrun(pool_root / "whole") == 0
    assert digest(pool_root / "killed") == digest(pool_root / "whole")


def test_a_number_of_ranks_without_a_rank_is_no_group(pool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="start the processes with torchrun"):
        holdfast.Pool(pool_root / "pool")
