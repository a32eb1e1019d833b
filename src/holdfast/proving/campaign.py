"""All runs of a proof: some that nobody disturbs, then some that are killed and started again.

Invariants
- No run sees another's pool, and what a run made is removed when it is over, also where the proof is broken off.
- Which kills are ordered is a function of the seed; where those from outside hit is the machine's.
"""

from __future__ import annotations

import math
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, Protocol

from holdfast.pools.log_medium import remove_log
from holdfast.proving.comparison import Difference, Reference, Run, went_back_below
from holdfast.proving.life import CannotProve, LifeEnd, live
from holdfast.proving.record import (
    Kill,
    KillKind,
    LifeRecord,
    Orders,
    events_file,
    output_file,
    pools_of,
    values_file,
)

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_OPENING_POINTS = 12
_ROUNDS = 4  # of killed runs: a run may end before a kill from outside comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A proof. runs: undisturbed. kills: in further runs, `kills_per_run` in each. pools: where the runs' pools
    go; None: beside the script's own. values_bytes: of tensors that each process keeps, to say how far they differ."""

    command: Sequence[str]
    environment: Mapping[str, str]
    steps: int = 50
    runs: int = 3
    kills: int = 20
    kills_per_run: int = 4
    jobs: int = 2
    seed: int = 0
    timeout: float = 300.0
    pools: Path | None = None
    values_bytes: int = 256 << 20


class Progress(Protocol):
    """Is told how a proof goes on; from any thread."""

    def started(self, runs: int, steps: int) -> None:
        """So many more runs, of so many steps altogether."""

    def advanced(self, steps: int) -> None:
        """So many steps further than ever before in a run."""

    def killed(self) -> None: ...
    def finished(self, run: int) -> None: ...


@dataclass(slots=True)
class Proof:
    """What was found. failed_resume: (run, step, why) of a run that could not go on after a kill."""

    plan: Plan
    runs: list[Run] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    failed_resume: tuple[int, int, str] | None = None
    below_durable: tuple[int, int, int] | None = None

    @property
    def kills(self) -> Counter[KillKind]:
        """How many of each kind hit."""
        return Counter(kind for run in self.runs for kind in run.kills)

    @property
    def facts(self) -> dict[str, object]:
        """Of the script's process."""
        return self.runs[0].lives[0].facts if self.runs else {}

    @property
    def holds(self) -> bool:
        return not self.differences and self.failed_resume is None and self.below_durable is None

    @property
    def earliest(self) -> Difference | None:
        return min(self.differences, key=lambda each: each.step, default=None)


class _FailedResume(Exception):
    def __init__(self, run: int, step: int, why: str) -> None:
        super().__init__(why)
        self.found = run, step, why


def prove(plan: Plan, scratch: Path, progress: Progress) -> Proof:
    """Runs all of it. scratch: an empty folder. Raises CannotProve."""
    if any(launcher in argument for argument in plan.command[:4] for launcher in _LAUNCHERS):
        raise CannotProve(
            "it is started by torchrun, and prove runs scripts of one process; a pool of several ranks cannot be "
            "proven this way yet: prove the script without torchrun"
        )
    proof = Proof(plan)
    try:
        _prove(_Campaign(plan, scratch, progress), proof)
    except _FailedResume as failure:
        proof.failed_resume = failure.found
    return proof


