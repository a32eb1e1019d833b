"""A pool for a loop of one's own begins with rows from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.admin.exporting import export_pool
from holdfast.errors import ConfigError, FormatMismatch, PoolExists, PoolOfGroup
from holdfast.pools.read_only import at_rest

ROWS, DIM = 40, 8
STORES: list[dict[str, Any]] = [{"medium": "memory", "row_checksums": True}, {"medium": "block"}]
TABLES = [
    holdfast.EmbeddingBagConfig(name="shops", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["shop"]),
    holdfast.EmbeddingBagConfig(
        name="items", num_embeddings=None, capacity=50, embedding_dim=DIM, feature_names=["item"]
    ),
]
KEYS = torch.tensor([5, -(2**63), 2**63 - 1, 0])
BATCH = {"shop": torch.tensor([3, 0, 39, 3]), "item": KEYS}


@pytest.fixture
def source() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(2)
    keyed = {"weight": torch.randn(len(KEYS), DIM, generator=draw, dtype=torch.float64), "keys": KEYS}
    return {"shops": nn.Embedding(ROWS, DIM).weight, "items": keyed}


def looked_up(directory: Path, batch: dict[str, Tensor], optimizer: Any = None) -> Tensor:
    """What a script sees that opens the pool, and then trains it for a step."""
    with holdfast.Pool(directory) as pool:
        rows = holdfast.EmbeddingBagCollection(pool, TABLES, optimizer=optimizer)
        checkpoint = holdfast.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[])
        checkpoint.resume()
        assert pool.step == 0
        pooled = rows(batch)
        pooled.values().square().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
        assert pool.step == 1
        return pooled.values().detach()


@pytest.mark.parametrize("options", STORES)
def test_a_script_finds_what_was_imported(pool_root: Path, source: dict[str, Any], options: dict[str, Any]) -> None:
    found = holdfast.import_tables(pool_root / "pool", TABLES, source, seed=3, **options)
    assert found is not None
    assert (found.tables, found.state, found.unused) == (("shops", "items"), (), ())
    expected = torch.cat([source["shops"].detach()[BATCH["shop"]], source["items"]["weight"].float()], dim=1)
    torch.testing.assert_close(looked_up(pool_root / "pool", BATCH), expected, rtol=0, atol=0)


def test_a_key_that_was_not_imported_begins_as_in_any_pool(pool_root: Path, source: dict[str, Any]) -> None:
    unknown = {"shop": torch.tensor([1]), "item": torch.tensor([77])}
    holdfast.import_tables(pool_root / "pool", TABLES, source)
    of_items = [looked_up(pool_root / name, unknown)[:, DIM:] for name in ("pool", "never-imported")]
    assert torch.equal(*of_items)


@pytest.mark.parametrize("options", STORES)
def test_an_export_comes_back_with_the_optimizers_state(
    pool_root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    adam = holdfast.Adam(lr=0.1)
    looked_up(pool_root / "trained", BATCH, adam)

    def export(name: str) -> dict[str, Tensor]:
        """Of the tables; of keys in their order."""
        with at_rest(pool_root / name) as (reader, _):
            export_pool(reader, tmp_path / f"{name}.safetensors")
        tensors = load_file(tmp_path / f"{name}.safetensors")
        order = tensors["embedding_bags.items.keys"].argsort()
        return {
            key: value[order] if ".items." in key else value for key, value in tensors.items() if "model" not in key
        }

    exported = export("trained")
    found = holdfast.import_tables(
        pool_root / "moved", TABLES, tmp_path / "trained.safetensors", optimizer=adam, **options
    )
    assert found is not None
    assert len(found.state) == 4
    moved = export("moved")
    assert moved.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(moved[name], tensor), name


SUMS = {"momentum1": torch.rand(ROWS, DIM)}
MOMENTS = {"exp_avg": torch.randn(ROWS, DIM), "exp_avg_sq": torch.rand(ROWS, DIM)}
FBGEMM_MOMENTS = {"momentum1": MOMENTS["exp_avg"], "momentum2": MOMENTS["exp_avg_sq"]}


@pytest.mark.parametrize(
    ("optimizer", "state", "taken"),
    [
        (holdfast.Adam(), SUMS, {}),
        (holdfast.RowWiseAdam(), {"momentum1": torch.rand(ROWS)}, {}),
        (holdfast.Adam(), MOMENTS, MOMENTS),
        (holdfast.Adam(), FBGEMM_MOMENTS, MOMENTS),
        (holdfast.Adagrad(), FBGEMM_MOMENTS, {}),
        (holdfast.Adagrad(), {"momentum1": MOMENTS["exp_avg"], "exp_avg_sq": MOMENTS["exp_avg_sq"]}, {}),
        (holdfast.RowWiseAdagrad(), FBGEMM_MOMENTS, {}),
        (holdfast.Adagrad(), SUMS, SUMS),
        (holdfast.Adagrad(), {"sum": SUMS["momentum1"]}, SUMS),
        (holdfast.SGD(), SUMS, {}),
    ],
)
def test_a_table_takes_its_own_optimizers_state_and_what_is_anothers_is_named(
    pool_root: Path, optimizer: Any, state: dict[str, Tensor], taken: dict[str, Tensor]
) -> None:
    found = holdfast.import_tables(
        pool_root / "pool", TABLES[:1], {"shops": {"weight": torch.ones(ROWS, DIM)} | state}, optimizer=optimizer
    )
    assert found is not None
    names = tuple(f"optimizer.shops.{name}" for name in state)
    assert (found.state, found.unused) == ((names, ()) if taken else ((), names))
    with at_rest(pool_root / "pool") as (reader, _):
        export_pool(reader, pool_root / "out.safetensors")
    exported = load_file(pool_root / "out.safetensors")
    for name, tensor in exported.items():
        if name.startswith("optimizer."):
            expected = taken.get(name.rpartition(".")[2], torch.zeros_like(tensor))
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("optimizer", "state", "message"),
    [
        (
            holdfast.Adam(),
            {"exp_avg": MOMENTS["exp_avg"]},
            "has optimizer.shops.exp_avg, but no exp_avg_sq; put .* anew",
        ),
        (
            holdfast.Adam(),
            {"momentum2": MOMENTS["exp_avg"]},
            "has optimizer.shops.momentum2, but no exp_avg; put .* anew",
        ),
        (holdfast.RowWiseAdagrad(), SUMS, "optimizer.shops.momentum1 .* shape .* left out .* anew"),
        (holdfast.RowWiseAdam(), MOMENTS, "optimizer.shops.exp_avg_sq .* shape .* left out .* anew"),
    ],
)
def test_state_that_does_not_fit_is_named_with_how_it_begins_anew(
    pool_root: Path, optimizer: Any, state: dict[str, Tensor], message: str
) -> None:
    source = {"shops": {"weight": torch.ones(ROWS, DIM)} | state}
    with pytest.raises(ConfigError, match=message):
        holdfast.import_tables(pool_root / "pool", TABLES[:1], source, optimizer=optimizer)
    assert list(pool_root.iterdir()) == []


def test_a_script_says_the_same_in_each_of_its_lives(pool_root: Path, source: dict[str, Any]) -> None:
    holdfast.import_tables(pool_root / "pool", TABLES, source)
    assert holdfast.import_tables(pool_root / "pool", TABLES, source, exist_ok=True) is None
    with pytest.raises(PoolExists, match="name another directory"):
        holdfast.import_tables(pool_root / "pool", TABLES, source)
    (pool_root / "no-pool").mkdir()
    with pytest.raises(PoolExists):
        holdfast.import_tables(pool_root / "no-pool", TABLES, source, exist_ok=True)


def test_an_import_that_does_not_end_leaves_no_pool(
    pool_root: Path, source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.import_tables(pool_root / "pool", TABLES, source, on_bytes=interrupted)
    assert list(pool_root.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PoolOfGroup, match="without torchrun"):
        holdfast.import_tables(pool_root / "pool", TABLES, source)
    assert list(pool_root.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shops": torch.zeros(ROWS, DIM + 1)}, "embedding_bags.shops.weight .*shape"),
        ({"shops": torch.zeros(ROWS + 1, DIM)}, "embedding_bags.shops.weight .*shape"),
        ({"shops": [[0.0] * DIM] * ROWS}, "'shops': its weight is a list"),
        ({"items": {"weight": torch.zeros(2, DIM), "keys": torch.tensor([4, 4])}}, "a key more than once"),
        ({"items": {"weight": torch.zeros(2, DIM), "keys": torch.tensor([0.0, 1.0])}}, "keys are int64"),
        ({"items": {"weight": torch.zeros(51, DIM), "keys": torch.arange(51)}}, "its capacity is 50"),
        ({"items": {"keys": KEYS}}, "'items': .*tables shops"),
        ({"items": {"weight": torch.zeros(4, DIM), "momentum1": torch.zeros(3)}}, "optimizer.items.momentum1 .*shape"),
        ({"shops": torch.ones(ROWS, DIM, dtype=torch.int8)}, "embedding_bags.shops.weight .*int8.* floating"),
        ({"shops": torch.ones(ROWS, DIM).index_fill(0, torch.tensor([7]), torch.nan)}, "shops.weight .*row 7 .*finite"),
        ({"items": {"weight": torch.ones(2, DIM), "momentum1": torch.tensor([0.0, torch.inf])}}, "momentum1 .*row 1 "),
    ],
)
def test_what_does_not_fit_is_named(pool_root: Path, source: dict[str, Any], change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        holdfast.import_tables(pool_root / "pool", TABLES, source | change)
    assert list(pool_root.iterdir()) == []


def test_more_keys_than_max_keys_are_refused(pool_root: Path, source: dict[str, Any]) -> None:
    """They are equally old, so the first step would leave all of them behind."""
    shops, items = TABLES
    few = [shops, replace(items, max_keys=len(KEYS) - 1)]
    with pytest.raises(ConfigError, match=rf"'items': the file has {len(KEYS)} keys, max_keys is {len(KEYS) - 1}: "):
        holdfast.import_tables(pool_root / "pool", few, source)
    assert list(pool_root.iterdir()) == []
    assert holdfast.import_tables(pool_root / "pool", [shops, replace(items, max_keys=len(KEYS))], source) is not None


def test_what_no_table_takes_is_said(pool_root: Path, source: dict[str, Any]) -> None:
    found = holdfast.import_tables(pool_root / "pool", TABLES, {**source, "users": torch.zeros(3, 4)})
    assert found is not None
    assert found.unused == ("embedding_bags.users.weight",)


def test_what_a_row_dtype_cannot_hold_is_refused(pool_root: Path, source: dict[str, Any]) -> None:
    half = [replace(TABLES[0], data_type="fp16")]
    weight = torch.ones(ROWS, DIM)
    weight[ROWS - 1, 2] = 65504.0
    assert holdfast.import_tables(pool_root / "pool", half, {"shops": weight}) is not None
    weight[ROWS - 1, 2] = 1e5
    with pytest.raises(ConfigError, match=r"row 39 .*float16.* wider dtype"):
        holdfast.import_tables(pool_root / "other", half, {"shops": weight})


def test_rows_that_no_id_has_may_hold_anything(pool_root: Path) -> None:
    weight = torch.full((3, DIM), torch.nan)
    weight[1] = 2.0
    managed = {
        "m.embedding_bags.items.weight": weight,
        "m._managed_collision_modules.items._mch_sorted_raw_ids": torch.tensor([70, 2**63 - 1, 2**63 - 1]),
        "m._managed_collision_modules.items._mch_remapped_ids_mapping": torch.tensor([1, 0, 2]),
    }
    torch.save(managed, pool_root / "managed.pt")
    assert holdfast.import_tables(pool_root / "pool", [TABLES[1]], pool_root / "managed.pt") is not None


def test_what_is_cut_over_ranks_is_told_to_become_whole(pool_root: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        cut = distribute_tensor(torch.randn(ROWS, DIM), mesh, [Shard(0)])
        with pytest.raises(ConfigError, match=r"a DTensor; give it as a plain tensor \(of a DTensor full_tensor\(\)\)"):
            holdfast.import_tables(pool_root / "pool", TABLES[:1], {"shops": cut})
        holdfast.import_tables(pool_root / "pool", TABLES[:1], {"shops": cut.full_tensor()})
    finally:
        torch.distributed.destroy_process_group()


def test_a_folder_is_told_to_become_a_file(pool_root: Path) -> None:
    (pool_root / "checkpoint").mkdir()
    with pytest.raises(FormatMismatch, match=r"dcp_to_torch FOLDER OUT\.pt"):
        holdfast.import_tables(pool_root / "pool", TABLES[:1], pool_root / "checkpoint")
