"""Failures: how much of a day is useful work, by how often a machine fails, how it makes its work durable, and how long
it takes to come back.

Work goes in segments: `useful_s` of training, then `overhead_s` until it is durable. A failure loses the segment that
is under way; recovery takes `recovery_s`, and begins again where it fails itself. Failures come at random, `mtbf_s`
apart on average (exponential), of the whole machine: n devices fail n times as often as one.

- A *periodic* full checkpoint has long segments: `useful_s` is the interval, `overhead_s` what training stands still
  for. The best interval is near sqrt(2 · overhead · MTBF) (Young, CACM 17(9), 1974), and nearer by Daly's series
  (Future Generation Computer Systems 22(3), 2006).
- *Durable in every batch*: a segment is a batch, with what that costs it. At most a batch is lost.

With M for the MTBF and R for the recovery, from one durable point to the next it takes exactly
M · exp(R/M) · (exp((useful + overhead)/M) - 1) in the mean (Daly 2006). `simulate_failures` draws the same from events.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import simpy

SECONDS_PER_DAY = 86_400.0
_T_95 = {10: 2.262, 20: 2.093, 40: 2.023}  # Student's t of so many runs, two sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How work becomes durable; see the module's text. Raises ValueError that names the field."""

    name: str
    useful_s: float
    overhead_s: float
    recovery_s: float

    def __post_init__(self) -> None:
        for field in ("useful_s", "overhead_s", "recovery_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and field != "useful_s"))):
                raise ValueError(
                    f"{field} = {value}; it must be {'more than 0' if field == 'useful_s' else '0 or more'}"
                )

    @property
    def segment_s(self) -> float:
        return self.useful_s + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class UsefulWork:
    """Of many days: useful_s_per_day in the mean, and half of its 95% confidence interval; failures_per_day."""

    useful_s_per_day: float
    half_width_s: float
    failures_per_day: float


def durable_batches(*, batch_s: float, overhead_s: float, recovery_s: float) -> Scheme:
    """Every batch becomes durable. batch_s: without that; overhead_s: what it costs a batch."""
    return Scheme(name="every batch", useful_s=batch_s, overhead_s=overhead_s, recovery_s=recovery_s)


def periodic_checkpoints(
    *, checkpoint_s: float, recovery_s: float, mtbf_s: float, interval_s: float | None = None
) -> Scheme:
    """checkpoint_s: that training stands still for one. interval_s: of training between two; None: Daly's."""
    if interval_s is None:
        interval_s = daly_interval_s(checkpoint_s, mtbf_s)
    return Scheme(name="periodic", useful_s=interval_s, overhead_s=checkpoint_s, recovery_s=recovery_s)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    return math.sqrt(2.0 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Of training between the end of a checkpoint and the begin of the next (Daly 2006, his higher-order estimate)."""
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2.0 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - checkpoint_s


def useful_s_per_day(scheme: Scheme, mtbf_s: float) -> float:
    """Seconds of a day that are training which is not lost: the closed form."""
    _check_mtbf(mtbf_s)
    if math.isinf(mtbf_s):
        return SECONDS_PER_DAY * scheme.useful_s / scheme.segment_s
    exponent = scheme.segment_s / mtbf_s
    if exponent + scheme.recovery_s / mtbf_s > 700.0:
        return 0.0  # nothing ever ends; exp would overflow
    between_s = mtbf_s * math.exp(scheme.recovery_s / mtbf_s) * math.expm1(exponent)
    return SECONDS_PER_DAY * scheme.useful_s / between_s


def sweep_failures(schemes: Sequence[Scheme], failures_per_day: Sequence[float]) -> list[list[float]]:
    """useful_s_per_day of each scheme (rows) at each rate (columns). A periodic scheme keeps its interval; `at_best`
    gives it that of a rate."""
    return [[useful_s_per_day(scheme, _mtbf_s(rate)) for rate in failures_per_day] for scheme in schemes]


def at_best(scheme: Scheme, mtbf_s: float) -> Scheme:
    """With Daly's interval for that failure rate."""
    return replace(scheme, useful_s=daly_interval_s(scheme.overhead_s, mtbf_s))


def simulate_failures(scheme: Scheme, mtbf_s: float, *, days: float, runs: int = 20, seed: int = 0) -> UsefulWork:
    """So many runs of so many days each, with a seed of their own; runs: 10, 20 or 40. What is under way when a run
    ends counts as lost, so days should be many segments and many failures long. Events are failures and recoveries;
    the segments between them are counted, so that a day of short ones takes no longer."""
    _check_mtbf(mtbf_s)
    if runs not in _T_95:
        raise ValueError(f"runs = {runs}; there are {', '.join(map(str, _T_95))}")
    found = [_Machine(scheme, mtbf_s, days, f"{seed} {run}") for run in range(runs)]
    useful = [each.useful_s / days for each in found]
    return UsefulWork(
        useful_s_per_day=statistics.fmean(useful),
        half_width_s=_T_95[runs] * statistics.stdev(useful) / math.sqrt(runs),
        failures_per_day=statistics.fmean(each.failures / days for each in found),
    )


class _Machine:
    """One run, from the begin to its end."""

    def __init__(self, scheme: Scheme, mtbf_s: float, days: float, seed: str) -> None:
        self.useful_s = 0.0
        self.failures = 0
        self._scheme, self._mtbf_s = scheme, mtbf_s
        self._random = random.Random(seed)
        self._end_s = days * SECONDS_PER_DAY
        self._environment = simpy.Environment()
        self._environment.process(self._live())
        self._environment.run(until=self._end_s)

    def _live(self) -> Generator[simpy.Event, Any, None]:
        while True:
            began_s = self._environment.now
            until_failure_s = self._random.expovariate(1.0 / self._mtbf_s)
            work_s = min(until_failure_s, self._end_s - began_s)
            self.useful_s += math.floor(work_s / self._scheme.segment_s) * self._scheme.useful_s
            yield self._environment.timeout(until_failure_s)
            self.failures += 1
            yield from self._recover()

    def _recover(self) -> Generator[simpy.Event, Any, None]:
        while (until_failure_s := self._random.expovariate(1.0 / self._mtbf_s)) < self._scheme.recovery_s:
            yield self._environment.timeout(until_failure_s)
            self.failures += 1
        yield self._environment.timeout(self._scheme.recovery_s)


def _mtbf_s(failures_per_day: float) -> float:
    return SECONDS_PER_DAY / failures_per_day if failures_per_day > 0 else math.inf


def _check_mtbf(mtbf_s: float) -> None:
    if not mtbf_s > 0:
        raise ValueError(f"mtbf_s = {mtbf_s}; it must be more than 0")