def _prove(campaign: _Campaign, proof: Proof) -> None:
    plan = proof.plan
    proof.runs = campaign.all([0] * plan.runs, lambda number, _: campaign.run(number, 0, None))
    reference = Reference(proof.runs[0])
    if reference.run.last_step < 1:
        raise CannotProve("it ended before its first step was committed: Checkpoint.commit ends a step")
    proof.differences = [d for run in proof.runs[1:] if (d := reference.first_difference(run)) is not None]
    if proof.differences:
        return
    campaign.steps = reference.run.last_step
    for run in proof.runs[1:]:
        forget(run.folder, run.lives[0])
    for _ in range(_ROUNDS):
        missing = plan.kills - proof.kills.total()
        if missing < 1 or not proof.holds:
            return
        num_runs = math.ceil(missing / plan.kills_per_run)
        shares = [missing // num_runs + (i < missing % num_runs) for i in range(num_runs)]
        killed = campaign.all(shares, lambda number, kills: campaign.run(number, kills, reference))
        proof.runs += killed
        proof.differences = [run.difference for run in killed if run.difference is not None]
        for run in killed:
            if below := went_back_below(run):
                proof.below_durable = (run.number, *below)


def forget(folder: Path, life: LifeRecord) -> None:
    """What was observed of a process that is alike."""
    life.steps.clear()
    for file in (values_file, output_file, events_file):
        file(folder, life.life).unlink(missing_ok=True)


class _Campaign:
    def __init__(self, plan: Plan, scratch: Path, progress: Progress) -> None:
        self._plan = plan
        self._scratch = scratch
        self._progress = progress
        self._stop = threading.Event()
        self.steps = plan.steps  # of a run, as far as it is known
        self._token = scratch.name  # ends in letters of its own
        self._num_runs = 0

    def all(self, shares: Sequence[int], one: Callable[[int, int], Run]) -> list[Run]:
        """A run for each share, some at once, in order. What fails first ends the others."""
        first = self._num_runs + 1
        self._num_runs += len(shares)
        self._progress.started(len(shares), len(shares) * self.steps)
        with ThreadPoolExecutor(self._plan.jobs) as executor:
            futures = [executor.submit(one, first + i, share) for i, share in enumerate(shares)]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failures = [error for future in done if (error := future.exception()) is not None]
                if failures:
                    raise next((e for e in failures if not isinstance(e, _Stopped)), failures[0])
            finally:
                self._stop.set()
                for future in futures:
                    future.cancel()
        self._stop.clear()
        return [future.result() for future in futures]

    def run(self, number: int, kills: int, reference: Reference | None) -> Run:
        """One run, from an empty pool to its end, or to where it differs from the reference."""
        folder = self._scratch / f"run-{number}"
        folder.mkdir()
        try:
            run = self._lives(number, folder, kills, reference)
        finally:
            for pool in pools_of(folder).values():
                remove_log(Path(pool))
                shutil.rmtree(pool, ignore_errors=True)
        self._progress.finished(number)
        return run

    def _lives(self, number: int, folder: Path, kills: int, reference: Reference | None) -> Run:
        draws = random.Random(f"{self._plan.seed} {number}")
        targets = sorted(draws.randrange(max(1, self.steps - 2)) for _ in range(kills))
        points_a_step = 1 if reference is None else reference.run.lives[0].points_a_step
        lives: list[LifeRecord] = []
        hit: list[KillKind] = []
        run = Run(number, folder, lives, hit)
        on_step = self._counter()
        while True:
            done = len(lives)
            kill = _draw_kill(draws, targets[done], points_a_step, reopens=done > 0) if done < kills else None
            end = self._live(
                number,
                folder,
                Orders(
                    life=done + 1,
                    steps=self.steps,
                    token=f"{self._token}-{number}",
                    pools=None if self._plan.pools is None else str(self._plan.pools.absolute()),
                    kill=kill,
                    values_bytes=self._plan.values_bytes,
                ),
                on_step,
            )
            lives.append(end.record)
            if end.ending == "failed":
                self._fail(number, lives, end.why)
            _check_that_it_goes_on(folder, lives)
            if reference is not None:
                difference = reference.difference_in(run, end.record)
                if difference is None and end.ending == "done":
                    difference = reference.different_end(run)
                if difference is not None:
                    return replace(run, difference=difference)
                forget(folder, end.record)
            if end.ending == "done":
                return run
            assert kill is not None
            hit.append(kill.kind)
            self._progress.killed()

    def _live(self, number: int, folder: Path, orders: Orders, on_step: Callable[[int], None]) -> LifeEnd:
        return live(
            self._plan.command,
            self._plan.environment,
            folder,
            orders,
            timeout=self._plan.timeout,
            stopping=self._stop.is_set,
            on_step=on_step,
        )

    def _counter(self) -> Callable[[int], None]:
        reached = 0

        def on_step(step: int) -> None:
            nonlocal reached
            self._progress.advanced(max(0, step - reached))
            reached = max(step, reached)

        return on_step

    def _fail(self, number: int, lives: Sequence[LifeRecord], why: str) -> NoReturn:
        if self._stop.is_set():
            raise _Stopped("stopped")
        if len(lives) > 1 and lives[-1].refusal is None:
            raise _FailedResume(number, max((life.step or 0 for life in lives[:-1]), default=0), why)
        raise CannotProve(why)


class _Stopped(CannotProve):
    """Another run has failed, or the user has had enough."""


def _draw_kill(draws: random.Random, after: int, points_a_step: int, *, reopens: bool) -> Kill:
    kinds: list[KillKind] = ["outside", "outside", "persist", "persist", "before commit", "after commit"]
    if reopens:
        kinds.append("opening")
    kind = draws.choice(kinds)
    points = draws.randint(1, _OPENING_POINTS if kind == "opening" else 2 * points_a_step)
    return Kill(kind=kind, after=after, points=points, delay=2.0 * draws.random())


def _check_that_it_goes_on(folder: Path, lives: Sequence[LifeRecord]) -> None:
    """A process that starts anew although there is a durable step is not what its user wants."""
    durable = max((life.durable for life in lives[:-1]), default=0)
    if durable > 0 and lives[-1].resumed == 0 and len(names := list(pools_of(folder))) > 1:
        raise CannotProve(
            f"it opens its pool at another place in every process ({names[0]}, then {names[-1]}), so it never goes on "
            "where it was killed; give the pool a fixed directory"
        )
