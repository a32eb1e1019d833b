"""Many trainers and many memory expanders behind a hierarchy of switches: what saturates first, and at how many.

Trainers and expanders are spread evenly over leaf switches; every leaf has a link to each of the spine switches. Tables
are spread over all expanders. A trainer's batch asks `fan_out` of them, drawn at random each time, and later updates
the same ones. A real batch asks all expanders, in small pieces; here pieces are gathered into few messages that carry
as much, so that thousands of devices take seconds. It makes queues a little longer than they are. For the same reason,
where trainers are many, nobody queues at a level (but trainers' own ports) that is busy for less than a twentieth of
the time when the tightest level is always busy.

**A message** goes through ports, links, switches and the expander. Each is a queue: first come, first served, a
message's bytes at its bandwidth. A message streams: it begins at the next one when its first bytes are there (after
`hop_s`), so on empty ways it takes the longest of its services, not their sum. Ids go to the expander and pooled
vectors come back; gradients go to the expander, and nobody waits for them. Links carry both directions at once.

**Arrivals.** "after_batch": a trainer begins its next batch `compute_s` after the vectors are there; it sends gradients
when it has computed. compute_s varies by `jitter`, a part of it to either side. "jittered": batches begin so far apart,
whether or not others are done. "poisson": at random, compute_s apart on average.

**The bound** of a level is its capacity over what a batch asks of it, if work is spread evenly; of "trainers" what they
do when they never wait (asymptotic bounds of closed networks; Denning and Buzen, ACM Computing Surveys 10(3), 1978).
Simulated throughput stays below, but for chance.

Invariant: a seed gives the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import simpy

from holdfast.errors import ConfigError
from holdfast_lab.sim.fabric import (
    LEVELS,
    Fabric,
    Level,
    Load,
    bounds_by_level,
    leaf_of_device,
)

_WARM_UP_PART = 0.25  # of the time that is simulated
_MOST_MESSAGES = 40_000
_FEWEST_BATCHES, _MOST_BATCHES = 4, 400
_LIGHT = 0.05  # busy for less than this part of the time, a queue delays hardly anybody
_MOST_TRAINERS_WITH_ALL_QUEUES = 256  # of more, messages of one batch hardly meet each other


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRun:
    """Of all trainers. batches_per_s: whose updates are done. latency: of a batch's lookups, from the first ids sent to
    the last vector there. utilisation: of each level, 0 to 1, the mean over its queues. bound_by_level: batches per
    second that each level could do, infinite where nothing goes there, and "trainers" at their own pace. saturates:
    what bounds first, a level or "trainers"."""

    fabric: Fabric
    batches_per_s: float
    mean_latency_s: float
    p99_latency_s: float
    utilisation: dict[Level, float]
    bound_by_level: dict[str, float]
    saturates: str
    latencies_s: Sequence[float] = field(repr=False)

    @property
    def bound_batches_per_s(self) -> float:
        return min(self.bound_by_level.values())


def simulate_scale(fabric: Fabric, load: Load, *, seed: int = 0, batches: int | None = None) -> ScaleRun:
    """batches: about how many of each trainer are simulated; None: as many as take seconds. Where there are fewer
    expanders than a batch asks, it asks all of them. Raises ConfigError where no batch ends in time."""
    load = replace(load, fan_out=min(load.fan_out, fabric.expanders))
    bounds = bounds_by_level(fabric, load)
    if batches is None:
        affordable = _MOST_MESSAGES // (2 * load.fan_out * fabric.trainers)
        batches = min(_MOST_BATCHES, max(_FEWEST_BATCHES, affordable))
    end_s = batches * max(fabric.trainers / min(bounds.values()), load.compute_s)
    tightest = min(bounds.values())
    has_all_queues = fabric.trainers <= _MOST_TRAINERS_WITH_ALL_QUEUES
    # Messages of one batch meet at their trainer's port, however seldom others do.
    may_be_light = () if has_all_queues else LEVELS[1:]
    light = frozenset(level for level in may_be_light if tightest < _LIGHT * bounds[level])
    network = _Network(fabric, load, seed, end_s, light)
    network.run()
    return network.result(bounds)


def sweep_trainers(
    fabric: Fabric,
    load: Load,
    trainers: Sequence[int],
    *,
    expanders_per_trainer: float | None = None,
    seed: int = 0,
    batches: int | None = None,
) -> list[ScaleRun]:
    """The same with other numbers of trainers; expanders_per_trainer: None: their number stays."""
    runs = []
    for count in trainers:
        expanders = fabric.expanders
        if expanders_per_trainer is not None:
            expanders = expanders_of(count, expanders_per_trainer)
        changed = replace(fabric, trainers=count, expanders=expanders)
        runs.append(simulate_scale(changed, load, seed=seed, batches=batches))
    return runs


def expanders_of(trainers: int, per_trainer: float) -> int:
    return max(1, round(trainers * per_trainer))


class _Queue:
    """First come, first served; nobody waits where it is light. busy_s: within the time that counts."""

    __slots__ = ("busy_s", "free_at_s", "is_light")

    def __init__(self, is_light: bool) -> None:
        self.free_at_s = 0.0
        self.busy_s = 0.0
        self.is_light = is_light


_Step = tuple[_Queue, float]  # and its service, in seconds


class _Network:
    def __init__(self, fabric: Fabric, load: Load, seed: int, end_s: float, light: frozenset[Level]) -> None:
        def queues(level: Level, count: int) -> list[_Queue]:
            return [_Queue(level in light) for _ in range(count)]

        self.environment = simpy.Environment()
        self._random = random.Random(seed)
        self._fabric, self._load, self.hop_s = fabric, load, fabric.hop_s
        self.begin_s, self.end_s = _WARM_UP_PART * end_s, end_s
        self._trainer_leaf = leaf_of_device(fabric.trainers, fabric.leaves).tolist()
        self._expander_leaf = leaf_of_device(fabric.expanders, fabric.leaves).tolist()
        self._trainer_out, self._trainer_in = (queues("trainer port", fabric.trainers) for _ in range(2))
        self._expander_out, self._expander_in = (queues("expander port", fabric.expanders) for _ in range(2))
        self._memories = queues("expander", fabric.expanders)
        self._up = [queues("leaf link", fabric.spines) for _ in range(fabric.leaves)]
        self._down = [queues("leaf link", fabric.spines) for _ in range(fabric.leaves)]
        self._spines = queues("spine", fabric.spines)
        self._latencies_s: list[float] = []
        self._ends_s: list[float] = []  # of batches, when all of their updates are done

    def run(self) -> None:
        for trainer in range(self._fabric.trainers):
            # Where all begin at once, they queue at once.
            self._after(self._random.random() * self._load.compute_s, partial(self._begin_batch, trainer))
        self.environment.run(until=self.end_s)

    def result(self, bounds: dict[str, float]) -> ScaleRun:
        if not self._latencies_s or len(set(self._ends_s)) < 2:
            raise ConfigError("no two batches began and ended in the time that was simulated; give more `batches`")
        counted_s = self.end_s - self.begin_s
        queues: dict[Level, list[_Queue]] = {
            "trainer port": self._busier(self._trainer_out, self._trainer_in),
            "leaf link": [queue for links in (*self._up, *self._down) for queue in links],
            "spine": self._spines,
            "expander port": self._busier(self._expander_out, self._expander_in),
            "expander": self._memories,
        }
        return ScaleRun(
            fabric=self._fabric,
            batches_per_s=(len(self._ends_s) - 1) / (self._ends_s[-1] - self._ends_s[0]),
            mean_latency_s=float(np.mean(self._latencies_s)),
            p99_latency_s=float(np.quantile(self._latencies_s, 0.99)),
            utilisation={
                level: float(np.mean([q.busy_s for q in found])) / counted_s for level, found in queues.items()
            },
            bound_by_level=bounds,
            saturates=min(bounds, key=lambda level: bounds[level]),
            latencies_s=tuple(self._latencies_s),
        )

    def _busier(self, one_way: list[_Queue], other_way: list[_Queue]) -> list[_Queue]:
        return max(one_way, other_way, key=lambda queues: sum(queue.busy_s for queue in queues))

    def _begin_batch(self, trainer: int) -> None:
        load = self._load
        expanders = self._random.sample(range(self._fabric.expanders), load.fan_out)
        end_lookups = partial(self._end_lookups, trainer, expanders, self.environment.now)
        self._send([self._lookup_steps(trainer, expander) for expander in expanders], end_lookups)
        if load.arrivals != "after_batch":
            self._after(self._interval_s(), partial(self._begin_batch, trainer))

    def _end_lookups(self, trainer: int, expanders: list[int], began_s: float) -> None:
        if began_s >= self.begin_s:
            self._latencies_s.append(self.environment.now - began_s)
        if self._load.arrivals == "after_batch":
            self._after(self._interval_s(), partial(self._end_batch, trainer, expanders))
        else:
            self._update(trainer, expanders)

    def _end_batch(self, trainer: int, expanders: list[int]) -> None:
        self._update(trainer, expanders)
        self._begin_batch(trainer)

    def _update(self, trainer: int, expanders: list[int]) -> None:
        self._send([self._update_steps(trainer, expander) for expander in expanders], self._end_update)

    def _end_update(self) -> None:
        if self.environment.now >= self.begin_s:
            self._ends_s.append(self.environment.now)

    def _interval_s(self) -> float:
        """Until a trainer's next batch."""
        load = self._load
        if load.arrivals == "poisson":
            return self._random.expovariate(1.0 / load.compute_s)
        return load.compute_s * (1.0 + load.jitter * (2.0 * self._random.random() - 1.0))

    def _lookup_steps(self, trainer: int, expander: int) -> list[_Step]:
        piece = 1.0 / self._load.fan_out
        return [
            *self._way_there(trainer, expander, self._load.index_bytes * piece),
            (self._memories[expander], self._load.lookup_s * piece),
            *self._way_back(trainer, expander, self._load.pooled_bytes * piece),
        ]

    def _update_steps(self, trainer: int, expander: int) -> list[_Step]:
        piece = 1.0 / self._load.fan_out
        return [
            *self._way_there(trainer, expander, self._load.pooled_bytes * piece),
            (self._memories[expander], self._load.update_s * piece),
        ]

    def _way_there(self, trainer: int, expander: int, size_bytes: float) -> list[_Step]:
        port_s = size_bytes / self._fabric.port_bytes_per_s
        between = self._between(self._trainer_leaf[trainer], self._expander_leaf[expander], size_bytes)
        return [(self._trainer_out[trainer], port_s), *between, (self._expander_in[expander], port_s)]

    def _way_back(self, trainer: int, expander: int, size_bytes: float) -> list[_Step]:
        port_s = size_bytes / self._fabric.port_bytes_per_s
        between = self._between(self._expander_leaf[expander], self._trainer_leaf[trainer], size_bytes)
        return [(self._expander_out[expander], port_s), *between, (self._trainer_in[trainer], port_s)]

    def _between(self, leaf: int, other: int, size_bytes: float) -> list[_Step]:
        if leaf == other:
            return []
        spine = int(self._random.random() * self._fabric.spines)
        link_s = size_bytes / self._fabric.leaf_link_bytes_per_s
        return [
            (self._up[leaf][spine], link_s),
            (self._spines[spine], size_bytes / self._fabric.spine_bytes_per_s),
            (self._down[other][spine], link_s),
        ]

    def _send(self, messages: list[list[_Step]], all_arrived: Callable[[], None]) -> None:
        left = len(messages)

        def one_arrived(_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                all_arrived()

        for steps in messages:
            _Message(self, steps, one_arrived).go()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.environment.timeout(seconds).callbacks.append(lambda _: act())


class _Message:
    """Its head goes from queue to queue; its tail is where the slowest of them lets it be."""

    __slots__ = ("_arrived", "_network", "_number", "_steps", "_tail_s")

    def __init__(self, network: _Network, steps: list[_Step], arrived: Callable[[object], None]) -> None:
        self._network, self._steps, self._arrived = network, steps, arrived
        self._number = 0
        self._tail_s = 0.0

    def go(self, _: object = None) -> None:
        """Into the next queue, through the light ones behind it, and to the one after those, or to the end."""
        network, steps = self._network, self._steps
        now_s = head_s = network.environment.now
        hop_s, begin_s, end_s = network.hop_s, network.begin_s, network.end_s
        is_first = True
        while self._number < len(steps):
            queue, service_s = steps[self._number]
            if not (is_first or queue.is_light):
                break
            served_s = head_s
            if not queue.is_light:
                served_s = max(head_s, queue.free_at_s)
                queue.free_at_s = served_s + service_s
            done_s = served_s + service_s
            if done_s > begin_s and served_s < end_s:
                queue.busy_s += min(done_s, end_s) - max(served_s, begin_s)
            self._tail_s = max(self._tail_s, done_s) + hop_s
            head_s = served_s + hop_s
            self._number += 1
            is_first = False
        if self._number < len(steps):
            network.environment.timeout(head_s - now_s).callbacks.append(self.go)
        else:
            network.environment.timeout(self._tail_s - now_s).callbacks.append(self._arrived)
