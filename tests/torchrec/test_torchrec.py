"""TorchRec's DLRM, KeyedJaggedTensor in, trains on holdfast's collection, and its sequences as holdfast's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool, _core
from holdfast.admin.importing import import_pool
from holdfast.admin.tensor_files import open_tensors
from holdfast.data.batch import JaggedFeatures
from holdfast.files.config import read_config
from holdfast.run.sections import RunConfig

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = Path(os.environ.get("HOLDFAST_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))


def _package_for_the_peers(directory: Path) -> Path:
    """holdfast's modules and its built core in one folder: what the editable install puts together for us alone."""
    package = directory / "holdfast"
    package.mkdir()
    for path in [*(ROOT / "src/holdfast").iterdir(), Path(_core.__file__)]:
        if path.name != "__pycache__" and not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    return directory


CONFIG = """
[data.parquet]
paths = ["goods.parquet"]
label = "click"
dense = ["age"]
sparse.goods = { column = "goods", keys = true, num_embeddings = 500 }

[embedding]
dim = 4

[model]
bottom = [4]
top = [1]

[train]
batch_size = 2
"""


def test_what_torchrecs_managed_collisions_read_is_read_after_an_import(tmp_path: Path) -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip("no peers' environment: `make bench` makes it, or set HOLDFAST_PEERS_PYTHON")
    done = subprocess.run(
        [PEERS_PYTHON, Path(__file__).parent / "managed_collisions.py", tmp_path / "goods.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["ids"]) > 20
    columns = {"goods": said["ids"][:4], "click": [0.0, 1.0, 0.0, 1.0], "age": [1.0, 2.0, 3.0, 4.0]}
    pq.write_table(pa.table(columns), tmp_path / "goods.parquet")
    (tmp_path / "run.toml").write_text(CONFIG)
    import_pool(open_tensors(tmp_path / "goods.pt"), read_config(RunConfig, tmp_path / "run.toml"), tmp_path / "pool")
    config = EmbeddingBagConfig(
        num_embeddings=None, capacity=500, embedding_dim=4, name="goods", feature_names=["goods"]
    )
    with Pool(tmp_path / "pool") as pool:
        optimizer = read_config(RunConfig, tmp_path / "run.toml").embedding.spec()
        rows = EmbeddingBagCollection(pool, [config], optimizer=optimizer).eval()
        ids = torch.tensor(said["ids"])
        read = rows(JaggedFeatures(["goods"], ids, torch.arange(len(ids) + 1))).values()
    assert torch.equal(read, torch.tensor(said["values"]))


@pytest.mark.parametrize("script", ["torchrec_dlrm.py", "torchrec_sequences.py"])
def test_what_is_torchrecs_trains_to_the_same_rows_as_what_is_ours(tmp_path: Path, script: str) -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip("no peers' environment: `make bench` makes it, or set HOLDFAST_PEERS_PYTHON")
    done = subprocess.run(
        [PEERS_PYTHON, Path(__file__).parent / script],
        env={**os.environ, "PYTHONPATH": str(_package_for_the_peers(tmp_path)), "MKL_CBWR": "AUTO,STRICT"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["largest_row_change"] > 0.05
    assert found["largest_row_difference"] < 1e-5
    assert found["largest_loss_difference"] < 1e-5
