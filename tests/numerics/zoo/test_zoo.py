"""Users' own loops end with the same bits in every fresh process, wherever their operands lie and whatever was called
before: dense optimizers by layers by precision by threads (zoo_script.py)."""

from __future__ import annotations

import os

import pytest
from zoo_runs import Case, Findings, build_shim, numbers, run_zoo

pytestmark = pytest.mark.thorough

CASE = Case("fp32", 2, "Linear 64", "Adam plain")


@pytest.fixture(scope="module")
def as_intel(tmp_path_factory):
    """MKL takes AMD's processors for Intel's, too, and its first calls go wrong where they can: without the ones that a
    Checkpoint makes, Linear 1000 with Adam ends in other bits in every such process."""
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.timeout(600)
def test_two_fresh_processes_end_with_the_same_bits(as_intel):
    ways = [("fp32", 1), ("fp32", 2), ("bf16", 2)]
    processes = [(*way, number) for way in ways for number in numbers([3], turns=2)]
    findings = run_zoo(processes, at_once=os.cpu_count() or 1, shim=as_intel)
    assert len(findings.digests) == 16 * len(ways)
    assert not findings.differing()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("precision", "num_threads", "pretends"),
    [
        *((precision, num_threads, False) for precision in ("fp32", "bf16", "compile") for num_threads in (1, 2)),
        *((precision, 2, True) for precision in ("fp32", "bf16")),
    ],
)
def test_48_fresh_processes_of_every_combination_end_with_the_same_bits(as_intel, precision, num_threads, pretends):
    processes = [(precision, num_threads, number) for number in numbers(range(16), turns=48)]
    findings = run_zoo(processes, at_once=os.cpu_count() or 1, shim=as_intel if pretends else None)
    print(findings.summary())
    assert len(findings.digests) == 256
    assert not findings.differing()


def test_a_difference_is_said_with_what_differs_and_how_to_see_it():
    findings = Findings()
    findings.digests[CASE] = {("r", "p", "o", "n"): [3, 19], ("r", "q", "o", "n"): [35]}
    findings.num_processes = 3
    (said,) = findings.differing()
    assert said == (
        "Linear 64 with Adam plain, fp32, 2 threads: parameters in 1 of 3 processes; "
        "compare zoo_script.py fp32 2 3 with zoo_script.py fp32 2 35"
    )
    assert "1 combinations differ" in findings.summary()
