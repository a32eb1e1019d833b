"""The events: batches go through a system's stages, and its devices serve one stage at a time, or as many as they can.

Invariants
- A stage begins when everything that it waits for has ended and it has all of its devices, and holds them until it
  ends, or its slice does. It asks for one after the other, in the order of all stages, and keeps the first while it
  waits for the next: so no two stages wait for each other.
- A memory that is shared serves all who ask at once: who needs less of it than a fair share gets that, the others what
  is left, in equal parts.
- A processor's holder and what runs beside it share it fairly: who asks for less than its share gets all of that.
- The number of batches under way is bounded: else stages that wait for no other batch would run ahead without end. The
  bound takes nothing from a pipeline, whose stages have devices of their own, nor from what stages say themselves.
- Nothing is drawn at random: the same declarations give the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from holdfast_lab.sim.device import Amounts, Compute, Device, Fabric, Memory, Processor
from holdfast_lab.sim.model import Workload
from holdfast_lab.sim.queues import DeviceQueue
from holdfast_lab.sim.steady import steady_batches
from holdfast_lab.sim.system import PREVIOUS, Stage, System
from holdfast_lab.sim.work import amounts_of

DEFAULT_BATCHES = 6
_MOST_BATCHES = 200  # of which a steady state has to be seen


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of a batch: when it was ready, began and ended, in seconds."""

    batch: int
    stage: str
    ready_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """batch_s, joules_per_batch: in steady state. busy_s: of each role, in a batch; stage_s: of each stage, from its
    begin to its end. All are means over the batches of `steady`, after which everything comes again."""

    system: str
    batch_s: float
    joules_per_batch: float
    joules_by_role: Mapping[str, float]
    busy_s: Mapping[str, float]
    stage_s: Mapping[str, float]
    spans: Sequence[Span]
    steady: range

    def timeline(self, batches: int = 2) -> list[Span]:
        """The spans of some batches in steady state, the first stage of the first at 0."""
        kept = [span for span in self.spans if self.steady.stop - batches <= span.batch < self.steady.stop]
        origin = min(span.begin_s for span in kept)
        return [Span(s.batch, s.stage, s.ready_s - origin, s.begin_s - origin, s.end_s - origin) for s in kept]


