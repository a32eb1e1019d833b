"""The packaged values are those that TrainingCXL's figures give, and what follows from them is what it found."""

from __future__ import annotations

import math

import pytest

from holdfast_lab.sim.facts import Facts, read_facts
from holdfast_lab.sim.library import Library, read_library
from holdfast_lab.sim.paper import mean_error, time_ratios, worst_stage_error


@pytest.fixture(scope="module")
def facts() -> Facts:
    return read_facts()


@pytest.fixture(scope="module")
def library() -> Library:
    return read_library()


def test_a_bare_run_of_the_papers_systems_and_models_is_within_a_twentieth_of_its_bars(
    facts: Facts, library: Library
) -> None:
    assert mean_error(facts, library, facts.models) < 0.05
    assert worst_stage_error(facts, library) < 0.15


def test_every_fitted_value_stands_in_the_library_and_is_within_two_sigmas_of_its_prior(
    facts: Facts, library: Library
) -> None:
    for free in facts.free:
        for key in free.keys:
            kind, name, field = key.split(".", 2)
            value = library.value(key) if kind != "systems" else library.system("pmem").stages["interaction_top"].calls
            assert abs(math.log(value / free.median)) < 2.0 * free.sigma, (free.name, name, field)


def test_ratios_between_systems_are_the_papers(facts: Facts, library: Library) -> None:
    ratios = time_ratios(facts, library)
    assert ratios["PMEM / CXL, arithmetic mean"] == pytest.approx(facts.stated.speedup, rel=0.05)
    assert ratios["CXL-D / PCIe"] == pytest.approx(facts.stated.cxl_d_over_pcie, abs=0.05)
    assert ratios["CXL / CXL-B"] == pytest.approx(facts.stated.cxl_over_cxl_b, abs=0.05)


def test_only_a_lookup_right_after_an_update_pays_for_reading_what_was_written(library: Library) -> None:
    lookups = {system: library.run(system, "rm1").stage_s["lookup"] for system in ("cxl-d", "cxl-b", "cxl")}
    assert lookups["cxl-d"] == pytest.approx(lookups["cxl"])
    assert lookups["cxl-b"] > 1.5 * lookups["cxl-d"]
    without = library.changed({"devices.pmem-module.raw_penalty": 1.0})
    assert without.run("cxl-b", "rm1").stage_s["lookup"] == pytest.approx(lookups["cxl-d"])


def test_a_slower_link_makes_a_batch_longer_by_what_its_log_takes_longer(library: Library) -> None:
    slow = library.changed({"devices.cxl.bandwidth_bytes_per_s": 10e9})
    before, after = library.run("cxl-d", "rm4"), slow.run("cxl-d", "rm4")
    of_link = ("log_network", "move_pooled")  # on the way; gradients move beside the backward pass
    longer = sum(after.stage_s[stage] - before.stage_s[stage] for stage in of_link)
    assert longer > 1e-3
    assert after.batch_s - before.batch_s == pytest.approx(longer, rel=0.02)


def test_a_faster_link_changes_nothing_where_the_memory_is_the_slower(library: Library) -> None:
    fast = library.changed({"devices.cxl.bandwidth_bytes_per_s": 1e12})
    slow = library.changed({"devices.cxl.bandwidth_bytes_per_s": 0.9e12})
    assert fast.run("cxl-d", "rm1").stage_s["log_network"] == slow.run("cxl-d", "rm1").stage_s["log_network"]


def test_with_the_same_modules_for_every_model_four_times_the_tables_take_far_longer(library: Library) -> None:
    same = library.changed({"devices.pmem-module.modules_by": "fixed", "devices.pmem-module.modules": 16.6})
    assert same.run("cxl", "rm2").batch_s > 2 * library.run("cxl", "rm2").batch_s
