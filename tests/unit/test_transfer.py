"""Pools move out to safetensors and in from state dicts, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import _SIZE, load_file, save_file

from cli_runs import Commands, pool_digest
from holdfast.admin import row_order, tensor_files
from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.importing import import_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.row_order import rows_in_order
from holdfast.admin.snapshot import layer_file, output, runs
from holdfast.admin.snapshot.copying import PoolCopy
from holdfast.admin.tensor_files import SafetensorsFile, TorchFile
from holdfast.data.output import whole_file
from holdfast.errors import ConfigError, Corrupted, FormatMismatch, HoldfastError, PoolExists
from holdfast.files.config import read_config
from holdfast.pools.read_only import ReadOnlyPool, at_rest
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig

pytestmark = pytest.mark.dear

STATE = {
    "sgd": {},
    "rowwise_adagrad": {"momentum1": (400,)},
    "adagrad": {"momentum1": (400, 4)},
    "adam": {"exp_avg": (400, 4), "exp_avg_sq": (400, 4)},
    "rowwise_adam": {"exp_avg": (400, 4), "exp_avg_sq": (400,)},
}


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


def run_config(holdfast: Commands, *overrides: str) -> RunConfig:
    return read_config(RunConfig, holdfast.config, overrides)


def train(config: RunConfig, directory: Path, steps: int = 4) -> dict[str, torch.Tensor]:
    """Trains a pool; returns its model's state."""
    with open_trainer(config, directory) as trainer:
        for _, _ in zip(range(steps), trainer.steps(), strict=False):
            pass
        trainer.checkpoint.flush()
        return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def export(directory: Path, out: Path) -> dict[str, torch.Tensor]:
    with at_rest(directory) as (reader, _):
        export_pool(reader, out)
    return load_file(out)


def test_an_export_removes_what_killed_ones_left_and_not_what_others_are_making(holdfast: Commands) -> None:
    """A scratch file takes as much room as the rows."""
    directory, out = holdfast.root / "pool", holdfast.root / "out.safetensors"
    train(run_config(holdfast, "pool.medium=block"), directory)
    child = os.fork()
    if not child:
        with whole_file(out, overwrite=False) as file, rows_in_order(directory, holdfast.root):
            file.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(holdfast.root.glob(".*"))) == 2
    with whole_file(out, overwrite=False) as theirs:
        theirs.write_bytes(b"theirs")
        holdfast("export", directory, out)
        assert sorted(holdfast.root.glob(".*")) == [theirs] and theirs.read_bytes() == b"theirs"