def simulate(
    system: System,
    devices: Mapping[str, Device],
    workload: Workload,
    *,
    batches: int = DEFAULT_BATCHES,
    missed_rows: float | None = None,
) -> Run:
    """devices: by role. batches: that are run first; where the schedule is not steady by then, twice as many, and so on
    up to some hundreds, over whose middle the means are taken. missed_rows: of a batch, where the system has a cache.
    """
    spans = _Machine(system, devices, workload, missed_rows).run(batches)
    steady = steady_batches(spans)
    while steady is None and batches < _MOST_BATCHES:
        batches *= 2
        spans = _Machine(system, devices, workload, missed_rows).run(batches)
        steady = steady_batches(spans)
    if steady is None:
        steady = range(batches // 4, batches * 3 // 4)
    ends_s = {batch: max(s.end_s for s in spans if s.batch == batch) for batch in (steady[0] - 1, steady[-1])}
    batch_s = (ends_s[steady[-1]] - ends_s[steady[0] - 1]) / len(steady)
    stage_s = dict.fromkeys(system.active, 0.0)
    for span in spans:
        if span.batch in steady:
            stage_s[span.stage] += (span.end_s - span.begin_s) / len(steady)
    busy_s = {
        role: sum(stage_s[name] for name, stage in system.active.items() if role in stage.on) for role in system.devices
    }
    joules = {role: _joules(device, workload, batch_s, busy_s.get(role, 0.0)) for role, device in devices.items()}
    return Run(
        system=system.title,
        batch_s=batch_s,
        joules_per_batch=sum(joules.values()),
        joules_by_role=joules,
        busy_s=busy_s,
        stage_s=stage_s,
        spans=spans,
        steady=steady,
    )


def _joules(device: Device, workload: Workload, batch_s: float, busy_s: float) -> float:
    busy_s = min(busy_s / device.parallelism, batch_s)
    count = 1.0
    if isinstance(device, Memory):
        count = device.num_modules(workload)
    elif isinstance(device, Compute):
        count = device.count
    elif isinstance(device, (Processor, Fabric)):
        count = workload.gpus
    return count * (device.idle_watts * batch_s + (device.busy_watts - device.idle_watts) * busy_s)


class _Machine:
    def __init__(
        self, system: System, devices: Mapping[str, Device], workload: Workload, missed_rows: float | None
    ) -> None:
        self._environment = simpy.Environment()
        self._system = system
        self._devices = devices
        self._modules = {
            role: device.num_working(workload) if isinstance(device, Memory) else float(workload.gpus)
            for role, device in devices.items()
        }
        self._queues = {
            role: DeviceQueue(self._environment, device.parallelism)
            for role, device in devices.items()
            if not _is_shared(device)
        }
        self._amounts = {name: amounts_of(stage, workload, missed_rows) for name, stage in system.active.items()}
        self._waits = {name: system.waits(name) for name in system.active}
        self._beside: dict[str, list[float]] = {role: [] for stage in system.active.values() for role in stage.beside}
        self._num_holders = dict.fromkeys(self._beside, 0)
        self._shares: dict[str, list[float]] = {role: [] for role, each in devices.items() if _is_shared(each)}
        self._sharing_changed = {role: self._environment.event() for role in (*self._beside, *self._shares)}
        self._rows_written_at: dict[str, float] = {}
        self._spans: list[Span] = []

    def run(self, batches: int) -> list[Span]:
        done_by_batch: list[dict[str, simpy.Event]] = []
        all_done: list[simpy.Event] = []
        most_under_way = self._most_under_way()
        for batch in range(batches):
            before = done_by_batch[-1] if done_by_batch else {}
            done = {name: self._environment.event() for name in self._system.active}
            all_done.append(self._environment.all_of(done.values()))
            done_by_batch.append(done)
            for name, stage in self._system.active.items():
                waits = [
                    before.get(other.removeprefix(PREVIOUS)) if other.startswith(PREVIOUS) else done[other]
                    for other in self._waits[name]
                ]
                waits += [
                    done_by_batch[batch - back].get(other)
                    for other, back in stage.after_earlier.items()
                    if batch >= back
                ]
                waits += [all_done[batch - most_under_way]] if batch >= most_under_way else []
                events = [event for event in waits if event is not None]
                self._environment.process(self._run_stage(batch, name, stage, events, done[name]))
        self._environment.run()
        return sorted(self._spans, key=lambda span: (span.begin_s, span.batch, span.stage))

    def _most_under_way(self) -> int:
        """As many as there are stages, and the batches that stages reach back, each of them once."""
        back = sum(other.startswith(PREVIOUS) for waits in self._waits.values() for other in waits)
        back += sum(sum(stage.after_earlier.values()) for stage in self._system.active.values())
        return len(self._system.active) + back

    def _run_stage(
        self, batch: int, name: str, stage: Stage, waits: list[simpy.Event], done: simpy.Event
    ) -> Generator[simpy.Event, Any, None]:
        for event in waits:  # noqa: UP028 (SimPy sends values, which a list's iterator does not take)
            yield event
        ready_s = begin_s = self._environment.now
        left_s: float | None = None
        parts: dict[str, float] = {}
        while left_s is None or left_s > 0:
            held = []
            for role in sorted(set(stage.on) - self._shares.keys()):
                yield self._queues[role].request(stage.priority)
                held.append(role)
            if left_s is None:
                begin_s = self._environment.now
                left_s, parts = self._stage_seconds(name, stage)
            slice_s = min(left_s, stage.slice_s)
            yield from self._work(slice_s, stage, parts)
            left_s -= slice_s
            for role in stage.on:
                if self._amounts[name].rows_written > 0:
                    self._rows_written_at[role] = self._environment.now
            for role in held:
                self._queues[role].give_back()
        self._spans.append(Span(batch, name, ready_s, begin_s, self._environment.now))
        done.succeed()

    def _work(self, seconds: float, stage: Stage, parts: Mapping[str, float]) -> Generator[simpy.Event, Any, None]:
        """So many seconds of a stage that holds its devices, and more where a processor, or a memory of which it needs
        `parts`, is shared."""
        held = [role for role in stage.on if role in self._beside]
        if not held and not stage.beside and not parts:
            yield self._environment.timeout(seconds)
            return
        for role in held:
            self._num_holders[role] += 1
        asked = [*((self._beside[role], part) for role, part in stage.beside.items())]
        asked += [(self._shares[role], part) for role, part in parts.items()]
        for shares, part in asked:
            shares.append(part)
        roles = (*held, *stage.beside, *parts)
        self._tell_sharing_changed(roles)
        left_s = seconds
        while left_s > 0:
            speed, began_s = self._speed(held, stage, parts), self._environment.now
            done = self._environment.timeout(left_s / speed) if speed > 0 else self._environment.event()
            yield self._environment.any_of([done, *(self._sharing_changed[role] for role in roles)])
            left_s = 0.0 if done.processed else left_s - (self._environment.now - began_s) * speed
        for role in held:
            self._num_holders[role] -= 1
        for shares, part in asked:
            shares.remove(part)
        self._tell_sharing_changed(roles)

    def _speed(self, held: Sequence[str], stage: Stage, parts: Mapping[str, float]) -> float:
        """Of its seconds a second, as things are."""
        of_held = [speed_of_holder(self._beside[role]) for role in held]
        of_others = [
            speed_beside(part, self._beside[role])
            for role, part in stage.beside.items()
            if part > 0 and self._num_holders[role] > 0
        ]
        of_shared = [speed_of_sharer(part, self._shares[role]) for role, part in parts.items()]
        return min([1.0, *of_held, *of_others, *of_shared])

    def _tell_sharing_changed(self, roles: Sequence[str]) -> None:
        for role in roles:
            changed = self._sharing_changed[role]
            self._sharing_changed[role] = self._environment.event()
            changed.succeed()

    def _stage_seconds(self, name: str, stage: Stage) -> tuple[float, dict[str, float]]:
        """And what part of them it needs each shared memory for."""
        if stage.seconds is not None:
            return stage.seconds, {}
        of_roles = {role: self._seconds(role, self._amounts[name]) for role in stage.on}
        longest_s = max(of_roles.values())
        return longest_s, {role: of_roles[role] / longest_s for role in of_roles if role in self._shares and longest_s}

    def _seconds(self, role: str, work: Amounts) -> float:
        device = self._devices[role]
        written_at = self._rows_written_at.get(role)
        window_s = device.raw_window_s if isinstance(device, Memory) else 0.0
        recently = written_at is not None and self._environment.now - written_at < window_s
        return device.seconds(work, recently_written=recently, modules=self._modules[role])


def _is_shared(device: Device) -> bool:
    return isinstance(device, Memory) and device.shared


def speed_of_sharer(part: float, parts: Sequence[float]) -> float:
    """Of who needs a part of a device that others need `parts` of as well, its own among them."""
    left = 1.0
    for number, each in enumerate(sorted(parts)):
        fair = left / (len(parts) - number)
        if each > fair:
            return min(1.0, fair / part)
        left -= each
    return 1.0


def speed_of_holder(parts: Sequence[float]) -> float:
    """Of a processor beside others: what these leave. parts: by how many seconds a second of each delays the holder."""
    return max(0.0, 1.0 - sum(part * speed_beside(part, parts) for part in parts if part > 0))


def speed_beside(part: float, parts: Sequence[float]) -> float:
    """Of one of those `parts` beside a holder. Of processor time it wants its part, and no more than all."""
    return min(1.0, _fair_share([min(1.0, each) for each in parts]) / min(1.0, part))


def _fair_share(wanted: Sequence[float]) -> float:
    """What whoever wants all of a processor gets of it beside others that want so much: as much as anybody."""
    left, sharers = 1.0, len(wanted) + 1
    for each in sorted(wanted):
        if each > left / sharers:
            break
        left, sharers = left - each, sharers - 1
    return left / sharers
