"""``python -m keys.steps --shape rm1``, from benchmarks/: a step with keys over the same step with row numbers.

All pools are open in one process, and their steps are taken in turns: what else the machine does meanwhile, it does to
both. A ratio is the median over rounds of what one step took over the other of its round. ``ttl`` is a run that
leaves keys behind as fast as they come: its 99th percentile over its median.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast.state.reproducibility import prepare_environment

prepare_environment()

MODES: dict[str, dict[str, Any]] = {
    "fixed": {"keys": False},
    "keyed": {"keys": True},
    "fixed_new": {"keys": False, "new_share": 0.1},
    "keyed_new": {"keys": True, "new_share": 0.1},
    "ttl": {"keys": True, "new_share": 0.1, "ttl_steps": 20},
}
PAIRS = (("keyed", "fixed"), ("keyed_new", "fixed_new"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m keys.steps", description=__doc__)
    parser.add_argument("--shape", default="rm1", choices=["kaggle", "rm1", "rm3"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()

    import torch

    from ours.measure import Training
    from ours.systems import Reopened
    from peers.batches import make_batches
    from peers.shapes import SHAPES

    torch.set_num_threads(2)
    shape = SHAPES[arguments.shape]
    modes = arguments.modes.split(",")
    batches = make_batches(shape, arguments.warmup + arguments.steps)
    directory = Path(tempfile.mkdtemp(dir=arguments.medium, prefix="holdfast-keys-"))
    step_ms: dict[str, list[float]] = {mode: [] for mode in modes}
    plan_ms: dict[str, list[float]] = {mode: [] for mode in modes}
    try:
        systems = {mode: Reopened(shape, "rowwise_adagrad", directory / mode, batches, **MODES[mode]) for mode in modes}
        for system in systems.values():
            system.fill(shape)
        trainings = {mode: Training(system, shape, batches, bf16=False) for mode, system in systems.items()}
        for number in range(arguments.warmup + arguments.steps):
            for mode in modes if number % 2 else reversed(modes):
                began = time.perf_counter()
                verbs = trainings[mode].step()
                if number >= arguments.warmup:
                    step_ms[mode].append((time.perf_counter() - began) * 1e3)
                    plan_ms[mode].append(verbs["plan"])
        for system in systems.values():
            system.close()
    finally:
        shutil.rmtree(directory)
    found: dict[str, Any] = {"shape": arguments.shape}
    for mode, times in step_ms.items():
        found[mode] = {
            "median_ms": round(statistics.median(times), 2),
            "lowest_eighth_ms": round(statistics.quantiles(times, n=8)[0], 2),
            "plan_ms": round(statistics.median(plan_ms[mode]), 2),
            "p99_over_median": round(sorted(times)[int(len(times) * 0.99) - 1] / statistics.median(times), 3),
        }
    for keyed, fixed in PAIRS:
        if keyed in step_ms and fixed in step_ms:
            ratios = [a / b for a, b in zip(step_ms[keyed], step_ms[fixed], strict=True)]
            found[f"{keyed} over {fixed}"] = round(statistics.median(ratios), 3)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
