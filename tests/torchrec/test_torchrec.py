"""TorchRec's DLRM, KeyedJaggedTensor in, trains on holdfast's collection."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from holdfast import _core

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


def test_torchrecs_dlrm_trains_to_the_same_rows_as_our_own(tmp_path: Path) -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip("no peers' environment: `make bench` makes it, or set HOLDFAST_PEERS_PYTHON")
    done = subprocess.run(
        [PEERS_PYTHON, Path(__file__).parent / "torchrec_dlrm.py"],
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
