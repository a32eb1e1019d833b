"""``python -m keys``, from benchmarks/: AUC on the next day of a drifting stream, with keys and with hashing into
tables of the same bytes. Prints JSON; --plot draws the curves.

Every table has so many bytes: with keys, of rows with their records and of the map in memory; hashed, of rows alone.
All start from the same network and see the same samples once, in order.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.state.reproducibility import prepare_environment

prepare_environment()

from holdfast.data import SyntheticConfig, SyntheticSource  # noqa: E402
from holdfast.data.block import FixedBags, SampleBlock  # noqa: E402
from holdfast.data.hashing import hash_values  # noqa: E402
from holdfast.files.config import read_config  # noqa: E402
from holdfast.run.assembly import open_trainer  # noqa: E402
from holdfast.run.sections import RunConfig  # noqa: E402

DIM = 16
ROW_BYTES = 4 * DIM + 4  # of row-wise Adagrad
KEY_BYTES = 16 + 22  # of the record, and of the map
LAG_STEPS = 32  # after which the rows of keys that were left behind are others'

CONFIG = """
[data.synthetic]
num_samples = {num_samples}
rows = [{alive}, {alive}]
num_dense = 4
drift = {drift}
zipf_exponent = {zipf}
[embedding]
dim = {dim}
lr = {lr}
init_bound = 0.001
{policy}
[model]
bottom = [32, {dim}]
top = [64, 1]
[optimizer]
name = "adam"
lr = 0.002
[train]
batch_size = {batch_size}
shuffle = false
"""


class Hashed:
    """The samples of a source of keys, their keys hashed into tables of so many rows."""

    def __init__(self, source: SyntheticSource, num_rows: int) -> None:
        self._source = source
        self._num_rows = num_rows
        self.features = tuple(replace(feature, num_embeddings=num_rows, keys=False) for feature in source.features)
        self.num_dense, self.num_samples = source.num_dense, source.num_samples
        self.block_sizes, self.sample_bytes = source.block_sizes, source.sample_bytes

    def read_block(self, index: int) -> SampleBlock:
        block = self._source.read_block(index)
        bags = tuple(FixedBags(hash_values(bag.ids, self._num_rows)) for bag in block.bags)
        return replace(block, bags=bags)

    def fingerprint(self) -> dict[str, str | int]:
        return {**self._source.fingerprint(), "hashed": self._num_rows}


def curve(arguments: argparse.Namespace, directory: Path, *, max_keys: int, hashed_rows: int) -> list[float]:
    """AUC on each day after the one that was trained. hashed_rows: 0 for keys."""
    steps_a_day = arguments.samples_a_day // arguments.batch_size
    config_path = directory / "run.toml"
    capacity = max_keys
    policy = "" if hashed_rows else f"max_keys = {capacity}"
    config_path.write_text(
        CONFIG.format(
            num_samples=arguments.samples_a_day * (arguments.days + 1),
            alive=arguments.alive,
            drift=arguments.drift,
            zipf=arguments.zipf,
            dim=DIM,
            lr=arguments.lr,
            batch_size=arguments.batch_size,
            policy=policy,
        )
    )
    config = read_config(RunConfig, config_path)
    synthetic = config.data.synthetic
    assert isinstance(synthetic, SyntheticConfig)

    def source_of(of: SyntheticConfig) -> Any:
        plain = SyntheticSource(of)
        return Hashed(plain, hashed_rows) if hashed_rows else plain

    aucs = []
    with open_trainer(config, directory / "pool", source=source_of(synthetic)) as trainer:
        steps = trainer.steps()
        for day in range(1, arguments.days + 1):
            for report in steps:
                if report.step == day * steps_a_day:
                    break
            tomorrow = replace(
                synthetic, first_sample=day * arguments.samples_a_day, num_samples=arguments.evaluated_samples
            )
            evaluation = trainer.evaluate(source_of(tomorrow))
            assert evaluation is not None
            aucs.append(round(evaluation.auc, 5))
    return aucs


def best_auc(arguments: argparse.Namespace) -> float:
    """Of the planted probabilities themselves."""
    from holdfast.data import bayes_auc

    config = SyntheticConfig(
        num_samples=1, rows=(arguments.alive,) * 2, num_dense=4, drift=arguments.drift, zipf_exponent=arguments.zipf
    )
    return round(bayes_auc(config), 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m keys", description=__doc__)
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--samples-a-day", type=int, default=1 << 17)
    parser.add_argument("--evaluated-samples", type=int, default=1 << 15)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--alive", type=int, default=20_000, help="items of a table that are seen at a time")
    parser.add_argument("--drift", type=float, default=0.05, help="items born a sample and table")
    parser.add_argument("--zipf", type=float, default=0.9)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--max-keys", type=int, default=12_000)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    max_keys = arguments.max_keys
    # What is left behind keeps its row for some steps, in which so many more come.
    physical = max_keys + LAG_STEPS * arguments.batch_size
    rows = {
        "keys": 0,
        "hashed, same bytes": int((max_keys * (ROW_BYTES + KEY_BYTES)) / ROW_BYTES),
        "hashed, bytes of keys and of all rows on their way out": int(physical * (ROW_BYTES + KEY_BYTES) / ROW_BYTES),
    }
    found: dict[str, Any] = {"config": {k: str(v) for k, v in vars(arguments).items()}, "planted": best_auc(arguments)}
    found["hashed_rows"] = rows
    found["auc"] = {}
    for name, hashed_rows in rows.items():
        directory = Path(tempfile.mkdtemp(prefix="holdfast-keys-", dir="/dev/shm"))
        try:
            found["auc"][name] = curve(arguments, directory, max_keys=max_keys, hashed_rows=hashed_rows)
        finally:
            shutil.rmtree(directory)
    found["mean"] = {name: round(float(np.mean(of[1:])), 5) for name, of in found["auc"].items()}
    print(json.dumps(found, indent=1))
    if arguments.plot is not None:
        _plot(found, arguments.plot)


def _plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, aucs in found["auc"].items():
        axes.plot(range(1, len(aucs) + 1), aucs, marker="o", markersize=3, label=name)
    axes.axhline(found["planted"], color="grey", linewidth=0.8, linestyle="--", label="planted")
    axes.set_xlabel("day that was trained")
    axes.set_ylabel("AUC on the next one")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
