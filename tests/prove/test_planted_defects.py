"""Scripts with one defect each: `holdfast prove` catches it, and names the step, the part and the likely cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from proofs import prove_planted

UNDISTURBED = ("--steps", "4", "--runs", "2", "--kills", "0")
KILLED = ("--steps", "6", "--runs", "1", "--kills", "1", "--seed", "3")


def test_a_mask_from_the_systems_entropy_is_no_determinism(pool_root: Path):
    found = prove_planted("unseeded mask", pool_root / "pool", *UNDISTURBED)
    assert found.code == 1
    assert found.difference["step"] == 1
    assert found.difference["resumed_at"] is None
    assert found.difference["parts"] == ["optimizer state", "parameters", "rows"]
    assert "NOT DETERMINISTIC" in found.words
    assert "the same: cursor, batch, random numbers" in found.words
    assert "os.urandom" in found.words
    weights = [leaf for leaf in found.difference["leaves"] if leaf["name"] == "model.0.weight"]
    assert "elements differ, by up to" in weights[0]["words"]


def test_a_learning_rate_by_the_clock_is_named(pool_root: Path):
    found = prove_planted("rate by the clock", pool_root / "pool", *UNDISTURBED)
    assert found.code == 1
    assert found.difference["step"] == 1
    first = found.difference["leaves"][0]
    assert first["name"] == "optimizers[0] (SGD).param_groups[0].lr"
    assert "is it computed from the clock" in found.words


def test_data_in_the_order_of_hashes_is_other_data(pool_root: Path):
    found = prove_planted("order of hashes", pool_root / "pool", *UNDISTURBED, PYTHONHASHSEED="random")
    assert found.code == 1
    assert found.difference["step"] == 1
    assert found.difference["parts"][0] == "batch"
    assert "table 'item'" in found.difference["leaves"][0]["name"]
    assert "PYTHONHASHSEED is not set" in found.words


@pytest.mark.parametrize(
    ("defect", "variable", "kind"),
    [
        ("generator not captured", "noise (<module>, planted.py)", "generator numpy.random"),
        ("average outside", "average (<module>, planted.py)", "tensor"),
        ("optimizer left out", "optimizer (<module>, planted.py)", "optimizer SGD"),
    ],
)
def test_state_outside_of_the_checkpoint_is_named_by_its_variable(
    pool_root: Path, defect: str, variable: str, kind: str
):
    found = prove_planted(defect, pool_root / "pool", *KILLED)
    assert found.code == 1, found.out + found.err
    assert found.difference["resumed_at"] is not None
    assert found.difference["step"] == found.difference["resumed_at"] + 1
    assert not {"cursor", "batch", "random numbers"} & set(found.difference["parts"])
    suspects = {suspect["name"]: suspect["kind"] for suspect in found.difference["outside"]}
    assert suspects[variable].startswith(kind)
    assert "DIFFERS AFTER A RESUME" in found.words
    assert variable in found.words


def test_a_schedule_that_is_stepped_after_the_commit_is_named(pool_root: Path):
    found = prove_planted("schedule after commit", pool_root / "pool", *KILLED)
    assert found.code == 1
    assert "schedulers" in found.difference["parts"]
    assert "scheduler.step() comes after commit()" in found.words


def test_what_does_not_load_as_it_was_saved_is_named_before_any_step(pool_root: Path):
    found = prove_planted("forgetful", pool_root / "pool", *KILLED)
    assert found.code == 1
    assert found.difference["loaded"]
    assert found.difference["step"] == found.difference["resumed_at"]
    assert [leaf["name"] for leaf in found.difference["leaves"]] == ["extra['forgetful'].count"]
    assert "LOADED ANOTHER STATE" in found.words


def test_the_same_script_without_a_defect_is_proven_and_leaves_nothing_behind(pool_root: Path):
    found = prove_planted("none", pool_root / "pool", "--steps", "12", "--runs", "2", "--kills", "3")
    assert found.code == 0, found.out + found.err
    assert found.report["same"]
    assert found.report["kills"] == 3
    assert found.report["steps"] == 12
    assert "SAME BITS" in found.words
    assert list(pool_root.iterdir()) == []
