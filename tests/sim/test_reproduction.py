from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_lab.sim.calibration import fit
from holdfast_lab.sim.facts import read_facts, targets_of
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.paper import Reproduction, num_parts, reproduce
from holdfast_lab.sim.report.reproduction import write_paper

pytestmark = pytest.mark.thorough

_SAME_MODULES, _LINKS_LOG = "the same modules for every model", "the parameters' log is as fast as its link"


@pytest.fixture(scope="module")
def found() -> Reproduction:
    facts = read_facts()
    few = replace(facts, alternatives=tuple(each for each in facts.alternatives if _is_among(each.title)))
    assert len(few.alternatives) == 2
    parts: list[int] = []
    found = reproduce(read_library(), few, draws=12, seed=5, on_part=lambda: parts.append(1))
    assert len(parts) == num_parts(few)
    return found


def _is_among(title: str) -> bool:
    return title.startswith((_SAME_MODULES, _LINKS_LOG))


def test_the_packaged_values_are_those_of_the_fit(found: Reproduction) -> None:
    library = read_library()
    for key, value in found.fit.library_values.items():
        if key.startswith(("devices", "models")) and "watts" not in key:
            assert library.value(key) == pytest.approx(value, rel=0.02), key
    for (system, model), run in found.runs.items():
        assert library.run(system, model).batch_s == pytest.approx(run.batch_s, rel=2e-3)


def test_a_fit_from_the_priors_ends_where_one_from_the_library_does(found: Reproduction) -> None:
    facts = read_facts()
    from_priors = fit(read_library(), facts.free, targets_of(facts, facts.models))
    assert from_priors.z == pytest.approx(found.fit.z[: len(facts.free)], abs=0.02)


def test_every_bar_of_the_paper_has_a_value_and_a_band_about_it(found: Reproduction) -> None:
    assert len(found.cells) == len(found.left_out) == 20
    for cell in (*found.cells, *found.stages):
        assert cell.low <= cell.high
        assert 0.8 < cell.low / cell.ours < 1.2
    for cell in found.left_out:
        assert cell.low < cell.ours < cell.high


def test_a_model_that_is_left_out_is_predicted_better_than_by_copying_the_nearest_one(found: Reproduction) -> None:
    facts, errors = found.facts, found.own_errors
    assert errors.left_out < 0.08 < facts.copying_error(facts.systems)
    assert errors.left_out_near_memory < 0.04 < facts.copying_error(facts.near_memory)
    assert errors.worst_left_out_host < 0.35


def test_bands_hold_and_are_narrow_enough_to_say_something(found: Reproduction) -> None:
    assert sum(cell.is_within for cell in found.left_out) >= 17
    near = [cell for cell in found.left_out if cell.system != "pmem"]
    assert max(cell.high / cell.low for cell in near) < 1.4


def test_the_null_copies_the_nearest_model() -> None:
    facts = replace(read_facts(), batch_ms={"pmem": {"a": 1.0, "b": 2.0, "c": 10.0}})
    assert facts.copying_error(("pmem",)) == pytest.approx((1.0 + 0.5 + 0.8) / 3)


def test_with_the_same_memory_in_every_system_what_is_saved_is_the_papers_and_was_not_fitted(
    found: Reproduction,
) -> None:
    saved = {ratio.name: ratio.ours for ratio in found.energy[1].saved}
    assert saved["saved against PMEM, mean"] == pytest.approx(0.76, abs=0.04)
    assert saved["saved against DRAM, RM2"] == pytest.approx(0.91, abs=0.04)
    of_pmem = {model: ratio for model, (ratio, _) in found.energy[1].dram_order.items()}
    assert of_pmem["rm3"] < 1.0 < of_pmem["rm2"]


def test_where_only_what_works_takes_power_a_fifth_less_is_saved_and_nothing_against_dram(
    found: Reproduction,
) -> None:
    by_work, by_memory = ({ratio.name: ratio.ours for ratio in each.saved} for each in found.energy)
    assert 0.4 < by_work["saved against PMEM, mean"] < by_memory["saved against PMEM, mean"] - 0.2
    assert by_work["saved against DRAM, RM2"] < 0.0
    assert by_work["saved against PMEM, RM4"] < 0.53 < 0.62 < by_memory["saved against PMEM, RM4"]


def test_another_assumption_is_fitted_anew_and_counts_by_how_well_it_agrees(found: Reproduction) -> None:
    same_modules, links_log = (next(t for t in found.errors if t.startswith(x)) for x in (_SAME_MODULES, _LINKS_LOG))
    assert found.errors[same_modules].left_out > 3 * found.own_errors.left_out
    assert found.errors[links_log].left_out < 0.08
    for weights in found.weights.values():
        assert sum(weights.values()) == pytest.approx(1.0)
        assert weights[same_modules] < 0.01 < 0.1 < weights[links_log]


def test_the_report_has_all_figures_with_their_numbers_and_one_page(found: Reproduction, tmp_path: Path) -> None:
    page = write_paper(tmp_path, found, found.fit.library)
    pictures = {path.stem for path in tmp_path.glob("*.svg")}
    assert {"batch-time", "timelines", "energy", "parity"} <= pictures
    assert {path.stem for path in tmp_path.glob("*.csv")} == pictures
    with (tmp_path / "parity.csv").open() as rows:
        shown = {row["label"]: float(row["simulated_ms"]) for row in csv.DictReader(rows)}
    assert shown == {cell.name: pytest.approx(cell.ours) for cell in found.left_out}
    text = page.read_text()
    assert text.count("<svg ") == len(pictures)
    for cell in found.cells:
        assert f"{cell.ours:.2f}" in text