@pytest.mark.parametrize("is_there", [True, False])
def test_where_the_output_is_a_link_what_it_leads_to_is_written(is_there: bool, tmp_path: Path) -> None:
    link, target = tmp_path / "model", tmp_path / "other_disk" / "model"
    link.symlink_to("other_disk/model")
    with pytest.raises(ConfigError, match=r"there is no directory .*other_disk"), whole_file(link, overwrite=True):
        pass
    target.parent.mkdir()
    if is_there:
        target.write_bytes(b"old")
        with pytest.raises(ConfigError, match="there already"), whole_file(link, overwrite=False):
            pass
    with whole_file(link, overwrite=is_there) as partial:
        assert partial.parent == target.parent
        partial.write_bytes(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
@pytest.mark.parametrize("tables_in_memory", [0, 1, 3])
def test_rows_that_were_put_in_order_make_the_same_export_and_digest(
    tables_in_memory: int, optimizer: str, holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runs, row_order):
        monkeypatch.setattr(module, "RUN_BYTES", 2000)
    for module in (output, layer_file):
        monkeypatch.setattr(module, "RUN_CHUNK_BYTES", 500)
    directory = holdfast.root / "pool"
    more = ["pool.medium=block", "pool.log_bytes=32768", f"embedding.optimizer={optimizer}"]
    train(run_config(holdfast, *more), directory, 24)
    copy = PoolCopy(directory)
    wanted = [row_order._memory_for(copy, number) for number in range(3)]
    spare = sorted(wanted)[tables_in_memory - 1] if tables_in_memory else 0
    monkeypatch.setattr(row_order, "spare_bytes", lambda: spare)
    spilled: list[int] = []
    with at_rest(directory) as (reader, _):
        read: list[int] = []
        with rows_in_order(directory, holdfast.root, read.append) as ordered:
            assert ordered is not None
            for number in range(3):
                with ordered.of(number):
                    spilled += [int(file.name) for file in holdfast.root.glob(".holdfast-rows.*.scratch/*")]
            too_large = [number for number in range(3) if wanted[number] > 2 * 2000]
            assert 2 in too_large
            assert spilled == [number for number in too_large if wanted[number] > spare]
        with rows_in_order(directory, holdfast.root, read.append) as ordered:
            export_pool(reader, holdfast.root / "ordered.safetensors", ordered=ordered)
            assert sum(read) > 0
        export_pool(reader, holdfast.root / "as_they_lie.safetensors")
        with rows_in_order(directory, holdfast.root) as ordered:
            assert digest_pool(reader, None, ordered) == digest_pool(reader)
    exports = [(holdfast.root / f"{name}.safetensors").read_bytes() for name in ("ordered", "as_they_lie")]
    assert exports[0] == exports[1]
    assert not list(holdfast.root.glob("holdfast-rows-*"))


def read_table(directory: Path, number: int) -> np.ndarray:
    reader = ReadOnlyPool(directory).core
    table = reader.tables[number]
    state = len(STATE_FLOATS) and STATE_FLOATS[table.optimizer](table.embedding_dim)
    weights = np.empty(table.num_embeddings * table.embedding_dim * 4, np.uint8)
    reader.read_rows(number, 0, table.num_embeddings, weights, np.empty(table.num_embeddings * state * 4, np.uint8))
    return weights.view(np.float32).reshape(table.num_embeddings, table.embedding_dim)


STATE_FLOATS = (lambda d: 0, lambda d: 1, lambda d: d, lambda d: 2 * d, lambda d: d + 1)


@pytest.mark.parametrize("optimizer", STATE)
def test_an_export_has_torchrecs_names_and_the_pools_values(holdfast: Commands, optimizer: str) -> None:
    directory = holdfast.root / "pool"
    model = train(run_config(holdfast, f"embedding.optimizer={optimizer}"), directory)
    tensors = export(directory, holdfast.root / "out.safetensors")
    expected = {f"embedding_bags.C{n}.weight" for n in (1, 2, 3)} | {f"model.{name}" for name in model}
    expected |= {f"optimizer.C{n}.{state}" for n in (1, 2, 3) for state in STATE[optimizer]}
    assert set(tensors) == expected
    for number in range(3):
        found = tensors[f"embedding_bags.C{number + 1}.weight"].numpy()
        assert np.array_equal(found.view(np.uint32), read_table(directory, number).view(np.uint32))
    for name, shape in STATE[optimizer].items():
        found = tensors[f"optimizer.C3.{name}"]
        assert tuple(found.shape) == shape
        assert found.abs().sum() > 0
    for name, tensor in model.items():
        assert torch.equal(tensors[f"model.{name}"], tensor)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("optimizer", STATE)
def test_exported_and_imported_rows_have_the_same_digest(holdfast: Commands, optimizer: str, dtype: str) -> None:
    config = run_config(holdfast, f"embedding.optimizer={optimizer}", f"embedding.dtype={dtype}")
    model = train(config, holdfast.root / "pool")
    out = holdfast.root / "out.safetensors"
    export(holdfast.root / "pool", out)
    summary = import_pool(SafetensorsFile(out), config, holdfast.root / "again")
    assert summary.dense_missing == summary.unused == ()
    assert pool_digest(holdfast.root / "again").tables == pool_digest(holdfast.root / "pool").tables
    with open_trainer(config, holdfast.root / "again") as trainer:
        assert trainer.pool.step == 0
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, model[name])


