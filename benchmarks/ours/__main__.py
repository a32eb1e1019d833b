"""``python -m ours --shape kaggle --mode committed``, from benchmarks/: measures one mode, prints one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_DENSE_INTERVALS = {"committed": 1, "relaxed_10": 10, "relaxed_100": 100, "checksummed": 1}
_REOPENED: dict[str, dict[str, Any]] = {
    "fixed": {"keys": False},
    "fixed_new": {"keys": False, "new_share": 0.1},
    "keyed": {"keys": True},
    "keyed_new": {"keys": True, "new_share": 0.1},
    "keyed_ttl": {"keys": True, "new_share": 0.1, "ttl_steps": 20},
}
_LOGS = {"bare": None, "redo_sync": "redo", "undo_sync": "undo"}
_OTHER_MODES = ("opened", "memory", "recovery_fill", "recovery_open")
_LIBRARY = Path(__file__).parents[2] / "build/bench/libbare.so"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ours", description=__doc__)
    parser.add_argument("--shape", default="kaggle", choices=["kaggle", "rm1", "rm3"])
    parser.add_argument("--mode", default="committed", choices=[*_DENSE_INTERVALS, *_REOPENED, *_LOGS, *_OTHER_MODES])
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=["rowwise_adagrad", "sgd"])
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast around the model; tables stay fp32")
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"), help="where the pool is made (recovery: is)")
    parser.add_argument("--dense-interval", type=int, default=1, help="of the recovery modes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batches", type=int, default=50, help="distinct batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait-policy", default="unset", choices=["passive", "active", "unset"], help="of OpenMP")
    parser.add_argument("--no-embeddings", action="store_true", help="whole steps only")
    parser.add_argument("--digest", action="store_true", help="also SHA-256 of all rows at the end")
    parser.add_argument("--bare-library", type=Path, default=_LIBRARY)
    return parser.parse_args()


def _measure_steps(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from ours.measure import Training, time_embeddings, time_steps
    from ours.systems import Bare, Holdfast, Reopened, rows_digest
    from peers.batches import make_batches
    from peers.shapes import SHAPES

    shape = SHAPES[arguments.shape]
    batches = make_batches(shape, arguments.batches)
    system: Bare | Holdfast
    if arguments.mode in _LOGS:
        system = Bare(
            shape,
            arguments.optimizer,
            directory,
            batches,
            library=arguments.bare_library,
            num_threads=arguments.threads,
            dense_bytes=64 << 20,
            log=_LOGS[arguments.mode],
        )
    elif arguments.mode in _REOPENED:
        system = Reopened(shape, arguments.optimizer, directory, batches, **_REOPENED[arguments.mode])
    else:
        system = Holdfast(
            shape,
            arguments.optimizer,
            directory,
            batches,
            dense_interval=_DENSE_INTERVALS[arguments.mode],
            row_checksums=arguments.mode == "checksummed",
        )
    system.fill(shape)
    training = Training(system, shape, batches, bf16=arguments.bf16)
    result = time_steps(training, steps=arguments.steps, warmup=arguments.warmup)
    result["system"] = system.facts()
    if not arguments.no_embeddings:
        result |= time_embeddings(training, shape, steps=arguments.steps, warmup=arguments.warmup)
    system.close()
    if arguments.digest:
        result["rows_sha256"] = rows_digest(system)
    return result | {"median": _medians(result)}


def _medians(result: dict[str, Any]) -> dict[str, Any]:
    medians: dict[str, Any] = {}
    for name, times in result.items():
        if name.endswith("_ms") and isinstance(times, dict):
            medians[name] = {verb: statistics.median(of_verb) for verb, of_verb in times.items() if of_verb}
        elif name.endswith("_ms") and times:
            medians[name] = statistics.median(times)
    return medians


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from holdfast import _core

    torch.set_num_threads(arguments.threads)
    _core.set_num_threads(arguments.threads)
    from ours import memory, opened, recovery
    from peers.shapes import SHAPES

    if arguments.mode == "recovery_fill":
        return recovery.fill(arguments.medium, arguments.dense_interval)
    if arguments.mode == "recovery_open":
        return recovery.open_again(arguments.medium, arguments.dense_interval)
    directory = Path(tempfile.mkdtemp(dir=arguments.medium, prefix="holdfast-bench-"))
    try:
        if arguments.mode == "memory":
            return memory.measure(arguments.shape, arguments.optimizer, directory, arguments.steps, arguments.batches)
        if arguments.mode == "opened":
            shape, steps = SHAPES[arguments.shape], arguments.steps
            opened_again = opened.measure(
                shape, arguments.optimizer, directory, steps=steps, num_batches=arguments.batches
            )
            return opened_again | {"median": _medians(opened_again)}
        return _measure_steps(arguments, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _versions() -> dict[str, str]:
    import numpy as np
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def main() -> None:
    arguments = _arguments()
    environment = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.wait_policy != "unset":
        environment["OMP_WAIT_POLICY"] = arguments.wait_policy
    os.environ.update(environment)
    from holdfast.state.reproducibility import (
        prepare_environment,  # holdfast/__init__ loads torch, which reads these later
    )

    prepare_environment()
    environment["MKL_CBWR"] = os.environ.get("MKL_CBWR", "")
    output = os.fdopen(os.dup(1), "w")  # the JSON alone goes out
    os.dup2(2, 1)
    result = _measure(arguments)
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    result = {
        "config": config,
        "versions": _versions(),
        "environment": environment,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | result
    json.dump(result, output)
    output.write("\n")
    output.flush()
    if arguments.mode == "recovery_fill":
        os.kill(os.getpid(), signal.SIGKILL)  # recovery is for what a crash leaves


if __name__ == "__main__":
    main()
