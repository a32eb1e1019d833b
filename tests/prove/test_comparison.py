"""What is compared with what, on records without a process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.proving.comparison import Reference, Run, went_back_below
from holdfast.proving.record import Follower, Leaf, LifeRecord, values_file

END = {"event": "ended", "step": 2, "cursor": 20, "row_updates": 2, "digest": "d", "tables": {"t": "rows"}}


def leaf(part: str, name: str, digest: str, words: str = "float32 [2]", offset: int = -1) -> Leaf:
    return Leaf(part, name, digest, words, offset, 8)


def life(number: int, *steps: tuple[int, list[Leaf]], durable: int = 0, end: dict | None = None) -> LifeRecord:
    """steps: the first is what was resumed."""
    record = LifeRecord(number)
    for place, (step, leaves) in enumerate(steps):
        fields = [[x.part, x.name, x.digest, x.words, x.offset, x.num_bytes] for x in leaves]
        event = "step" if place else "resumed"
        record.take({"event": event, "step": step, "durable": durable, "points": 1, "leaves": fields})
    if end is not None:
        record.take(end)
    return record


def weights(step: int) -> list[Leaf]:
    return [leaf("parameters", "w", f"w{step}"), leaf("rows", "table 't'", f"t{step}")]


def undisturbed(folder: Path) -> Run:
    steps = [(0, [leaf("parameters", "w", "w0")]), (1, weights(1)), (2, weights(2))]
    return Run(1, folder, [life(1, *steps, end=END)])


def test_a_resumed_run_is_alike_when_what_it_loaded_and_did_again_is(tmp_path: Path):
    first = life(1, (0, [leaf("parameters", "w", "w0")]), (1, weights(1)))
    second = life(2, (1, [leaf("parameters", "w", "w1")]), (2, weights(2)), end=END)
    assert Reference(undisturbed(tmp_path)).first_difference(Run(2, tmp_path, [first, second])) is None


def test_a_difference_in_what_was_loaded_is_found_before_the_first_step(tmp_path: Path):
    first = life(1, (0, [leaf("parameters", "w", "w0")]), (1, weights(1)))
    second = life(2, (1, [leaf("parameters", "w", "other")]), (2, weights(2)), end=END)
    found = Reference(undisturbed(tmp_path)).first_difference(Run(2, tmp_path, [first, second]))
    assert found is not None
    assert (found.step, found.resumed_at, found.loaded, found.parts) == (1, 1, True, ["parameters"])


def test_plain_values_are_compared_where_a_step_ends_because_scripts_put_them_back_after_the_resume(tmp_path: Path):
    def step(number: int, digest: str) -> tuple[int, list[Leaf]]:
        return number, [leaf("plain values", "extra['best']", digest)]

    reference = Reference(Run(1, tmp_path, [life(1, step(0, "none"), step(1, "b1"), step(2, "b2"), end=END)]))
    before = life(1, step(0, "none"), step(1, "b1"))
    alike = Run(2, tmp_path, [before, life(2, step(1, "none"), step(2, "b2"), end=END)])
    assert reference.first_difference(alike) is None
    found = reference.first_difference(Run(3, tmp_path, [before, life(2, step(1, "none"), step(2, "b1"), end=END)]))
    assert found is not None
    assert (found.step, found.loaded, found.parts) == (2, False, ["plain values"])


def test_rows_whose_optimizer_state_alone_differs_are_found_at_the_end(tmp_path: Path):
    steps = [(0, [leaf("parameters", "w", "w0")]), (1, weights(1)), (2, weights(2))]
    other = {**END, "digest": "e", "tables": {"t": "other rows"}}
    found = Reference(undisturbed(tmp_path)).first_difference(Run(2, tmp_path, [life(1, *steps, end=other)]))
    assert found is not None
    assert (found.step, found.parts, found.leaves[0].name) == (2, ["rows"], "table 't'")


def test_a_run_that_goes_on_after_the_other_has_ended_differs_in_its_number_of_steps(tmp_path: Path):
    steps = [(0, [leaf("parameters", "w", "w0")]), *((step, weights(step)) for step in (1, 2, 3))]
    found = Reference(undisturbed(tmp_path)).first_difference(Run(2, tmp_path, [life(1, *steps)]))
    assert found is not None
    assert (found.step, found.leaves[0].words) == (3, "run 1 ended at step 2, run 2 went on")


@pytest.mark.parametrize(("used", "differs"), [(False, False), (True, True)])
def test_a_generator_without_a_seed_counts_only_where_something_is_drawn(tmp_path: Path, used: bool, differs: bool):
    def run(number: int) -> Run:
        start = leaf("random numbers", "python", f"seed {number}")
        after = leaf("random numbers", "python", f"seed {number}, drawn") if used else start
        return Run(number, tmp_path, [life(1, (0, [start]), (1, [after]), end=END)])

    found = Reference(run(1)).first_difference(run(2))
    assert (found is not None) == differs


def test_a_difference_says_how_many_elements_and_how_far(tmp_path: Path):
    runs = []
    for number, values in ((1, [1.0, 2.0]), (2, [1.0, 2.25])):
        folder = tmp_path / str(number)
        folder.mkdir()
        values_file(folder, 1).write_bytes(np.array(values, np.float32).tobytes())
        steps = [(0, []), (1, [leaf("parameters", "w", f"w{number}", offset=0)])]
        runs.append(Run(number, folder, [life(1, *steps, end=END)]))
    found = Reference(runs[0]).first_difference(runs[1])
    assert found is not None
    assert found.leaves[0].words == "1 of 2 elements differ, by up to 0.25"


def test_a_resume_below_a_durable_step_is_noticed(tmp_path: Path):
    lives = [life(1, (0, []), (5, []), durable=5), life(2, (4, []), (5, []))]
    assert went_back_below(Run(2, tmp_path, lives)) == (5, 4)
    lives = [life(1, (0, []), (5, []), durable=4), life(2, (4, []), (5, []))]
    assert went_back_below(Run(2, tmp_path, lives)) is None


def test_a_line_that_a_kill_has_torn_is_not_believed(tmp_path: Path):
    path = tmp_path / "life"
    path.write_text('{"event": "a"}\n{"event"')
    follower = Follower(path)
    assert list(follower.lines()) == [{"event": "a"}]
    with path.open("a") as file:
        file.write(': "b"}\n')
    assert list(follower.lines()) == [json.loads('{"event": "b"}')]
