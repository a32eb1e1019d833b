from __future__ import annotations

import pytest

from holdfast_lab.sim.library import Library, read_library
from holdfast_lab.sim.sensitivity import BASELINES, STUDIES, against_baselines, curve, speedup

MODELS = ("rm1", "rm4")


@pytest.fixture(scope="module")
def library() -> Library:
    return read_library()


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_curve_passes_through_the_library_as_it_is(library: Library, study) -> None:
    shown = curve(library, MODELS, study, x=(1.0,) if study.is_factor else None)
    if study.is_factor:
        assert shown.speedups == (pytest.approx(speedup(library, MODELS, study.baseline, study.system)),)
    assert len(shown.x) == len(shown.speedups)
    assert all(value > 0 for value in shown.speedups)


def test_a_host_that_reaches_more_of_its_memory_leaves_less_to_gain(library: Library) -> None:
    study = next(each for each in STUDIES if "host reaches" in each.name)
    speedups = curve(library, MODELS, study).speedups
    assert list(speedups) == sorted(speedups, reverse=True)
    assert speedups[0] > 2 * speedups[-1]


def test_a_baseline_that_pipelines_and_caches_leaves_less_to_gain(library: Library) -> None:
    found = against_baselines(library, MODELS)
    assert list(found) == list(BASELINES)
    assert found["pmem"]["rm1"] > found["pmem-pipelined"]["rm1"] > found["pmem-cached"]["rm1"]


def test_the_penalty_of_reading_what_was_written_is_what_relaxed_lookups_take_away(library: Library) -> None:
    study = next(each for each in STUDIES if each.name == "read after write")
    speedups = curve(library, MODELS, study).speedups
    assert list(speedups) == sorted(speedups)
    assert speedups[-1] > speedups[0]
