"""Commands that are no script: holdfast's own training, as a module and as a console script."""

from __future__ import annotations

import sys
from pathlib import Path

from held_port import held_port

from proofs import prove

CONFIG = """
[data.synthetic]
num_samples = 640
rows = [50, 7, 400]
num_dense = 3

[embedding]
dim = 4
optimizer = "rowwise_adagrad"

[model]
bottom = [8, 4]
top = [8, 1]

[optimizer]
name = "adam"

[train]
batch_size = 32
"""


def config_in(root: Path) -> Path:
    path = root / "run.toml"
    path.write_text(CONFIG)
    return path


def test_holdfast_train_is_proven_as_a_module_with_files_of_each_run_in_its_own_folder(pool_root: Path, tmp_path: Path):
    train = (sys.executable, "-m", "holdfast", "train", config_in(tmp_path), "--pool", pool_root / "pool")
    found = prove(
        "--steps", "8", "--runs", "1", "--kills", "1", "--", *train, "--metrics", "{run}/metrics.jsonl", "--debug"
    )
    assert found.code == 0, found.out + found.err
    assert found.report["digest"] is not None  # the command seeds every generator
    assert list(pool_root.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_console_script_is_proven_in_an_environment_that_nobody_prepared(pool_root: Path, tmp_path: Path):
    train = (Path(sys.executable).with_name("holdfast"), "train", config_in(tmp_path), "--pool", pool_root / "pool")
    found = prove("--steps", "2", "--runs", "1", "--kills", "0", "-o", tmp_path / "verdict.json", "--", *train)
    assert found.code == 0, found.out + found.err
    assert (tmp_path / "verdict.json").read_text() == found.out


def test_a_pool_of_several_ranks_is_refused_before_it_is_touched(pool_root: Path, tmp_path: Path):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    train = (sys.executable, "-m", "holdfast", "train", config_in(tmp_path), "--pool", pool_root / "pool")
    with held_port() as port:
        found = prove("--steps", "2", "--runs", "1", "--kills", "0", "--", *train, **ranks, MASTER_PORT=str(port))
    assert found.code == 2
    assert "it trains a pool of many ranks" in found.err
    assert list(pool_root.iterdir()) == []
