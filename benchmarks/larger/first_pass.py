"""``python -m larger.first_pass``, from benchmarks/: a hundred gigabytes of tables whose rows nobody has touched yet.

Trains over new tables (20 of 20 million rows, dim 64, Zipf 1.05, by default), so that most of the rows that a batch
wants were never written before, and says how long steps took: the mean, the median and the slowest, since that is where
a merge is felt. The disk holds what was touched, not what the tables are. Prints one JSON object.

    python -m larger.first_pass --steps 1500                 # trains a new pool, and stops
    python -m larger.first_pass --steps 1500 --kill          # ... and is killed instead
    python -m larger.first_pass --steps 100 --again          # opens the pool that is there, and goes on
    python -m larger.first_pass --steps 100 --system dram    # rows in DRAM: what a step costs at least
    python -m larger.first_pass --steps 100 --system rocksdb --memory-limit 4294967296
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from larger.memory_limit import MemoryLimit
from larger.one import make_system, prepare_process

if TYPE_CHECKING:
    from larger.systems import Step, System
    from larger.workload import Workload

_ROOT = Path(__file__).parents[2]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m larger.first_pass", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=20_000_000, help="of a table")
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--scratchpad-bytes", type=int, default=2 << 30)
    parser.add_argument("--log-bytes", type=int, default=1 << 30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--disk",
        type=Path,
        default=_ROOT / "runs",
        help="on the disk: DISK/first_pass is the pool's",
    )
    parser.add_argument("--slowest", type=int, default=3, help="steps of which it says where their time went")
    parser.add_argument("--again", action="store_true", help="go on with the pool that is there")
    parser.add_argument("--kill", action="store_true", help="end by SIGKILL; the pool stays")
    parser.add_argument("--keep", action="store_true", help="the pool stays")
    parser.add_argument(
        "--system",
        choices=["look_forward", "dram", "mmap", "rocksdb"],
        default="look_forward",
        help="holdfast's log store; its pool in DRAM, with nothing on the disk; an outsider's files",
    )
    parser.add_argument("--memory-limit", type=int, default=0, help="bytes of a memory control group; 0: none")
    return parser.parse_args()


def _workload(given: argparse.Namespace) -> Workload:
    from larger.workload import Workload
    from peers.shapes import Shape

    shape = Shape(
        name="first_pass",
        num_tables=given.tables,
        num_embeddings=given.rows,
        embedding_dim=given.dim,
        lookups_per_bag=1,
        batch_size=given.batch_size,
        num_dense=13,
        bottom=(256, given.dim),
        top=(256, 1),
    )
    return Workload(name="first_pass", shape=shape, zipf=given.zipf)


def _train(given: argparse.Namespace, system: System) -> dict[str, Any]:
    times: list[float] = []
    steps: list[Step] = []
    first = time.perf_counter()
    for _ in range(given.steps):
        began = time.perf_counter()
        steps.append(system.step())
        times.append(1000 * (time.perf_counter() - began))
    seconds = time.perf_counter() - first
    ranked = sorted(times)
    by_time = sorted(range(given.steps), key=times.__getitem__, reverse=True)
    median = statistics.median(times)
    return {
        "steps": given.steps,
        "samples_per_s": round(given.steps * given.batch_size / seconds),
        "first_step_ms": round(times[0], 1),
        "mean_ms": round(statistics.fmean(times), 2),
        "median_ms": round(median, 2),
        "p99_over_median": round(ranked[int(0.99 * len(ranked))] / median, 2),
        "worst_over_median": round(ranked[-1] / median, 2),
        "worst_ms": round(ranked[-1], 1),
        "slowest": [_told(number, times[number], steps[number]) for number in by_time[: given.slowest]],
    }


def _told(number: int, ms: float, step: Step) -> dict[str, Any]:
    """Where a step's time went: its stages one after the other, and what ended beside it."""
    return {
        "step": number,
        "ms": round(ms, 1),
        "stages": {stage: round(of_stage, 1) for stage, of_stage in step.stage_ms.items()},
        "beside": {stage: round(of_stage, 1) for stage, of_stage in step.background_ms.items()},
    }


def _on_disk(directory: Path) -> int:
    """Bytes that a directory takes, of files with holes what is there."""
    told = subprocess.run(["du", "-s", "--block-size=1", directory], capture_output=True, check=True)
    return int(told.stdout.split()[0])


def _traffic(system: System) -> dict[str, Any]:
    traffic = system.traffic()
    if not traffic:
        return {}
    written = traffic["appended_bytes"] + traffic["home_bytes_written"]
    return {
        "merges": traffic["merges"],
        "written_over_updated": round(written / max(1, traffic["updated_row_bytes"]), 2),
        "home_requests_per_merge": round(traffic["merge_writes"] / max(1, traffic["merges"])),
        "log_stall_s": round(traffic["log_stall_seconds"], 2),
        "fetch_stall_s": round(traffic["stall_seconds"], 2),
        "index_mb": round(traffic["index_bytes"] / 1e6, 1),
        "traffic": traffic,
    }


def main() -> None:
    given = _arguments()
    output = sys.stdout
    sys.stdout = sys.stderr
    prepare_process(given.threads)
    from larger.systems import Settings
    from larger.workload import FileOfBatches, write_ids

    workload = _workload(given)
    in_memory = given.system == "dram"
    medium = (Path("/dev/shm") if in_memory else given.disk) / "first_pass"  # which is removed
    ids, directory = medium / "ids", medium / "pool"
    if not given.again:
        shutil.rmtree(medium, ignore_errors=True)
        directory.mkdir(parents=True)
        write_ids(workload, ids, given.steps + 16)
    source = FileOfBatches(workload, ids)
    settings = Settings(
        directory=directory,
        scratchpad_bytes=given.scratchpad_bytes,
        log_bytes=given.log_bytes,
        window=8,
        new_tables=True,
    )
    limit = MemoryLimit(given.memory_limit) if given.memory_limit else None
    began = time.perf_counter()
    system = make_system(given.system, workload, source, settings)
    opened_s = time.perf_counter() - began
    result = {"system": given.system, "opening_s": round(opened_s, 2)} | _train(given, system)
    result |= _traffic(system) | {"on_disk_mb": round(_on_disk(directory) / 1e6)}
    if limit:
        result["memory"] = limit.facts()
    if given.kill:
        print(json.dumps(result), file=output, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    system.close()
    result["stopping_s"] = round(time.perf_counter() - began, 2)
    if limit:
        limit.leave()
    if in_memory or not given.keep:
        shutil.rmtree(medium)
    print(json.dumps(result), file=output)


if __name__ == "__main__":
    main()
