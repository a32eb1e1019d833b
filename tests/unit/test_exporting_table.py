"""A table's vectors go out to Parquet and Arrow, beside their keys or rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import holdfast
from cli_runs import Commands
from holdfast.admin.exporting_table import export_table, number_of
from holdfast.errors import ConfigError
from holdfast.pools.read_only import at_rest

DIM = 4
STORES: list[dict[str, Any]] = [{"medium": "memory"}, {"medium": "block"}]
KEYS = [7, -3, 2**62, 0]


def train(directory: Path, options: dict[str, Any] | None = None, data_type: str = "fp32") -> dict[str, torch.Tensor]:
    """A step over KEYS and over rows 5 and 2 of 9; returns what an evaluation sees of each."""
    tables = [
        holdfast.EmbeddingBagConfig(
            name="items", num_embeddings=None, capacity=50, embedding_dim=DIM, feature_names=["item"]
        ),
        holdfast.EmbeddingBagConfig(
            name="shops", num_embeddings=9, embedding_dim=DIM, feature_names=["shop"], data_type=data_type
        ),
    ]
    with holdfast.Pool(directory, **(options or {})) as pool:
        rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.SGD(lr=0.5))
        checkpoint = holdfast.Checkpoint(pool, model=torch.nn.Linear(1, 1), optimizer=[])
        checkpoint.resume()
        rows({"item": torch.tensor(KEYS), "shop": torch.tensor([5, 2, 2, 5])}).values().square().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
        with torch.no_grad():
            found = rows({"item": torch.tensor(sorted(KEYS)), "shop": torch.tensor([2, 5, 2, 5])})
        return {"item": found["item"], "shop": found["shop"][:2]}


def read(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


def export(directory: Path, name: str, out: Path, **options: Any) -> tuple[int, pa.Table]:
    with at_rest(directory) as (reader, _):
        num_rows = export_table(reader, number_of(reader, name), out, **options)
    return num_rows, read(out)


def vectors(table: pa.Table) -> torch.Tensor:
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.astype(np.float32)).view(-1, DIM)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("options", STORES)
def test_every_key_lies_beside_its_vector(
    pool_root: Path, tmp_path: Path, options: dict[str, Any], suffix: str
) -> None:
    expected = train(pool_root / "pool", options)
    num_rows, found = export(pool_root / "pool", "items", tmp_path / f"items{suffix}")
    assert (num_rows, found["key"].to_pylist()) == (4, sorted(KEYS))
    assert torch.equal(vectors(found), expected["item"])
    assert found["updates"].to_pylist() == found["last_step"].to_pylist() == [1] * 4
    assert found.schema.metadata[b"holdfast.step"] == b"1"


@pytest.mark.parametrize("data_type", ["fp32", "fp16", "bf16"])
def test_rows_that_a_step_updated_lie_beside_their_vectors(pool_root: Path, tmp_path: Path, data_type: str) -> None:
    expected = train(pool_root / "pool", data_type=data_type)
    num_rows, found = export(pool_root / "pool", "shops", tmp_path / "shops.arrow")
    assert (num_rows, found["row"].to_pylist()) == (2, [2, 5])
    assert found.schema.field("vector").type.value_type == (pa.float16() if data_type == "fp16" else pa.float32())
    assert torch.equal(vectors(found), expected["shop"])


def test_what_cannot_be_exported_is_said_and_nothing_written(pool_root: Path, tmp_path: Path) -> None:
    train(pool_root / "pool")
    with at_rest(pool_root / "pool") as (reader, _):
        with pytest.raises(ConfigError, match=r"say which table \(--table\); the pool has items, shops"):
            number_of(reader, None)
        with pytest.raises(ConfigError, match="there is no table 'users'"):
            number_of(reader, "users")
        with pytest.raises(ConfigError, match="neither Parquet"):
            export_table(reader, 0, tmp_path / "items.csv")
        (tmp_path / "items.arrow").write_bytes(b"of somebody")
        with pytest.raises(ConfigError, match="overwrite"):
            export_table(reader, 0, tmp_path / "items.arrow")
    assert [path.name for path in tmp_path.iterdir()] == ["items.arrow"]
    assert export(pool_root / "pool", "items", tmp_path / "items.arrow", overwrite=True)[0] == 4


def test_the_command_line_writes_one_table(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(pool_root, monkeypatch, capfd)
    train(pool_root / "pool")
    result = commands("export", pool_root / "pool", pool_root / "items.parquet", "--table", "items")
    assert "4 rows of table items, step 1" in result.out
    refused = commands("export", pool_root / "pool", pool_root / "all.parquet")
    assert refused.code == 1
    assert "items, shops" in refused.err
    assert not (pool_root / "all.parquet").exists()
    refused = commands("export", pool_root / "pool", pool_root / "items.csv")
    assert refused.code == 1
    assert "says neither safetensors" in refused.err
    assert not (pool_root / "items.csv").exists()
