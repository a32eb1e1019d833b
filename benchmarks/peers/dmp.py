"""``python -m peers.dmp --shape rm1 --ranks 2``, from benchmarks/: TorchRec's DistributedModelParallel on this machine.

Starts its ranks itself, each pinned to one core, and prints one JSON object. ``step_ms`` are rank 0's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from peers.process import report

_TIMEOUT = timedelta(minutes=5)  # of a collective: the others have failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers.dmp", description=__doc__)
    parser.add_argument("--shape", required=True, choices=["kaggle", "rm1", "rm3"])
    parser.add_argument("--ranks", type=int, default=2, help="rank r is pinned to the r-th core that may be used")
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=["rowwise_adagrad", "sgd"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batches", type=int, default=50, help="distinct batches")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--wait-policy", default="unset", choices=["passive", "active", "unset"], help="of OpenMP")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from peers.shapes import SHAPES

    shape = SHAPES[arguments.shape]
    if arguments.ranks < 1 or shape.batch_size % arguments.ranks:
        raise SystemExit(f"--ranks must divide the batch of {shape.batch_size} evenly, not {arguments.ranks}")
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        _run_ranks(arguments, Path(directory))
        result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
    mean_ms = statistics.mean(result["step_ms"])
    return result | {
        "median": {"step_ms": statistics.median(result["step_ms"])},
        "mean": {"step_ms": mean_ms},
        "samples_per_s": shape.batch_size / mean_ms * 1e3,
    }


def _run_ranks(arguments: argparse.Namespace, directory: Path) -> None:
    """Returns when all ranks have ended well; ends the others, and this process, when one has not."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, arguments, directory)) for rank in range(arguments.ranks)]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)  # type: ignore[arg-type]
            ended.join()
            if ended.exitcode != 0:
                for other in running.values():
                    other.terminate()
                    other.join()
                sys.exit(f"rank {ranks.index(ended)} ended with exit status {ended.exitcode}; its error is above")


def _rank(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # before torch starts a thread

    import torch
    from torch import distributed as dist

    from peers.batches import make_batches
    from peers.measure import Training, make_model, time_steps
    from peers.shapes import SHAPES
    from peers.sharded import ShardedTables, mean_over_ranks, parallel, part_of
    from scaleout.wire import traffic

    torch.set_num_threads(arguments.threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=arguments.ranks, timeout=_TIMEOUT
    )
    shape = SHAPES[arguments.shape]
    tables = ShardedTables(shape, arguments.optimizer)
    network = make_model(shape, tables)
    model = parallel(network, tables, shape)
    batches = [part_of(batch, shape) for batch in make_batches(shape, arguments.batches)]
    training = Training(network, tables, batches, bf16=False, model=model)
    dist.barrier()
    before = traffic()
    result = time_steps(training, steps=arguments.steps, warmup=arguments.warmup)
    dist.barrier()
    wire = traffic() - before
    for name in ("first_loss", "last_loss"):
        result[name] = mean_over_ranks(result[name])
    result |= {
        "optimizer_label": tables.optimizer_label,
        # of all that used this interface meanwhile: scaleout.wire.alone
        "lo_bytes_per_step": wire.sent_bytes / training.num_steps,
        "lo_packets_per_step": wire.sent_packets / training.num_steps,
    }
    if rank == 0:
        (directory / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    report(_arguments(), _measure, GLOO_SOCKET_IFNAME="lo")


if __name__ == "__main__":
    main()
