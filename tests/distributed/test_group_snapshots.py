"""A snapshot of a group is that group, stopped at the snapshot's step, to the bit, whatever its ranks do meanwhile."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from group_runs import GROUPS, Act, Life, Ranks, digest
from holdfast.admin.snapshot import copying, restore_snapshot, take_snapshot
from holdfast.errors import HoldfastError, StepError
from holdfast.pools.read_only import open_reader

pytestmark = pytest.mark.dear

ENDLESS = 1_000_000
STORES: dict[str, dict[str, Any]] = {
    "in place": {},
    "in place, seldom": {"dense_interval": 3, "log_bytes": 1 << 18},
    "log": {"medium": "block", "log_bytes": 100 << 10, "dense_interval": 3},
}
SLOTS = {"device": {"rows": "scratchpad", "scratchpad_bytes": 50_000}}
IN_SLOTS = {f"{name}, owners in slots": {**STORES[name], **SLOTS} for name in ("in place, seldom", "log")}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 4096)


def slowly(rows: int) -> None:
    """Lets the ranks take steps between two chunks."""
    time.sleep(0.004)


def run(ranks: Ranks, directory: Path, group: str, options: dict[str, Any], **how: Any) -> Life:
    num_ranks, memory_ranks = GROUPS[group]
    options = {"timeout": 10.0, **options}
    return ranks.run(directory, options, num_ranks, memory_ranks=memory_ranks, loop="train", **how)


def wait_for(directory: Path, step: int, life: Future[Life]) -> None:
    while True:
        try:
            if int(open_reader(directory).commit["step"]) >= step:
                return
        except HoldfastError:  # it is being made
            pass
        assert not life.done(), life.result().errors()
        time.sleep(0.02)


def while_it_trains(
    ranks: Ranks, directory: Path, group: str, options: dict[str, Any], work: Callable[[], object]
) -> None:
    """Runs a group, does the work beside it, and then kills all ranks of the group."""
    stop = directory.with_suffix(".stop")
    with ThreadPoolExecutor(1) as thread:
        life = thread.submit(run, ranks, directory, group, {**options, "steps": ENDLESS, "stop": str(stop)})
        try:
            wait_for(directory, 6, life)
            work()
            assert not life.done(), life.result().errors()
        finally:
            stop.touch()
        life.result()


@pytest.mark.parametrize(
    ("group", "store"), [*itertools.product(GROUPS, STORES), *itertools.product(("2 ranks", "3 ranks"), IN_SLOTS)]
)
def test_snapshots_of_a_group_that_trains_restore_to_the_bit(
    group: str, store: str, ranks: Ranks, pool_root: Path
) -> None:
    pool, options, steps = pool_root / "pool", {**STORES, **IN_SLOTS}[store], list[int]()

    def work() -> None:
        steps.append(take_snapshot(pool, pool_root / "a", on_rows=slowly).step)
        steps.append(take_snapshot(pool, pool_root / "b", since=pool_root / "a", on_rows=slowly).step)

    while_it_trains(ranks, pool, group, options, work)
    steps.append(take_snapshot(pool, pool_root / "c", since=pool_root / "b").step)  # of ranks that were killed
    assert steps == sorted(steps)
    for name, step in zip("abc", steps, strict=True):
        restore_snapshot(pool_root / name, pool_root / f"restored-{name}", medium=options.get("medium", "auto"))
        life = run(ranks, pool_root / "reference", group, {**options, "steps": step})
        assert life.ended_well, life.errors()
        assert digest(pool_root / f"restored-{name}") == digest(pool_root / "reference")
    assert digest(pool_root / "restored-c") == digest(pool)  # what it goes back to
    goes_on = {**options, "steps": steps[-1] + 4}
    for name in ("restored-a", "reference"):
        life = run(ranks, pool_root / name, group, goes_on)
        assert life.ended_well, life.errors()
    assert digest(pool_root / "restored-a") == digest(pool_root / "reference")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_was_killed_anywhere_is_copied_as_of_the_step_that_it_goes_back_to(
    group: str, store: str, ranks: Ranks, pool_root: Path
) -> None:
    draw = random.Random(f"{group} {store}")
    for turn in range(3):
        pool = pool_root / f"pool-{turn}"
        victim, nth = draw.randrange(GROUPS[group][0]), draw.randrange(2, 6)
        place = draw.choice(["commit", "dense", "settle", "collective", "note"])
        act = Act(at=place, nth=60 + nth * 12 if place == "collective" else nth, after=draw.random() < 0.5)
        run(ranks, pool, group, STORES[store], acts={victim: act}, grace=0.2)
        step = take_snapshot(pool, pool_root / f"snapshot-{turn}").step
        restore_snapshot(pool_root / f"snapshot-{turn}", pool_root / f"restored-{turn}")
        assert digest(pool_root / f"restored-{turn}") == digest(pool)
        assert step == int(open_reader(pool).commit["step"])


@pytest.mark.parametrize("store", STORES)
def test_a_group_that_dies_and_goes_on_meanwhile_is_copied_at_one_step_of_either_life(
    store: str, ranks: Ranks, pool_root: Path
) -> None:
    pool, options, taken = pool_root / "pool", STORES[store], []
    with ThreadPoolExecutor(1) as thread:

        def begin() -> None:
            taken.append(thread.submit(take_snapshot, pool, pool_root / "snapshot", on_rows=slowly))

        while_it_trains(ranks, pool, "2 ranks", options, begin)
        assert run(ranks, pool, "2 ranks", {**options, "steps": int(open_reader(pool).commit["step"]) + 5}).ended_well
        step = taken[0].result().step
    restore_snapshot(pool_root / "snapshot", pool_root / "restored")
    assert run(ranks, pool_root / "reference", "2 ranks", {**options, "steps": step}).ended_well
    assert digest(pool_root / "restored") == digest(pool_root / "reference")


def test_a_snapshot_of_a_step_to_come_waits_for_it(ranks: Ranks, pool_root: Path) -> None:
    pool = pool_root / "pool"

    def work() -> None:
        wanted = (int(open_reader(pool).commit["step"]) // 20 + 2) * 20
        assert take_snapshot(pool, pool_root / "snapshot", step=wanted).step == wanted
        with pytest.raises(StepError, match="is past"):
            take_snapshot(pool, pool_root / "late", step=2)

    while_it_trains(ranks, pool, "2 ranks", {"dense_interval": 20}, work)
    with pytest.raises(StepError, match="no run takes it"):
        take_snapshot(pool, pool_root / "never", step=ENDLESS)
