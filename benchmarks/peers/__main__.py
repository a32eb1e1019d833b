"""``python -m peers --shape kaggle --system fbgemm``, from benchmarks/: measures one peer, prints one JSON object."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# What a peer needs from the process, set before torch is loaded; README.md says what each is worth.
_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",  # PyTorch: transparent huge pages under large tensors, hence under the tables
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("--shape", required=True, choices=["kaggle", "rm1", "rm3"])
    parser.add_argument("--system", required=True, choices=["fbgemm", "torchrec", "embeddingbag"])
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=["rowwise_adagrad", "sgd"])
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast around the model; tables stay fp32")
    parser.add_argument("--checkpoint", default="none", choices=["none", "torch_save", "dcp_async"])
    parser.add_argument("--every", type=int, default=100, help="steps from checkpoint to checkpoint")
    parser.add_argument("--checkpoint-dir", type=Path, help="default: a temporary directory under runs/")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batches", type=int, default=50, help="distinct batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait-policy", default="unset", choices=["passive", "active", "unset"], help="of OpenMP")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from peers.batches import make_batches
    from peers.measure import Training, make_model, time_checkpoints, time_embeddings, time_steps
    from peers.shapes import SHAPES
    from peers.systems import SYSTEMS, fill_tables

    torch.set_num_threads(arguments.threads)
    shape = SHAPES[arguments.shape]
    tables = SYSTEMS[arguments.system](shape, arguments.optimizer)
    fill_tables(tables, shape)
    training = Training(make_model(shape, tables), tables, make_batches(shape, arguments.batches), bf16=arguments.bf16)
    result: dict[str, Any] = {"optimizer_label": tables.optimizer_label}
    result |= time_steps(training, steps=arguments.steps, warmup=arguments.warmup)
    if arguments.checkpoint == "none":
        result |= time_embeddings(training, steps=arguments.steps, warmup=arguments.warmup)
    else:
        runs = Path(__file__).parents[2] / "runs"
        runs.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=arguments.checkpoint_dir or runs, prefix="peers-") as directory:
            result["checkpoint"] = time_checkpoints(
                training,
                kind=arguments.checkpoint,
                every=arguments.every,
                steps=arguments.steps,
                directory=Path(directory),
            )
    medians = {name: statistics.median(times) for name, times in result.items() if name.endswith("_ms") and times}
    return result | {"median": medians}


def _versions() -> dict[str, str]:
    packages = ("torch", "fbgemm_gpu-cpu", "torchrec", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    arguments = _arguments()
    environment = _ENVIRONMENT | {"OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.wait_policy != "unset":
        environment["OMP_WAIT_POLICY"] = arguments.wait_policy
    os.environ.update(environment)
    # Libraries write to standard output as they please: it becomes standard error, and the JSON alone goes out.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = _measure(arguments)
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    result = {
        "config": config,
        "versions": _versions(),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "environment": environment,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | result
    json.dump(result, output)
    output.write("\n")
    output.flush()


if __name__ == "__main__":
    sys.exit(main())
