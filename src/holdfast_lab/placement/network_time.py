"""How long the network of a run takes on this machine, and the reading of its batches: a few seconds of the real thing.

The network's forward, backward and optimizer run on batches of the run's own data, with random numbers for the rows,
and with caches that hold something else before each step, as the verbs on rows leave them. Half of the time a thread
beside it keeps one CPU busy for a part of the time, as background work of a pool does, and what that costs the network
is measured, too. Where all CPUs are in use, that is about a second for each second of CPU, because the threads of a
parallel region wait for the one that was displaced; where some are idle, next to nothing. The work comes in pieces of a
fraction of a millisecond, which also cost waking up: a second of them may cost more than one.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from holdfast.data.batch import Batch
from holdfast.data.source import Source
from holdfast.rows.row_access import LookedUp
from holdfast.run.assembly import make_network, seed_generators
from holdfast.run.sections import RunConfig
from holdfast.train.batches import make_loader
from holdfast_lab.placement.cold_caches import OtherWork

_NUM_BATCHES = 6
_NUM_READ, _READING_S = 64, 2.0  # batches that are read to tell what reading costs, in so long at most
_ROUNDS = 6  # each with and without work beside it
_ROUND_S = 0.5
_MIN_STEPS = 3
_BUSY_BYTES = 1 << 20  # that are summed without a pause
_IDLE_SHARE = 0.7  # of the thread beside the network


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTime:
    """Seconds a step. network_s: forward, backward and optimizer of the dense part, alone on the machine. displaced: by
    how much a step gets longer for each second of CPU that other threads use meanwhile. reading_s: CPU of the loader's
    threads for a batch, before it is planned. Raises ValueError that names the field."""

    network_s: float
    displaced: float
    reading_s: float

    def __post_init__(self) -> None:
        for field in ("network_s", "displaced", "reading_s"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0.0):
                raise ValueError(f"{field} = {getattr(self, field)}; it must be 0 or more")

    def displaced_by(self, what: str) -> float:
        """The same for what a thread does there, as StepCosts.cpu names it. The loader plans a batch in one piece: it
        shares a CPU evenly with the network's threads meanwhile, and so costs a step what it takes, at most."""
        return min(1.0, self.displaced) if what == "plan" else self.displaced


def time_network(config: RunConfig, source: Source) -> NetworkTime:
    """Measures it with this process's threads. Raises what the source and the model raise."""
    batches, reading_s = _read(config, source)
    seed_generators(config.train.seed)
    step = _stepper(config, source, batches)
    step()
    others = OtherWork()
    alone: list[float] = []
    displaced: list[float] = []
    for _ in range(_ROUNDS):
        seconds, _ = _time(step, others, lambda: 0.0)
        alone.append(seconds)
        with _work_beside() as cpu_seconds:
            longer_s, busy_s = _time(step, others, cpu_seconds)
        displaced.append(max(0.0, longer_s - seconds) / busy_s if busy_s else 0.0)
    return NetworkTime(network_s=statistics.median(alone), displaced=statistics.median(displaced), reading_s=reading_s)


def _read(config: RunConfig, source: Source) -> tuple[list[Batch], float]:
    """The first batches, and the CPU time of one. The first half of what is read counts for nothing: it opens files
    and touches memory for the first time."""
    marks: dict[int, list[float]] = {}

    def note(_: Batch) -> None:
        marks.setdefault(threading.get_ident(), []).append(time.thread_time())

    begin = time.monotonic()
    with make_loader(source, config.train, note) as loader:
        batches = [next(loader)[0] for _ in range(_NUM_BATCHES)]
        for _ in range(_NUM_READ - _NUM_BATCHES):
            if time.monotonic() - begin > _READING_S:
                break
            next(loader)
    spans = [later - earlier for times in marks.values() for earlier, later in pairwise(times[len(times) // 2 :])]
    return batches, statistics.mean(spans) if spans else 0.0


def _network(config: RunConfig, source: Source) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The run's, without tables."""
    model = make_network(config, source)
    return model, config.optimizer.make(list(model.parameters()))


def _stepper(config: RunConfig, source: Source, batches: list[Batch]) -> Callable[[], None]:
    """What trains the network on the next of the batches."""
    model, optimizer = _network(config, source)
    loss_of = nn.BCEWithLogitsLoss()
    width = len(source.features) * config.embedding.dim
    pooled = 0.01 * torch.randn(config.train.batch_size, width)
    number = 0

    def step() -> None:
        nonlocal number
        batch = batches[number % len(batches)]
        number += 1
        rows: Tensor = pooled.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=config.train.bf16):
            logits = model(batch.dense, LookedUp(rows))
        loss = loss_of(logits.float(), batch.labels)
        float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _time(step: Callable[[], None], others: OtherWork, cpu_seconds: Callable[[], float]) -> tuple[float, float]:
    """Of a step, the mean of a round: its seconds, and those of CPU that are used beside it meanwhile."""
    count, seconds, busy_s = 0, 0.0, 0.0
    until = time.perf_counter() + _ROUND_S
    while time.perf_counter() < until or count < _MIN_STEPS:
        others.fill_caches()
        busy_before, begin = cpu_seconds(), time.perf_counter()
        step()
        seconds += time.perf_counter() - begin
        busy_s += cpu_seconds() - busy_before
        count += 1
    return seconds / count, busy_s / count


@contextmanager
def _work_beside() -> Iterator[Callable[[], float]]:
    """A thread that computes for a part of the time; gives what tells its CPU seconds so far."""
    stop = threading.Event()
    data = bytes(_BUSY_BYTES)
    spent = 0.0

    def work() -> None:
        nonlocal spent
        while not stop.is_set():
            begin = time.thread_time()
            zlib.crc32(data)  # lets go of the interpreter's lock
            busy = time.thread_time() - begin
            spent += busy
            stop.wait(busy * _IDLE_SHARE / (1 - _IDLE_SHARE))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield lambda: spent
    finally:
        stop.set()
        thread.join()
