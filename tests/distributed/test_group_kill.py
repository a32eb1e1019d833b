"""Ranks are killed at any moment, one or several or all, again and again: the group ends with the digest of one that
never was, and no step that it called durable is lost."""

from __future__ import annotations

import functools
import random
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from group_runs import LOG_STORE, WHOLE, Act, Life, Ranks, digest, small
from rank_run import PLACES

pytestmark = pytest.mark.dear

STEPS = 16
GRACE_SECONDS = 0.2
TIMEOUT = 3.0
JOINING_SECONDS = 5 * TIMEOUT


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and who takes part."""

    config: Mapping[str, Any]
    num_ranks: int
    memory_ranks: int = 0
    dropout: bool = False

    @property
    def owners(self) -> list[int]:
        return list(range(self.num_ranks - self.memory_ranks if self.memory_ranks else 0, self.num_ranks))

    def run(self, ranks: Ranks, pool: Path, **befalls: Any) -> Life:
        return ranks.run(
            pool,
            self.config,
            self.num_ranks,
            memory_ranks=self.memory_ranks,
            dropout=self.dropout,
            grace=GRACE_SECONDS,
            **befalls,
        )


def run_of(*, log: bool = False, whole: bool = False, dense_interval: int = 1, **sections: Any) -> dict[str, Any]:
    pool = {**(LOG_STORE["pool"] if log else {}), "dense_interval": dense_interval, **sections.pop("pool", {})}
    group = {"timeout": TIMEOUT, **(WHOLE["group"] if whole else {})}
    return small(pool=pool, group=group, train={"steps": STEPS, **sections.pop("train", {})}, **sections)


def keys(*, ttl_steps: int = 4, admit_after: int = 2, **rules: Any) -> dict[str, Any]:
    """Sections of a run whose ids are keys of items that are born and die. rules: others of the tables, or None."""
    synthetic = {"num_samples": 4000, "rows": [50, 300], "lookups": [1, 3], "num_dense": 3, "drift": 1.0}
    return {
        "data": {"synthetic": synthetic},
        "embedding": {
            "ttl_steps": ttl_steps,
            "admit_after": admit_after,
            **{name: rule for name, rule in rules.items() if rule is not None},
        },
        "train": {"shuffle": False},
    }


CASES = {
    "two_ranks": Case(config=run_of(), num_ranks=2),
    "three_ranks_dense_every_3_steps_random_numbers": Case(config=run_of(dense_interval=3), num_ranks=3, dropout=True),
    "two_trainers_and_a_memory_rank_random_numbers": Case(config=run_of(), num_ranks=3, memory_ranks=1, dropout=True),
    "whole_tables_adam_one_trainer_two_memory_ranks": Case(
        config=run_of(whole=True, dense_interval=3, embedding={"optimizer": "adam"}), num_ranks=3, memory_ranks=2
    ),
    "captured_ahead_one_trainer_one_memory_rank": Case(
        config=run_of(whole=True, dense_interval=2, train={"capture_ahead": True}), num_ranks=2, memory_ranks=1
    ),
    "relaxed_lookup_two_trainers_one_memory_rank": Case(
        config=run_of(dense_interval=3, device={"relaxed_lookup": True}), num_ranks=3, memory_ranks=1
    ),
    "log_store": Case(config=run_of(log=True), num_ranks=2),
    "log_store_three_ranks_dense_every_3_steps": Case(config=run_of(log=True, dense_interval=3), num_ranks=3),
    "log_store_two_trainers_two_memory_ranks_random_numbers": Case(
        config=run_of(log=True, dense_interval=3), num_ranks=4, memory_ranks=2, dropout=True
    ),
    "keys_that_are_left_behind_three_ranks": Case(config=run_of(dense_interval=3, **keys()), num_ranks=3),
    "log_store_keys_that_are_left_behind_two_trainers_two_memory_ranks": Case(
        config=run_of(log=True, dense_interval=3, **keys()), num_ranks=4, memory_ranks=2
    ),
    "log_store_whole_tables_four_ranks_half_rows": Case(
        config=run_of(log=True, whole=True, embedding={"dtype": "bf16"}), num_ranks=4
    ),
}


class Reference:
    """The group that nobody kills."""

    def __init__(self, ranks: Ranks, directory: Path, case: Case) -> None:
        pool = directory / "reference"
        life = case.run(ranks, pool)
        assert life.ended_well, life.errors()
        assert life.durable == STEPS
        self.digest = digest(pool)
        self.merged_bytes = sum(sum(rank.all_said("merged_bytes")) for rank in life.ranks)
        self.seconds = max(rank.ended for rank in life.ranks)
        self.persist_points = {rank.number: rank.all_said("persist_points")[0] for rank in life.ranks}


def befall(rng: random.Random, case: Case, reference: Reference) -> dict[str, Any]:
    """Something that kills one rank or several."""
    everyone = range(case.num_ranks)
    count = case.num_ranks if rng.random() < 0.2 else min(case.num_ranks, rng.choice([1, 1, 1, 2]))
    victims = rng.sample(everyone, count)
    match rng.choice(["persist point", "persist point", "early persist point", "time", "place", "place"]):
        case "persist point":
            return {
                "acts": {
                    rank: Act(persist_point=rng.randint(1, max(1, reference.persist_points[rank]))) for rank in victims
                }
            }
        case "early persist point":  # in recovery itself
            return {"acts": {rank: Act(persist_point=rng.randint(1, 12)) for rank in victims}}
        case "time":
            at = rng.uniform(0.0, 1.0) * reference.seconds
            return {"kill_after": {rank: at + rng.uniform(0.0, 0.02) for rank in victims}}
        case _:
            at, nth = rng.choice(sorted(PLACES)), rng.choice([1, 1, 2, rng.randint(1, STEPS)])
            return {"acts": {rank: Act(at=at, nth=nth, after=rng.random() < 0.5) for rank in victims}}


@pytest.fixture(scope="module")
def references(ranks: Ranks, new_root: Callable[[], Path]) -> Callable[[str], Reference]:
    """By name of a case, run once."""
    return functools.cache(lambda name: Reference(ranks, new_root(), CASES[name]))


def kill_again_and_again(
    ranks: Ranks, directory: Path, case: Case, reference: Reference, num_lives: int, *, seed: str
) -> None:
    """Kills so many lives of groups, each of which goes on where the last one ended."""
    rng = random.Random(seed)
    pool = directory / "killed"
    history: list[Any] = []
    durable = killed = 0
    while True:
        befalls = befall(rng, case, reference) if killed < num_lives else {}
        history.append(befalls)
        where = f"seed {seed!r}: {history}"
        life = case.run(ranks, pool, **befalls)
        if life.opened is not None:
            assert life.opened >= durable, where
        durable = max(durable, life.durable)
        if life.struck:
            life.check_that_the_others_ended(within=GRACE_SECONDS, joining=JOINING_SECONDS)
            killed += 1
            continue
        assert life.ended_well, f"{where}: {life.errors()}"
        assert digest(pool) == reference.digest, where
        if killed >= num_lives:
            return
        shutil.rmtree(pool)
        history, durable = [], 0


@pytest.mark.parametrize("name", CASES)
def test_a_group_that_is_killed_again_and_again_ends_as_one_that_never_was(
    name: str, ranks: Ranks, references: Callable[[str], Reference], pool_root: Path
) -> None:
    kill_again_and_again(ranks, pool_root, CASES[name], references(name), 6, seed=name)


@pytest.mark.parametrize("place", sorted(PLACES))
def test_a_group_that_is_killed_at_a_named_place_ends_as_one_that_never_was(
    place: str, ranks: Ranks, references: Callable[[str], Reference], pool_root: Path
) -> None:
    """One owner before it, and in the next life, which begins with recovery, another after it."""
    name = "log_store_three_ranks_dense_every_3_steps"
    case = CASES[name]
    rng = random.Random(zlib.crc32(place.encode()))
    pool = pool_root / "killed"
    durable = 0
    for after in (False, True):
        victim, nth = rng.choice(case.owners), rng.choice([1, 2, 5])
        life = case.run(ranks, pool, acts={victim: Act(at=place, nth=nth, after=after)})
        assert life.opened is None or life.opened >= durable
        durable = max(durable, life.durable)
        if life.struck:
            life.check_that_the_others_ended(within=GRACE_SECONDS, joining=JOINING_SECONDS)
    life = case.run(ranks, pool)
    assert life.ended_well, life.errors()
    assert life.opened is not None and life.opened >= durable
    assert digest(pool) == references(name).digest


def test_rows_in_a_log_store_end_with_the_bits_of_rows_in_place(
    ranks: Ranks, references: Callable[[str], Reference], pool_root: Path
) -> None:
    in_log = references("log_store_three_ranks_dense_every_3_steps")
    assert in_log.merged_bytes > 0, "kills strike merges only where runs merge"
    in_place = Reference(ranks, pool_root, Case(config=run_of(dense_interval=3), num_ranks=3))
    assert in_log.digest == in_place.digest


def test_runs_with_random_numbers_depend_on_them(
    ranks: Ranks, references: Callable[[str], Reference], pool_root: Path
) -> None:
    """Or it would prove nothing that their kills leave no trace."""
    name = "three_ranks_dense_every_3_steps_random_numbers"
    without = Reference(ranks, pool_root, replace(CASES[name], dropout=False))
    assert without.digest != references(name).digest


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_hundreds_of_kills_leave_no_trace(
    name: str, ranks: Ranks, references: Callable[[str], Reference], pool_root: Path
) -> None:
    for seed in range(10):
        kill_again_and_again(ranks, pool_root / str(seed), CASES[name], references(name), 40, seed=f"{name} {seed}")
        shutil.rmtree(pool_root / str(seed))
