"""What an all-to-all costs in processor time, whoever else is on the machine: of a byte, of a message, of the call.

    cd benchmarks && python -m scaleout.sockets

Processes on `lo`, so without a network card and its driver; a byte is sent and received, which counts as two.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import sys
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import numpy as np

_COUNTS = (2, 4, 8)
_WORDS = (0, 1 << 10, 1 << 14, 1 << 17)  # of four bytes, from each rank to each
_OPERATIONS = 60


def measure() -> dict[str, float]:
    """Seconds: byte_s (at either end), message_s (both ends), call_s (of a rank)."""
    rows, seconds = [], []
    context = multiprocessing.get_context("spawn")
    for count in _COUNTS:
        port, queue = random.randrange(20_000, 40_000), context.Queue()
        ranks = [context.Process(target=_rank, args=(rank, count, port, queue)) for rank in range(count)]
        for process in ranks:
            process.start()
        found = [queue.get(timeout=120) for _ in ranks]
        for process in ranks:
            process.join()
        for words, *of_ranks in zip(_WORDS, *found, strict=True):
            messages = count * (count - 1)
            rows.append((2.0 * 4 * words * messages, messages, count))
            seconds.append(sum(of_ranks))
    # Each case as its own unit, so that the large ones do not hide the small ones.
    weights = 1 / np.array(seconds)
    solved = np.linalg.lstsq(np.array(rows, np.float64) * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    return dict(zip(("byte_s", "message_s", "call_s"), map(float, np.maximum(solved, 0.0)), strict=True))


def _rank(rank: int, count: int, port: int, queue: Queue[Any]) -> None:
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, count, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    found = []
    for words in _WORDS:
        sent, received, splits = torch.zeros(words * count), torch.empty(words * count), [words] * count
        before = 0.0
        for operation in range(-10, _OPERATIONS):
            if operation == 0:
                before = _busy()
            dist.all_to_all_single(received, sent, splits, splits, async_op=True).wait()
        found.append((_busy() - before) / _OPERATIONS)
    queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _busy() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
    print()
