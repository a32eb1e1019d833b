"""``python -m keys.peers``, from benchmarks/: a step with keys, against what TorchRec and plain PyTorch have for them.

All train the same batches, of which a tenth of the different keys are new. The peers get what is best for them:
TorchRec's managed collision modules remap the keys, and FBGEMM's fused operator reads the rows; a Python dict maps keys
to rows of nn.EmbeddingBag with sparse gradients. Neither commits anything. holdfast's step is a durable one, and
its tables hold a million keys before the first. ``--system`` measures one peer, with the peers' Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.process import report

if TYPE_CHECKING:
    from torch import Tensor


_FOLDER = Path(__file__).parents[1]
_PEERS = _FOLDER.parent / ".venv-peers" / "bin" / "python"
_SYSTEMS = ("managed_collisions", "dict")
_NEW_SHARE = 0.1
BAR = 5.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m keys.peers", description=__doc__)
    parser.add_argument("--shape", default="rm1", choices=["kaggle", "rm1", "rm3"])
    parser.add_argument("--system", choices=_SYSTEMS)
    parser.add_argument("--peers-python", type=Path, default=_PEERS)
    parser.add_argument("--eviction-interval", type=int, default=10, help="steps, of the managed collision modules")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=20, help="steps that bring most of the keys that are not new")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait-policy", default="unset", choices=["passive", "active", "unset"], help="of OpenMP")
    return parser.parse_args()


def _measure_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from peers.batches import SCATTER, make_batches, with_new_ids
    from peers.measure import Training, make_model, time_steps
    from peers.shapes import SHAPES
    from peers.systems import EmbeddingBagTables, FbgemmTables, fill_tables, torchrec_configs

    torch.set_num_threads(arguments.threads)
    shape = SHAPES[arguments.shape]
    batches = [
        replace(batch, ids=with_new_ids(shape, batch, number, _NEW_SHARE) * SCATTER)
        for number, batch in enumerate(make_batches(shape, arguments.warmup + arguments.steps))
    ]

    class ManagedCollisions(FbgemmTables):
        def __init__(self) -> None:
            super().__init__(shape, "rowwise_adagrad")
            from torchrec.modules.mc_modules import (
                DistanceLFU_EvictionPolicy,
                ManagedCollisionCollection,
                MCHManagedCollisionModule,
            )
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

            self._names = [f"f{number}" for number in range(shape.num_tables)]
            self._keyed_jagged_tensor: Any = KeyedJaggedTensor
            modules = {
                f"t{number}": MCHManagedCollisionModule(
                    zch_size=shape.num_embeddings,
                    device=torch.device("cpu"),
                    eviction_policy=DistanceLFU_EvictionPolicy(),
                    eviction_interval=arguments.eviction_interval,
                )
                for number in range(shape.num_tables)
            }
            self.collisions = ManagedCollisionCollection(modules, torchrec_configs(shape))

        def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
            keys, offsets = sparse
            features = self._keyed_jagged_tensor.from_offsets_sync(keys=self._names, values=keys, offsets=offsets)
            remapped = self.collisions(features)
            self.collisions.evict()
            return super().forward((remapped.values().to(torch.int64), offsets))

    class Dict(EmbeddingBagTables):
        def __init__(self) -> None:
            super().__init__(shape, "rowwise_adagrad")
            self._row_of: list[dict[int, int]] = [{} for _ in range(shape.num_tables)]

        def forward(self, sparse: list[tuple[Tensor, Tensor]]) -> Tensor:
            rows = []
            for (keys, offsets), row_of in zip(sparse, self._row_of, strict=True):
                found = [row_of.setdefault(key, len(row_of)) for key in keys.tolist()]
                rows.append((torch.tensor(found), offsets))
            return super().forward(rows)

    tables = ManagedCollisions() if arguments.system == "managed_collisions" else Dict()
    fill_tables(tables, shape)
    training = Training(make_model(shape, tables), tables, batches, bf16=False)
    return time_steps(training, steps=arguments.steps, warmup=arguments.warmup)


def _run(python: Path | str, *arguments: str) -> list[float]:
    command = [str(python), "-m", *arguments]
    printed = subprocess.run(command, cwd=_FOLDER, check=True, capture_output=True, text=True).stdout
    times: list[float] = json.loads(printed)["step_ms"]
    return times


def main() -> None:
    arguments = _arguments()
    if arguments.system is not None:
        report(arguments, _measure_peer)
        return
    size = ("--shape", arguments.shape, "--steps", str(arguments.steps), "--warmup", str(arguments.warmup))
    ours = (
        *("ours", "--mode", "keyed_new", "--no-embeddings", "--threads", str(arguments.threads)),
        *("--batches", str(arguments.warmup + arguments.steps)),
    )
    peer = ("keys.peers", "--eviction-interval", str(arguments.eviction_interval), "--threads", str(arguments.threads))
    step_ms = {"holdfast": _run(sys.executable, *ours, *size)}
    for system in _SYSTEMS:
        step_ms[system] = _run(arguments.peers_python, *peer, "--system", system, *size)
    # A managed collision module evicts every so many steps, all at once: the mean has it, the median has not.
    found: dict[str, Any] = {
        name: {"median_ms": round(statistics.median(of), 1), "mean_ms": round(statistics.mean(of), 1)}
        for name, of in step_ms.items()
    }
    for name in _SYSTEMS:
        for kind in ("median", "mean"):
            found[name][f"times_{kind}"] = round(found[name][f"{kind}_ms"] / found["holdfast"][f"{kind}_ms"], 2)
        found[name]["met"] = found[name]["times_median"] >= BAR
    print(json.dumps({"shape": arguments.shape, "bar": BAR, "cpus": len(os.sched_getaffinity(0))} | found, indent=1))


if __name__ == "__main__":
    main()