def test_chunks_do_not_show(holdfast: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(holdfast, "embedding.optimizer=adam")
    train(config, holdfast.root / "pool")
    whole = holdfast.root / "whole.safetensors"
    export(holdfast.root / "pool", whole)
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 7 * 48)
    pieces = holdfast.root / "pieces.safetensors"
    export(holdfast.root / "pool", pieces)
    assert pieces.read_bytes() == whole.read_bytes()
    import_pool(SafetensorsFile(pieces), config, holdfast.root / "again")
    assert pool_digest(holdfast.root / "again").tables == pool_digest(holdfast.root / "pool").tables


def test_what_was_sparse_is_sparse_after_an_import(holdfast: Commands) -> None:
    config = run_config(holdfast, "data.synthetic.rows=[2000000]", "model.top=[1]")
    train(config, holdfast.root / "pool", steps=1)
    out = holdfast.root / "out.safetensors"
    export(holdfast.root / "pool", out)
    import_pool(SafetensorsFile(out), config, holdfast.root / "again")
    (table,) = inspect_pool(holdfast.root / "again")["tables"]
    assert table["bytes_on_disk"] < table["bytes"] / 20
    assert pool_digest(holdfast.root / "again").tables == pool_digest(holdfast.root / "pool").tables


BAGS, SEQUENCES = "embedding_bag_collection.embedding_bags", "embedding_collection.embeddings"


