"""holdfast on this machine, simulated: what `holdfast train` does, from what the probes of `holdfast_lab.placement`
found.

Invariants
- The schedule is that of the real loop (train/trainer.py) and of the pool's threads below it. Nothing in it was fitted
  to a run: costs come from probes, amounts from how often the run's rows come up.
- The training thread's stages have the names that a real run's trace gives them (trace.py): `wait for loader`,
  `capture`, `lookup`, `capture ahead`, `train`, `update`, `commit`. Beside it: `plan` of the loader, `collect` and
  `fetch` of the scratchpad, and `swap` where it has a victim cache, `record` and `make durable` of the thread that
  makes steps durable, `copy ahead` of the same, `merge` of the log store.
- CPU time of other threads makes the training thread's stages longer by `NetworkTime.displaced_by` for each second, and
  that only while there is such a stage: where training waits, they cost it nothing. That was measured beside the
  network, and is taken to hold beside its work on rows, too: their sum is right, how it falls on stages may not be.

Who waits for whom
- Training takes a batch that is planned; the loader is at most `prefetch` batches beyond what was taken, and the
  window's batches are taken ahead.
- Rows are fetched from when their batch is announced, window - 1 batches ahead, as far as the scratchpad has room, and
  after those of the batch that are victims were swapped; capture waits for them.
- A commit with a dense state waits until the step before is durable, one without until the step before that is.
- Merges and fetches take turns on the disk, records go before both; where merges fall behind by what the log has room
  for, records wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train.trace import EVENT_NAMES
from holdfast_lab.placement.network_time import NetworkTime
from holdfast_lab.placement.row_costs import RowAmounts, RowCosts
from holdfast_lab.placement.step_time import StepCosts, StepInputs, step_costs
from holdfast_lab.placement.tiers import Tier
from holdfast_lab.sim.device import Compute, Device, Memory
from holdfast_lab.sim.machine import Run, simulate
from holdfast_lab.sim.model import Workload
from holdfast_lab.sim.system import Stage, System

_BATCHES = 100  # many more than are under way
_SLICE_S = 1e-3  # of the disk's time: requests of several threads take turns about so
_MOST_STEPS_BEHIND = 16  # of merges: more change nothing but how long it takes until the schedule is steady
_LATEST_MERGE = 0.3  # of the log: what may come in while the rest goes home (core/log_store/log_merger.cpp)
_TRAINING = "training thread"
_VERBS = ("plan", "capture", "lookup", "capture_ahead", "train", "update", "commit")  # as StepReport names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a run goes through its batches; the fields are those of TrainConfig and PoolConfig. threads: of the training
    thread's team. Raises ConfigError."""

    window: int = 4
    prefetch: int = 2
    workers: int = 1
    capture_ahead: bool = False
    dense_interval: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("window", "capture_ahead") else 1
            if getattr(self, field.name) < least:
                raise ConfigError(f"{field.name} = {getattr(self, field.name)}; it must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HereStep:
    """A simulated step in steady state. stage_ms: from the end of one of the training thread's verbs to that of the
    next, as StepReport has them. busy_ms: what a step asks of each device. run: all of it, for a trace."""

    ms: float
    stage_ms: Mapping[str, float]
    busy_ms: Mapping[str, float]
    run: Run


def simulate_here(inputs: StepInputs, loop: Loop) -> HereStep:
    """Raises ConfigError where the probe did not tell verbs apart."""
    system = system_here(inputs, loop)
    devices = {role: _device(role, inputs.medium, loop) for role in system.devices}
    run = simulate(system, devices, _workload(step_costs(inputs).amounts), batches=_BATCHES)
    stage_ms = _laps_ms(run)
    busy_ms = {
        role: 1e3 * sum(stage.seconds or 0.0 for stage in system.stages.values() if role in stage.on)
        for role in system.devices
    }
    return HereStep(ms=sum(stage_ms.values()), stage_ms=stage_ms, busy_ms=busy_ms, run=run)


def system_here(inputs: StepInputs, loop: Loop) -> System:
    """The schedule alone. Raises ConfigError as `simulate_here` does."""
    verbs = inputs.host.verbs
    if verbs is None:
        raise ConfigError(
            "tiers: [host] has no verbs, so no step can be simulated stage by stage; `holdfast tiers probe` again"
        )
    costs = step_costs(inputs)
    schedule = _Schedule(costs, verbs, inputs.network, loop)
    if costs.work is None:
        stages = schedule.in_place()
    else:
        kept_steps = _LATEST_MERGE * inputs.options.log_bytes / max(1.0, costs.work.record_bytes)
        stages = schedule.log_store(max(1, min(_MOST_STEPS_BEHIND, int(kept_steps))))
    roles = {role: role for stage in stages.values() for role in stage.on}
    return System(title="holdfast on this machine", devices=roles, stages=stages)


class _Schedule:
    """Stages of the loop and of the threads beside it, by name."""

    def __init__(self, costs: StepCosts, verbs: Mapping[str, RowCosts], network: NetworkTime, loop: Loop) -> None:
        self._costs, self._verbs, self._network, self._loop = costs, verbs, network, loop

    def in_place(self) -> dict[str, Stage]:
        """Rows are overwritten where they are; capture copies them before, itself or ahead."""
        stages = self._loop_stages(window=2 if self._loop.capture_ahead else 1, durable="record")
        if not self._loop.capture_ahead:
            return stages
        copying = RowCosts(row_byte_ns=self._verbs["capture"].row_byte_ns).seconds(self._costs.amounts)
        stages["capture ahead"] = self._training(self._verb_s("capture") - copying, after=("lookup",))
        stages["copy ahead"] = self._beside(
            "commit thread", "copy ahead", copying * self._loop.threads, after=("capture ahead",)
        )
        stages["capture"] = replace(stages["capture"], seconds=0.0)
        stages["train"] = replace(stages["train"], after=("capture ahead",))
        stages["update"] = replace(stages["update"], after=("train", "copy ahead"))
        return stages

    def log_store(self, steps_before_merge: int) -> dict[str, Stage]:
        """Rows come through a scratchpad, go to a log, and home from there that many steps later at most."""
        costs, work = self._costs, self._costs.work
        assert work is not None
        room = int(work.room_rows // max(1.0, costs.amounts.rows))
        window = max(1, min(self._loop.window, room))
        stages = self._loop_stages(window=window, durable="make durable")
        announced: dict[str, Any] = {"after_earlier": {"wait for loader": window - 1}} if window > 1 else {}
        stages["collect"] = self._beside(
            "collecting thread",
            "collect",
            costs.cpu["collect"],
            after=("plan", "previous.collect", *(() if announced else ("wait for loader",))),
            **announced,
        )
        stages["fetch"] = self._on_disk("fetch", after=("collect", "previous.fetch"))
        if costs.victims_s:  # the exchanging thread fetches when it is done with victims
            stages["swap"] = self._beside(
                "exchanging thread",
                "swap",
                costs.victims_s,
                computing=costs.cpu["swap"] / costs.victims_s,
                after=("collect", "previous.fetch"),
            )
            stages["fetch"] = replace(stages["fetch"], after=("swap", "previous.fetch"))
        stages["capture"] = replace(stages["capture"], after=("wait for loader", "fetch"))
        stages["make durable"] = Stage(
            does="given",
            seconds=costs.log_s,
            on=("disk",),
            after=("record", "previous.make durable"),
            after_earlier={"merge": steps_before_merge},
            priority=-1,
        )
        stages["merge"] = self._on_disk("merge", after=("make durable", "previous.merge"))
        return stages

    def _loop_stages(self, *, window: int, durable: str) -> dict[str, Stage]:
        """What is so in both stores. window: batches taken from the loader before one is trained, that one included."""
        on_their_way = 1 if self._loop.dense_interval == 1 else 2
        taken = {"wait for loader": self._loop.prefetch + window - 1}
        return {
            "plan": self._beside("loader", "plan", self._costs.cpu["plan"], after_earlier=taken),
            "wait for loader": self._training(0.0, after=("plan", "previous.commit")),
            "capture": self._training(self._verb_s("capture"), after=("wait for loader",)),
            "lookup": self._training(self._verb_s("lookup"), after=("capture",)),
            "train": self._training(self._costs.network_s + self._verb_s("train"), after=("lookup",)),
            "update": self._training(self._verb_s("update"), after=("train",)),
            "commit": self._training(self._verb_s("commit"), after=("update",), after_earlier={durable: on_their_way}),
            "record": self._beside(
                "commit thread", "record", self._costs.cpu["record"], after=("commit", "previous.record")
            ),
        }

    def _verb_s(self, verb: str) -> float:
        return self._verbs[verb].seconds(self._costs.amounts)

    def _training(self, seconds: float, **waits: Any) -> Stage:
        return Stage(does="given", seconds=seconds, on=(_TRAINING,), **waits)

    def _beside(self, thread: str, what: str, seconds: float, *, computing: float = 1.0, **waits: Any) -> Stage:
        """A thread that computes for so much of the time."""
        displaced = self._network.displaced_by(what) * computing
        return Stage(does="given", seconds=seconds, on=(thread,), beside={_TRAINING: displaced}, **waits)

    def _on_disk(self, what: str, **waits: Any) -> Stage:
        """A thread that waits for requests, and computes a part of the time."""
        disk_s = self._costs.disk[what]
        computing = self._costs.cpu[what] / disk_s if disk_s else 0.0
        return Stage(
            does="given",
            seconds=disk_s,
            on=("disk",),
            beside={_TRAINING: self._network.displaced_by(what) * computing},
            slice_s=_SLICE_S,
            **waits,
        )


def _laps_ms(run: Run) -> dict[str, float]:
    """Means over the batches of steady state."""
    ends_s = {(span.batch, span.stage): span.end_s for span in run.spans}
    verbs = [verb for verb in _VERBS if (0, EVENT_NAMES.get(verb, verb)) in ends_s]
    laps_ms = dict.fromkeys(verbs, 0.0)
    for batch in run.steady:
        last_s = ends_s[batch - 1, "commit"]
        for verb in verbs:
            end_s = ends_s[batch, EVENT_NAMES.get(verb, verb)]
            laps_ms[verb] += 1e3 * (end_s - last_s) / len(run.steady)
            last_s = end_s
    return laps_ms


def _device(role: str, medium: Tier, loop: Loop) -> Device:
    """What it can do beside its stages' seconds, which were measured, is for the trace's reader."""
    if role == "disk":
        return Memory(
            kind="memory",
            read_bandwidth_bytes_per_s=medium.read_bandwidth_bytes_per_s,
            write_bandwidth_bytes_per_s=medium.write_bandwidth_bytes_per_s,
            read_latency_s=1e-9 * medium.read_latency_ns,
            granularity_bytes=medium.access_granularity_bytes,
        )
    return Compute(kind="compute", flops_per_s=1.0, parallelism=loop.workers if role == "loader" else 1)


def _workload(batch: RowAmounts) -> Workload:
    """What is known of the batch; stages with seconds of their own ask for nothing of it."""
    known: dict[str, Any] = {
        "accesses": batch.ids,
        "unique_rows": batch.rows,
        "row_bytes": batch.row_bytes / max(1.0, batch.rows),
        "network_bytes": batch.dense_bytes,
        "gpus": 1,
    }
    return Workload(**{field.name: known.get(field.name, 0) for field in fields(Workload)})
