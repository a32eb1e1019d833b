"""Parts of the check against a machine are put together as a whole run would have written them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sim_check.configurations import CONFIGURATIONS
from sim_check.join import joined, outcomes_of

COMMITTED = Path(__file__).parents[2] / "benchmarks/reports/predictions/sim-check/results.json"
NAMES = [each.name for each in CONFIGURATIONS]


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(COMMITTED.read_text())
    record["others_cpus"] = record.get("others_cpus") or dict.fromkeys(record["results"], 0.0)
    return record


def part_of(whole: dict[str, Any], names: list[str], *, commit: str) -> dict[str, Any]:
    part = copy.deepcopy(whole)
    part["machine"]["holdfast_commit"] = commit
    for key in ("commands", "results", "predicted", "others_cpus"):
        part[key] = {name: value for name, value in part[key].items() if name in names}
    return part


def test_parts_give_the_outcomes_of_the_whole_in_its_order(whole: dict[str, Any]) -> None:
    there = [name for name in NAMES if name in whole["results"]]
    parts = [part_of(whole, there[5:], commit="b"), part_of(whole, there[:5], commit="a")]
    record = joined(parts)
    assert record["machine"]["holdfast_commit"] == "b, a"
    outcomes = outcomes_of(record)
    assert [each.name for each in outcomes] == there
    assert [each.line for each in outcomes] == [each.line for each in outcomes_of(whole)]
    assert [each.prediction for each in outcomes] == [each.prediction for each in outcomes_of(whole)]


def test_of_a_configuration_in_several_parts_the_first_counts(whole: dict[str, Any]) -> None:
    name = next(iter(whole["results"]))
    again = part_of(whole, [name], commit="a")
    again["results"][name]["ms_per_step"] *= 2
    assert outcomes_of(joined([whole, again]))[0].measured_ms == whole["results"][name]["ms_per_step"]
    assert joined([again, whole])["results"][name]["ms_per_step"] == 2 * whole["results"][name]["ms_per_step"]


def test_parts_of_several_machines_are_refused(whole: dict[str, Any]) -> None:
    other = copy.deepcopy(whole)
    other["machine"]["cpus"] = 64
    with pytest.raises(SystemExit, match="several machines"):
        joined([whole, other])
