from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_lab.sim.facts import read_facts
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.paper import Reproduction, num_parts, reproduce
from holdfast_lab.sim.report.reproduction import write_paper


@pytest.fixture(scope="module")
def found() -> Reproduction:
    facts = read_facts()
    few = replace(facts, alternatives=facts.alternatives[:1])
    parts = []
    found = reproduce(read_library(), few, draws=12, seed=5, on_part=lambda: parts.append(1))
    assert len(parts) == num_parts(few)
    return found


def test_every_bar_of_the_paper_has_a_value_and_a_band_about_it(found: Reproduction) -> None:
    assert len(found.cells) == 20
    for cell in (*found.cells, *found.stages):
        assert cell.low <= cell.high
        assert 0.8 < cell.low / cell.ours < 1.2
    assert {cell.model for cell in found.cells if not cell.is_fitted} == {"rm2", "rm3"}


def test_fitted_to_all_models_the_speedup_is_within_a_tenth_of_the_papers(found: Reproduction) -> None:
    assert found.ratios_of_all["PMEM / CXL, arithmetic mean"] == pytest.approx(5.2, rel=0.10)


def test_with_the_same_memory_in_every_system_what_is_saved_is_the_papers_and_was_not_fitted(found) -> None:
    saved = {ratio.name: ratio.ours for ratio in found.energy[1].saved}
    assert saved["saved against PMEM, mean"] == pytest.approx(0.76, abs=0.04)
    assert saved["saved against DRAM, RM2"] == pytest.approx(0.91, abs=0.04)
    of_pmem = {model: ratio for model, (ratio, _) in found.energy[1].dram_order.items()}
    assert of_pmem["rm3"] < 1.0 < of_pmem["rm2"]


def test_where_only_what_works_takes_power_a_fifth_less_is_saved_and_nothing_against_dram(found) -> None:
    by_work, by_memory = ({ratio.name: ratio.ours for ratio in each.saved} for each in found.energy)
    assert 0.4 < by_work["saved against PMEM, mean"] < by_memory["saved against PMEM, mean"] - 0.2
    assert by_work["saved against DRAM, RM2"] < 0.0
    assert by_work["saved against PMEM, RM4"] < 0.53 < 0.62 < by_memory["saved against PMEM, RM4"]


def test_another_assumption_is_fitted_anew(found: Reproduction) -> None:
    (other,) = found.alternatives.values()
    assert other.fitted < 0.05
    assert other.predicted > 3 * found.errors.predicted


def test_the_report_has_all_figures_with_their_numbers_and_one_page(found: Reproduction, tmp_path: Path) -> None:
    page = write_paper(tmp_path, found, found.fit.library)
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert {"batch-time", "timelines", "energy", "parity"} <= pictures
    assert {path.stem for path in tmp_path.glob("*.csv")} == pictures
    with (tmp_path / "parity.csv").open() as rows:
        shown = {row["label"]: float(row["simulated_ms"]) for row in csv.DictReader(rows)}
    assert shown == {cell.name: pytest.approx(cell.ours) for cell in found.cells}
    text = page.read_text()
    assert text.count("data:image/png;base64,") == len(pictures)
    for cell in found.cells:
        assert f"{cell.ours:.2f}" in text
