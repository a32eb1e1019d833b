"""How long a device takes, by its own clock; on the processor by the host's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from holdfast.device.graphs import CudaRecorder
from holdfast.device.queues import current_queue

Work = Callable[[], None]


def seconds_of(device: torch.device, works: Sequence[Work], rounds: int) -> float:
    """Of one of `works`, started from Python one after the other: the median over rounds, after a round that does not
    count. So what the host needs to start them is in it, where that is more than the device needs to do them."""
    return _median_round(device, lambda: _run(works), rounds) / len(works)


def recorded_seconds_of(device: torch.device, works: Sequence[Work], rounds: int) -> float:
    """The same, of the device alone: replayed as one CUDA graph. `works` must not wait for the device."""
    if device.type != "cuda":
        return seconds_of(device, works, rounds)
    recorder = CudaRecorder(device)
    recorder.warm_up(lambda: _run(works))
    return _median_round(device, recorder.record(lambda: _run(works)), rounds) / len(works)


def _run(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _median_round(device: torch.device, one_round: Work, rounds: int) -> float:
    one_round()
    queue = current_queue(device)
    marks = [queue.mark(timed=True)]
    for _ in range(rounds):
        one_round()
        marks.append(queue.mark(timed=True))
    marks[-1].wait()
    return statistics.median(after.seconds_since(before) for before, after in pairwise(marks))