def torchrec_state(seed: int = 0, collection: str = BAGS) -> OrderedDict[str, torch.Tensor]:
    """What `state_dict()` of a DLRM on TorchRec's EmbeddingBagCollection looks like, but for its own dense names; or of
    one on its EmbeddingCollection."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"module.sparse_arch.{collection}"
    state = OrderedDict(
        (f"{prefix}.{name}.weight", torch.randn(rows, 4, generator=generator))
        for name, rows in (("C1", 50), ("C2", 7), ("C3", 400))
    )
    state["module.bottom.0.weight"] = torch.randn(8, 3, generator=generator)
    state["module.bottom.0.bias"] = torch.randn(8, generator=generator)
    state["module.other.weight"] = torch.randn(2, 2, generator=generator)
    return state


@pytest.mark.parametrize(("suffix", "collection"), [(".pt", BAGS), (".safetensors", BAGS), (".pt", SEQUENCES)])
def test_a_torchrec_state_dict_moves_in_and_trains(holdfast: Commands, suffix: str, collection: str) -> None:
    state = torchrec_state(collection=collection)
    path = holdfast.root / f"state{suffix}"
    if suffix == ".pt":
        torch.save({"model": state, "epoch": 3}, path)
    else:
        save_file(dict(state), path)
    result = holdfast("import", path, holdfast.config, "--pool", holdfast.root / "pool")
    assert result.code == 0, result.err
    assert "3 tables, no optimizer state, 2 dense parameters" in result.out
    assert "other.weight" in result.out
    for number, tensor in enumerate(list(state.values())[:3]):
        assert np.array_equal(read_table(holdfast.root / "pool", number), tensor.numpy())
    with open_trainer(run_config(holdfast), holdfast.root / "pool") as trainer:
        assert torch.equal(trainer.model.state_dict()["bottom.0.weight"], state["module.bottom.0.weight"])
    assert holdfast.train().code == 0


@pytest.mark.parametrize("collection", [BAGS, SEQUENCES])
def test_optimizer_state_of_a_torchrec_checkpoint_moves_in(holdfast: Commands, collection: str) -> None:
    state = torchrec_state(collection=collection)
    momentum = {
        name: {f"{name.split('.')[-2]}.momentum1": torch.rand(tensor.shape[0])}
        for name, tensor in state.items()
        if collection in name
    }
    path = holdfast.root / "state.pt"
    torch.save({"model": state, "optimizer": {"state": momentum}}, path)
    summary = import_pool(TorchFile(path), run_config(holdfast), holdfast.root / "pool")
    assert len(summary.state) == 3
    tensors = export(holdfast.root / "pool", holdfast.root / "out.safetensors")
    ((_, expected),) = momentum[f"module.sparse_arch.{collection}.C3.weight"].items()
    assert torch.equal(tensors["optimizer.C3.momentum1"], expected)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("/dev/shm/holdfast-bomb"),))


def test_nothing_is_unpickled_but_tensors(holdfast: Commands) -> None:
    path = holdfast.root / "bomb.pt"
    torch.save({"embedding_bags.C1.weight": Bomb()}, path)
    with pytest.raises(FormatMismatch, match="not unpickled"):
        TorchFile(path)
    assert not Path("/dev/shm/holdfast-bomb").exists()


OTHERS = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
of_every_type = pytest.mark.skipif(
    not set(OTHERS) <= set(_SIZE), reason="this release of safetensors writes fewer types than torch has"
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"C3": None}, "embedding_bags.C3.weight"),
        ({"C2": torch.zeros(8, 4)}, "(8, 4)"),
        ({"C2": torch.zeros(7, 5)}, "(7, 5)"),
        ({"C2": torch.ones(7, 4, dtype=torch.int8)}, "embedding_bags.C2.weight in the file has the type torch.int8"),
        pytest.param(
            {"C2": torch.ones(7, 4).to(torch.float8_e5m2)},
            "in the file has the type torch.float8_e5m2, weights and",
            marks=of_every_type,
        ),
    ],
)
def test_a_table_that_does_not_fit_is_named_and_nothing_is_left(
    holdfast: Commands, change: dict[str, torch.Tensor | None], named: str
) -> None:
    state = {f"embedding_bags.{name}.weight": torch.zeros(n, 4) for name, n in (("C1", 50), ("C2", 7), ("C3", 400))}
    for table, tensor in change.items():
        del state[f"embedding_bags.{table}.weight"]
        if tensor is not None:
            state[f"embedding_bags.{table}.weight"] = tensor
    path = holdfast.root / "state.safetensors"
    save_file(state, path)
    with pytest.raises(ConfigError, match=re.escape(named)):
        import_pool(SafetensorsFile(path), run_config(holdfast), holdfast.root / "pool")
    assert {entry.name for entry in holdfast.root.iterdir()} == {"run.toml", "state.safetensors"}


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_an_output_never_takes_the_place_of_what_is_no_file(kind: str, holdfast: Commands) -> None:
    out = holdfast.root / "out.json"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "device":
        out.symlink_to("/dev/null")
    else:
        out.mkdir()
    before = out.lstat().st_ino
    result = holdfast("profile", holdfast.config, "-o", out, "--overwrite")
    assert (result.code, result.err.startswith(f"holdfast: output: {out} is a ")) == (1, True), result.err
    assert out.lstat().st_ino == before


@of_every_type
def test_a_file_may_have_other_tensors_of_every_type_that_torch_has(holdfast: Commands) -> None:
    path = holdfast.root / "state.safetensors"
    others = {f"other.{number}": torch.ones(3).to(dtype) for number, dtype in enumerate(OTHERS)}
    save_file(torchrec_state() | others, path)
    summary = import_pool(SafetensorsFile(path), run_config(holdfast), holdfast.root / "pool")
    assert set(others) <= set(summary.unused)


def test_a_tensor_of_a_type_that_torch_has_not_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(safetensors_bytes({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2)))
    file = SafetensorsFile(path)
    with pytest.raises(FormatMismatch, match=re.escape(f"{path}: x is of type F4")):
        file.rows("x", 0, 1)


def test_a_file_may_have_other_tensors_of_types_that_torch_has_not(holdfast: Commands) -> None:
    plain, path = holdfast.root / "plain.safetensors", holdfast.root / "state.safetensors"
    save_file(torchrec_state(), plain)
    content = plain.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header["packed"] = {"dtype": "F4", "shape": [4], "data_offsets": [len(data), len(data) + 2]}
    path.write_bytes(safetensors_bytes(header, data + bytes(2)))
    summary = import_pool(SafetensorsFile(path), run_config(holdfast), holdfast.root / "pool")
    assert "packed" in summary.unused


def test_an_import_never_touches_a_directory_that_is_there(holdfast: Commands) -> None:
    path = holdfast.root / "state.safetensors"
    save_file(dict(torchrec_state()), path)
    (holdfast.root / "pool").mkdir()
    with pytest.raises(PoolExists):
        import_pool(SafetensorsFile(path), run_config(holdfast), holdfast.root / "pool")


def test_no_pool_is_made_in_a_snapshot(holdfast: Commands) -> None:
    root = holdfast.root
    assert holdfast.train("pool", "--steps", 2).code == 0
    assert holdfast("snapshot", root / "pool", root / "snapshot").code == 0
    before = sorted(root.glob("snapshot/**/*"))
    for command in ("train", "eval"):
        refused = holdfast(command, holdfast.config, "--pool", root / "snapshot")
        assert refused.code == 1
        assert "is a snapshot, and no pool: make one of it elsewhere (holdfast restore" in refused.err
    assert sorted(root.glob("snapshot/**/*")) == before


@pytest.mark.parametrize("out", ["model.safetensors", "rows.parquet"])
def test_a_snapshot_is_exported_and_has_the_digest_of_its_pool(holdfast: Commands, out: str) -> None:
    root = holdfast.root
    assert holdfast.train("pool").code == 0
    assert holdfast("snapshot", root / "pool", root / "snapshot").code == 0
    table = ("--table", "C3") if out.endswith(".parquet") else ()
    for name in ("pool", "snapshot"):
        result = holdfast("export", root / name, root / name / out, *table)
        assert result.code == 0, result.err
    assert (root / "pool" / out).read_bytes() == (root / "snapshot" / out).read_bytes()
    assert holdfast("digest", root / "snapshot").out == holdfast("digest", root / "pool").out
    assert not list(root.glob("*/.holdfast-restored*"))
    refused = holdfast("export", root / "snapshot", root / "snapshot" / out, *table)
    assert refused.code == 1
    assert "is there already" in refused.err


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; free space there"),
        (errno.EIO, "Input/output error. Nothing is left of"),
    ],
)
def test_an_export_that_fails_names_its_file_and_leaves_none(
    number: int, words: str, holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_config(holdfast), holdfast.root / "pool")
    out = holdfast.root / "out.safetensors"

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tensor_files.os, "pwrite", refuse)
    result = holdfast("export", holdfast.root / "pool", out)
    assert result.code == 1
    assert result.err.startswith(f"holdfast: {out}: {words}")
    assert {entry.name for entry in holdfast.root.iterdir()} == {"run.toml", "pool"}


def test_an_export_that_is_there_is_replaced_only_when_asked(holdfast: Commands) -> None:
    train(run_config(holdfast), holdfast.root / "pool")
    out = holdfast.root / "out.safetensors"
    out.write_text("precious")
    assert holdfast("export", holdfast.root / "pool", out).code == 1
    assert out.read_text() == "precious"
    assert holdfast("export", holdfast.root / "pool", out, "--overwrite").code == 0
    assert "model.top.0.weight" in load_file(out)


OVER = (("a", 0), ("b", 2))  # two that have a byte in common


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", FormatMismatch),
        (b"short", FormatMismatch),
        (b"\xff" * 64, FormatMismatch),
        (b"\x04" + b"\x00" * 7 + b"{{{{", Corrupted),
        (safetensors_bytes([1]), Corrupted),
        (safetensors_bytes({"a": 1}), Corrupted),
        (safetensors_bytes({"a": {"dtype": "F9", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)), Corrupted),
        (safetensors_bytes({n: {"dtype": "U8", "shape": [3], "data_offsets": [b, b + 3]} for n, b in OVER}), Corrupted),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)), Corrupted),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), Corrupted),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4)), Corrupted),
    ],
)
def test_a_file_that_is_not_whole_is_a_typed_error(pool_root: Path, content: bytes, error: type[HoldfastError]) -> None:
    path = pool_root / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(error, match=r"bad\.safetensors"):
        SafetensorsFile(path)


def test_a_file_that_torch_did_not_save_is_a_typed_error(pool_root: Path) -> None:
    path = pool_root / "bad.pt"
    for content in (b"", b"nonsense", b"PK\x03\x04 nonsense"):
        path.write_bytes(content)
        with pytest.raises(FormatMismatch, match=r"bad\.pt"):
            TorchFile(path)
