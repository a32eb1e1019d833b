"""``python -m peers --shape kaggle --system fbgemm``, from benchmarks/: measures one peer, prints one JSON object."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peers.process import report


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


def main() -> None:
    report(_arguments(), _measure)


if __name__ == "__main__":
    main()
