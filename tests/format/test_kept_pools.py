"""A pool that an earlier version wrote opens for good. Some are in pools/, killed in the middle of a step."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from format_doc import CONSTANTS, TEXT
from holdfast import Pool, _core
from holdfast.state import state_tree
from tiny_pools import RoomyWriter, Writer, dense_tree, digest_of_rows

POOLS = Path(__file__).parent / "pools"
KEPT = ("v1-in_place", "v4-in_place", "v4-log", "v5-in_place", "v5-log")


@pytest.fixture(params=KEPT)
def kept(request: pytest.FixtureRequest, pool_root: Path) -> tuple[Path, dict[str, object]]:
    """A copy of the kept pool of a version and a store, and what must be found in it."""
    directory = pool_root / "pool"
    with tarfile.open(POOLS / f"{request.param}.tar.gz") as tar:
        tar.extractall(directory, filter="data")
    return directory, json.loads((POOLS / f"{request.param}.json").read_text())


def writer_of(directory: Path) -> Writer:
    has_log = (directory / "row-log-0000").exists()
    return (RoomyWriter if has_log else Writer)(directory, trust_after_reboot=True)


def test_every_version_has_its_kept_pools_and_none_is_large():
    assert {path.name for path in POOLS.iterdir()} == {f"{name}.{kind}" for name in KEPT for kind in ("tar.gz", "json")}
    assert all(path.stat().st_size <= 16 << 10 for path in POOLS.iterdir())
    released = re.findall(r"^\| (\d+) \| \d", TEXT.split("## Version history")[1], re.MULTILINE)
    for version in (*released, CONSTANTS["version"]):  # the newest is kept from its first day on
        assert any(name.startswith(f"v{version}-") for name in KEPT)


def test_a_kept_pool_verifies_and_recovers_to_the_step_and_the_rows_that_its_version_recovered(kept):
    directory, expected = kept
    reader = _core.Reader(str(directory))
    assert reader.verify() == []
    assert reader.commit["step"] == expected["committed_step"]
    with Pool(directory, trust_after_reboot=True) as pool:
        assert (pool.step, pool.core.cursor, pool.core.row_updates) == (
            expected["step"],
            expected["cursor"],
            expected["row_updates"],
        )
        structure, tensors = pool.core.dense_state()
        tree = state_tree.unpack(structure, tensors)
        assert torch.equal(tree.pop("weight"), dense_tree(pool.step)["weight"])
        assert torch.equal(tree.pop("bias"), dense_tree(pool.step)["bias"])
        assert tree == {"step": pool.step, "name": "tiny"}
    assert digest_of_rows(directory) == expected["rows_sha256"]
    assert _core.Reader(str(directory)).verify() == []


def test_a_kept_pool_can_be_trained_on(kept):
    directory, expected = kept
    writer = writer_of(directory)
    writer.steps(4)
    writer.pool.close()
    with Pool(directory) as pool:
        assert pool.recovered.clean
        assert pool.step == expected["step"] + 4


def test_training_on_from_a_kept_pool_gives_the_rows_that_training_gives_today(kept, pool_root: Path):
    directory, expected = kept
    for path in (directory, pool_root / "today"):
        writer = writer_of(path)
        writer.steps(expected["step"] + 3 - writer.pool.step)
        writer.pool.close()
    assert digest_of_rows(directory) == digest_of_rows(pool_root / "today")
