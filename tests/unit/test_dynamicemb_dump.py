"""Dumps of NVIDIA's dynamicemb come in by their keys. They are written here as its sources say (commits 0c45b80 and
01eaaf9 of recsys-examples, corelib/dynamicemb/dynamicemb): arrays without headers, one file for each table, part and
rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runs import Commands
from holdfast.admin import tensor_files
from holdfast.admin.dynamicemb_dump import DynamicembDump
from holdfast.errors import ConfigError, Corrupted, FormatMismatch

DIM = 4
CONFIG = """
[data.synthetic]
num_samples = 400
rows = [50, 50]
num_dense = 2
drift = 0.1

[embedding]
dim = 4
optimizer = "{optimizer}"

[model]
bottom = [4, 4]
top = [4, 1]

[train]
batch_size = 20
steps = 2
"""


@dataclass(frozen=True)
class Table:
    keys: np.ndarray
    values: np.ndarray
    state: np.ndarray


def table(seed: int, width: int, num_keys: int = 300) -> Table:
    draw = np.random.default_rng(seed)
    keys = draw.permutation(np.unique(draw.integers(-(2**63), 2**63 - 1, num_keys)))
    values = draw.standard_normal((num_keys, DIM), np.float32)
    return Table(keys, values, draw.random((num_keys, width), np.float32))


def dump(
    folder: Path, tables: dict[str, Table], ranks: int, state: str | None = "emb_opt_values", scores: bool = True
) -> None:
    """What DynamicEmbDump writes: a key is of the rank that its remainder says."""
    place = folder / "model.embeddings"
    place.mkdir(parents=True)
    for name, table in tables.items():
        for rank in range(ranks):
            mine = table.keys % ranks == rank

            def write(part: str, array: np.ndarray, name: str = name, rank: int = rank) -> None:
                (place / f"{name}_{part}.rank_{rank}.world_size_{ranks}").write_bytes(array.tobytes())

            write("emb_keys", table.keys[mine].astype("<i8"))
            write("emb_values", table.values[mine].astype("<f4"))
            if scores:
                write("emb_scores", np.ones(int(mine.sum()), "<u8"))
            if state is not None:
                write(state, table.state[mine].astype("<f4"))
        (place / f"{name}_opt_args.json").write_text('{"lr": 0.1, "eps": 1e-08}')


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("optimizer", "width", "ranks", "state"),
    [
        ("sgd", 0, 1, None),
        ("rowwise_adagrad", 4, 3, "emb_opt_values"),
        ("rowwise_adagrad", 0, 2, None),
        ("adagrad", DIM, 1, "opt_values"),
        ("adam", 2 * DIM, 2, "emb_opt_values"),
    ],
)
def test_a_dump_comes_in_with_every_key_and_its_state(
    optimizer: str, width: int, ranks: int, state: str | None, holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 1000)  # slices that end within a rank's files, and reach over two
    holdfast.config.write_text(CONFIG.format(optimizer=optimizer))
    tables = {"C1": table(1, width), "C2": table(2, width, 7)}
    dump(holdfast.root / "dump", tables, ranks, state)
    pool, out = holdfast.root / "pool", holdfast.root / "out.safetensors"
    result = holdfast("import", holdfast.root / "dump", holdfast.config, "--pool", pool)
    assert result.code == 0, result.err
    assert holdfast("export", pool, out).code == 0
    exported = load_file(out)
    for name, there in tables.items():
        order = np.argsort(there.keys)
        assert exported[f"embedding_bags.{name}.keys"].tolist() == there.keys[order].tolist()
        assert np.array_equal(exported[f"embedding_bags.{name}.weight"], there.values[order])
        if state is None:
            continue
        moments = there.state[order]
        if optimizer == "adam":
            assert np.array_equal(exported[f"optimizer.{name}.exp_avg"], moments[:, :DIM])
            assert np.array_equal(exported[f"optimizer.{name}.exp_avg_sq"], moments[:, DIM:])
        else:
            expected = moments[:, 0] if optimizer == "rowwise_adagrad" else moments
            assert np.array_equal(exported[f"optimizer.{name}.momentum1"], expected)
    assert holdfast.train("pool").code == 0


def test_the_dense_part_comes_from_a_file_beside_the_dump(holdfast: Commands) -> None:
    holdfast.config.write_text(CONFIG.format(optimizer="sgd"))
    dump(holdfast.root / "dump", {"C1": table(1, 0), "C2": table(2, 0)}, 2, None)
    assert holdfast.train("trained").code == 0
    assert holdfast("export", holdfast.root / "trained", holdfast.root / "out.safetensors").code == 0
    trained = load_file(holdfast.root / "out.safetensors")
    model = {name: tensor for name, tensor in trained.items() if name.startswith("model.")}
    save_file(model, holdfast.root / "model.safetensors")
    inputs = (holdfast.root / "dump", holdfast.root / "model.safetensors")
    assert holdfast("import", *inputs, holdfast.config, "--pool", holdfast.root / "pool").code == 0
    assert holdfast("export", holdfast.root / "pool", holdfast.root / "again.safetensors").code == 0
    again = load_file(holdfast.root / "again.safetensors")
    assert model and all(torch.equal(again[name], tensor) for name, tensor in model.items())
    twice = holdfast(
        "import", *inputs, holdfast.root / "out.safetensors", holdfast.config, "--pool", holdfast.root / "p"
    )
    assert (twice.code, "out.safetensors have embedding_bags.C1.keys" in twice.err) == (1, True), twice.err


def test_tables_without_keys_take_no_rows_that_are_found_by_keys(holdfast: Commands) -> None:
    holdfast.config.write_text(CONFIG.format(optimizer="sgd").replace("drift = 0.1", ""))
    dump(holdfast.root / "dump", {"C1": table(1, 0, 50), "C2": table(2, 0, 50)}, 1, None)
    result = holdfast("import", holdfast.root / "dump", holdfast.config, "--pool", holdfast.root / "pool")
    assert (result.code, "give the column keys = true" in result.err) == (1, True), result.err


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_a_row(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -4 * DIM])


def cut_a_column(path: Path) -> None:
    count = (path.parent / path.name.replace("values", "keys")).stat().st_size // 8
    path.write_bytes(path.read_bytes()[: -4 * count])


@pytest.mark.parametrize(
    ("name", "damage", "error", "words"),
    [
        ("C1_emb_keys.rank_0.world_size_2", cut, Corrupted, r"emb_keys.rank_0.*no multiple of 8"),
        ("C1_emb_values.rank_1.world_size_2", cut, Corrupted, r"emb_values.rank_1.*no multiple of 4"),
        (
            "C1_emb_values.rank_1.world_size_2",
            cut_a_row,
            Corrupted,
            r"emb_values.rank_1.*do not belong to the \d+ keys",
        ),
        ("C1_emb_values.rank_1.world_size_2", cut_a_column, Corrupted, r"emb_values.rank_1.*3 numbers.*have 4"),
        (
            "C1_emb_values.rank_1.world_size_2",
            Path.unlink,
            ConfigError,
            r"emb_values.rank_1\S* is not there: .* 2 ranks",
        ),
        ("C1_emb_keys.rank_0.world_size_2", Path.unlink, ConfigError, r"emb_keys.rank_0\S* is not there: .* 2 ranks"),
        ("C1_emb_opt_values.rank_0.world_size_2", Path.unlink, ConfigError, r"opt_values.rank_0\S* is not there"),
        (
            "C1_emb_keys.rank_1.world_size_2",
            lambda path: path.rename(path.with_name("C1_emb_keys.rank_2.world_size_3")),
            ConfigError,
            r"table 'C1' is there twice, in .* of 2 ranks",
        ),
        (
            "C1_emb_keys.rank_1.world_size_2",
            lambda path: path.rename(path.with_name("C1_emb_keys.rank_2.world_size_2")),
            ConfigError,
            "a rank beyond its 2 ranks",
        ),
    ],
)
def test_files_that_are_missing_or_do_not_fit_are_named(
    name: str, damage: Callable[[Path], object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    dump(tmp_path, {"C1": table(1, DIM)}, 2)
    damage(tmp_path / "model.embeddings" / name)
    with pytest.raises(error, match=words):
        DynamicembDump(tmp_path, rowwise=False)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    dump(tmp_path, {"C1": table(1, DIM)}, 2)
    found = DynamicembDump(tmp_path, rowwise=False)
    cut(tmp_path / "model.embeddings" / "C1_emb_values.rank_1.world_size_2")
    with pytest.raises(Corrupted, match=r"emb_values.rank_1\S* at offset \d+: it is cut short"):
        found.rows("embedding_bags.C1.weight", 0, 300)


def test_a_folder_of_other_files_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(FormatMismatch, match="no dump of dynamicemb"):
        DynamicembDump(tmp_path, rowwise=True)


def test_a_rank_without_keys_has_empty_files(tmp_path: Path) -> None:
    there = table(1, DIM, 1)
    dump(tmp_path, {"C1": there}, 3)
    found = DynamicembDump(tmp_path, rowwise=False)
    assert found.shapes() == {
        "embedding_bags.C1.keys": (1,),
        "embedding_bags.C1.weight": (1, DIM),
        "optimizer.C1.momentum1": (1, DIM),
    }
    assert found.rows("embedding_bags.C1.keys", 0, 1).tolist() == there.keys.tolist()


def test_a_name_that_says_a_billion_ranks_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "items_emb_keys.rank_0.world_size_999999999").write_bytes(bytes(8))
    with pytest.raises(ConfigError, match=r"rank_1\.world_size_999999999 is not there"):
        DynamicembDump(tmp_path, rowwise=False)


def test_a_checkpoint_of_torch_distributed_is_told_to_become_a_file(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(FormatMismatch, match=r"dcp_to_torch FOLDER OUT\.pt"):
        DynamicembDump(tmp_path, rowwise=True)
