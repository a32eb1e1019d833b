"""Corrupted pools: whatever is damaged, an error says so or the state is right. corruption.py draws and judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from corruption import Opener, Verdict
from damage import FILE_KINDS, HOME_BITS, IN_PLACE_KINDS, files_of_format
from format_doc import LAYOUTS

CASES, CASES_OF_A_SAMPLE = 1_000, 200
SOAK_CASES = 12_000


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    with Opener(seed=1) as opener:
        yield opener


def problems_of(opener: Opener, count: int, verdicts: list[Verdict]) -> list[str]:
    problems = []
    for number in range(count):
        verdict = opener.judge(number)
        verdicts.append(verdict)
        if verdict.problem:
            replay = f"PYTHONPATH=tests python tests/format/corruption.py {opener.seed} {number}"
            problems.append(f"{verdict.pool}; {verdict.damage}\n  {verdict.problem}\n  {replay}")
    return problems


def test_every_structure_field_and_file_of_the_document_can_be_struck(opener: Opener):
    fields = {(name, each.name) for name, layout in LAYOUTS.items() for each in layout.fields}
    of_shards = {(name, field) for name, field in fields if name == "ShardsRecord"}  # test_sharded_pools.py strikes it
    assert fields - opener.targets == of_shards
    assert {name for structure, name in opener.targets if structure == "file"} == files_of_format() - {HOME_BITS}
    assert len(opener.targets) < CASES, "every target comes at least once"


def test_damage_ends_in_an_error_or_in_the_right_state(opener: Opener, is_sample: bool):
    verdicts: list[Verdict] = []
    assert problems_of(opener, CASES_OF_A_SAMPLE if is_sample else CASES, verdicts) == []
    if is_sample:
        return
    assert {verdict.kind for verdict in verdicts} == {*IN_PLACE_KINDS, *FILE_KINDS}
    assert {verdict.target for verdict in verdicts} == opener.targets


@pytest.mark.soak
def test_no_damage_of_thousands_goes_unnoticed_in_what_carries_a_checksum():
    verdicts: list[Verdict] = []
    with Opener(seed=2) as opener:
        problems = problems_of(opener, SOAK_CASES, verdicts)
    print(*summary(verdicts), sep="\n")
    assert problems == []


def summary(verdicts: list[Verdict]) -> Iterator[str]:
    """How many by structure, kind and outcome."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for verdict in verdicts:
        structure, field = verdict.target
        counts[field if structure == "file" else structure, verdict.kind, verdict.outcome] += 1
    yield f"{len(verdicts)} corruptions"
    for (structure, kind, outcome), count in sorted(counts.items()):
        yield f"{structure:<36} {kind:<16} {outcome:<28} {count:>6}"
