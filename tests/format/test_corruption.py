"""Corrupted pools: whatever is damaged, an error says so or the state is right. corruption.py draws and judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from corruption import Opener, Targets, Verdict, make_pools
from damage import FILE_KINDS, IN_PLACE_KINDS, files_of_format
from format_doc import LAYOUTS

CASES = 600
SOAK_CASES = 12_000


@pytest.fixture(scope="module")
def targets(new_root) -> Iterator[Targets]:
    yield Targets.of(make_pools(new_root()))


def problems_of(seed: int, count: int, verdicts: list[Verdict]) -> list[str]:
    problems = []
    with Opener(seed) as opener:
        for number in range(count):
            verdict = opener.judge(number)
            verdicts.append(verdict)
            if verdict.problem:
                replay = f"python tests/format/corruption.py {seed} {number}"
                problems.append(f"{verdict.pool}; {verdict.damage}\n  {verdict.problem}\n  {replay}")
    return problems


def test_every_structure_field_and_file_of_the_document_can_be_struck(targets: Targets):
    struck = set(targets.by_name)
    fields = {(name, each.name) for name, layout in LAYOUTS.items() for each in layout.fields}
    assert fields - struck == set()
    assert {name for structure, name in struck if structure == "file"} == files_of_format()


def test_damage_ends_in_an_error_or_in_the_right_state():
    verdicts: list[Verdict] = []
    assert problems_of(1, CASES, verdicts) == []


@pytest.mark.soak
def test_no_damage_of_thousands_goes_unnoticed_in_what_carries_a_checksum():
    verdicts: list[Verdict] = []
    problems = problems_of(2, SOAK_CASES, verdicts)
    print(*summary(verdicts), sep="\n")
    assert problems == []


def summary(verdicts: list[Verdict]) -> Iterator[str]:
    """How many by structure, kind and outcome."""
    counts = Counter((verdict.target[0] if verdict.target[0] != "file" else verdict.target[1], verdict.kind, verdict.outcome) for verdict in verdicts)
    yield f"{len(verdicts)} corruptions"
    for (structure, kind, outcome), count in sorted(counts.items()):
        yield f"{structure:<36} {kind:<16} {outcome:<28} {count:>6}"
