"""Scripts with one defect each: `holdfast prove` catches it, and names the step, the part and the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from proofs import Proof, proving

pytestmark = pytest.mark.thorough

UNDISTURBED = ("--steps", "4", "--runs", "2", "--kills", "0")
# A seed that draws a kill beside a commit, late enough: one by time may come before there is any state to lose.
KILLED = ("--steps", "6", "--runs", "1", "--kills", "1", "--seed", "65")
OPTIONS = {
    "unseeded mask": UNDISTURBED,
    "rate by the clock": UNDISTURBED,
    "order of hashes": UNDISTURBED,
    "generator not captured": KILLED,
    "average outside": KILLED,
    "optimizer left out": KILLED,
    "schedule after commit": KILLED,
    "forgetful": KILLED,
    "counts not put back": KILLED,
    "none": ("--steps", "12", "--runs", "1", "--kills", "3"),
}


@pytest.fixture(scope="module")
def proofs(new_root: Callable[[], Path]) -> Iterator[dict[str, Future[Proof]]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("PYTHONHASHSEED", raising=False)
        with proving(new_root, OPTIONS) as running:
            yield running


Proofs = dict[str, "Future[Proof]"]


def test_a_mask_from_the_systems_entropy_is_no_determinism(proofs: Proofs):
    found = proofs["unseeded mask"].result()
    assert found.code == 1
    assert found.difference["step"] == 1
    assert found.difference["resumed_at"] is None
    assert found.difference["parts"] == ["optimizer state", "parameters", "rows"]
    assert "NOT DETERMINISTIC" in found.words
    assert "the same: cursor, batch, random numbers" in found.words
    assert "os.urandom" in found.words
    weights = [leaf for leaf in found.difference["leaves"] if leaf["name"] == "model.0.weight"]
    assert "elements differ, by up to" in weights[0]["words"]


def test_a_learning_rate_by_the_clock_is_named(proofs: Proofs):
    found = proofs["rate by the clock"].result()
    assert found.code == 1
    assert found.difference["step"] == 1
    first = found.difference["leaves"][0]
    assert first["name"] == "optimizers[0] (SGD).param_groups[0].lr"
    assert "is it computed from the clock" in found.words


def test_data_in_the_order_of_hashes_is_other_data(proofs: Proofs):
    found = proofs["order of hashes"].result()
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
    proofs: Proofs, defect: str, variable: str, kind: str
):
    found = proofs[defect].result()
    assert found.code == 1, found.out + found.err
    assert found.difference["resumed_at"] is not None
    assert found.difference["step"] == found.difference["resumed_at"] + 1
    assert not {"cursor", "batch", "random numbers"} & set(found.difference["parts"])
    suspects = {suspect["name"]: suspect["kind"] for suspect in found.difference["outside"]}
    assert suspects[variable].startswith(kind)
    assert not {name for name in suspects if name.startswith(("loss", "vectors"))}  # those are consequences
    assert "DIFFERS AFTER A RESUME" in found.words
    assert variable in found.words


def test_a_schedule_that_is_stepped_after_the_commit_is_named(proofs: Proofs):
    found = proofs["schedule after commit"].result()
    assert found.code == 1
    assert "schedulers" in found.difference["parts"]
    assert "scheduler.step() comes after commit()" in found.words


def test_what_does_not_load_as_it_was_saved_is_named_before_any_step(proofs: Proofs):
    """By prove, or by the Checkpoint that refuses it: never by nobody."""
    found = proofs["forgetful"].result()
    assert found.code == 1
    if "DOES NOT RESUME" in found.words:
        assert "StateError" in found.words
        assert "forgetful" in found.words
        return
    assert found.difference["loaded"]
    assert found.difference["step"] == found.difference["resumed_at"]
    assert [leaf["name"] for leaf in found.difference["leaves"]] == ["extra['forgetful'].count"]
    assert "LOADED ANOTHER STATE" in found.words


def test_a_plain_value_that_the_script_does_not_put_back_is_named_in_the_step_after(proofs: Proofs):
    found = proofs["counts not put back"].result()
    assert found.code == 1
    assert found.difference["step"] == found.difference["resumed_at"] + 1
    assert [leaf["name"] for leaf in found.difference["leaves"]] == ["extra['counts'].steps"]
    assert "DIFFERS AFTER A RESUME" in found.words
    assert "checkpoint.saved(name) gives it" in found.words


def test_the_same_script_without_a_defect_is_proven_and_leaves_nothing_behind(proofs: Proofs):
    found = proofs["none"].result()
    assert found.code == 0, found.out + found.err
    assert found.report["same"]
    assert found.report["kills"] == 3
    assert found.report["steps"] == 12
    assert "SAME BITS" in found.words
    assert not found.left
