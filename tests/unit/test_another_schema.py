"""An import under another schema: tables and modules that are new, have another name, or are left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import holdfast as hf
from cli_runs import Commands, Result
from holdfast.admin.schema import RenamedTensors
from holdfast.errors import ConfigError

CONFIG = """
[data.parquet]
paths = ["clicks.parquet"]
label = "label"
dense = ["I1", "I2"]

[data.parquet.sparse]
shop = { column = "C1", num_embeddings = 50 }
item = { column = "C2", keys = true, num_embeddings = 500 }

[embedding]
dim = 4
optimizer = "adagrad"
lr = 0.05

[model]
bottom = [8, 4]
top = [8, 1]

[train]
batch_size = 32
"""
# shop and item have become store and product, and there is a column more, so the top's first layer is larger.
LATER = CONFIG.replace(
    """shop = { column = "C1", num_embeddings = 50 }
item = { column = "C2", keys = true, num_embeddings = 500 }
""",
    """brand = { column = "C3", num_embeddings = 30 }
product = { column = "C2", keys = true, num_embeddings = 800 }
store = { column = "C1", num_embeddings = 50 }
""",
)
RENAMES = ("--rename", "shop=store", "--rename", "item=product")


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    commands = Commands(pool_root, monkeypatch, capfd)
    monkeypatch.chdir(pool_root)
    commands.config.write_text(CONFIG)
    (pool_root / "later.toml").write_text(LATER)
    synthetic = "data synth clicks.parquet --samples 640 --tables 3 --rows 300 --dense 2"
    assert commands(*synthetic.split()).code == 0
    assert commands.train("before").code == 0
    assert commands("export", "before", "before.safetensors").code == 0
    return commands


def move(holdfast: Commands, pool: str, *options: str) -> Result:
    return holdfast("import", "before.safetensors", "later.toml", "--pool", pool, *options)


def test_tables_with_other_names_keep_rows_and_state_and_a_new_one_begins(holdfast: Commands) -> None:
    said = move(holdfast, "later", *RENAMES, "--new", "brand", "--new", "top.0.weight")
    assert said.code == 0, said.err
    assert "new: brand, top.0.weight" in said.out
    assert holdfast("export", "later", "later.safetensors").code == 0
    before, later = load_file("before.safetensors"), load_file("later.safetensors")
    for old, new in (("shop", "store"), ("item", "product")):
        for name in (f"embedding_bags.{old}.weight", f"optimizer.{old}.momentum1"):
            assert torch.equal(before[name], later[name.replace(old, new)]), name
    assert torch.equal(before["embedding_bags.item.keys"], later["embedding_bags.product.keys"])
    assert not later["optimizer.brand.momentum1"].any()
    assert later["model.top.0.weight"].shape != before["model.top.0.weight"].shape
    for name in ("model.top.0.bias", "model.bottom.0.weight"):
        assert torch.equal(before[name], later[name])
    trained = holdfast("train", "later.toml", "--pool", "later")
    assert trained.code == 0, trained.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("table 'brand'", "--new brand", "--rename OTHER=brand")),
        ((*RENAMES, "--new", "brand"), ("model.top.0.weight", "--new top.0.weight")),
        (("--new", "brands"), ("'brands'", "tables brand, product, store")),
        (("--rename", "stores=store"), ("'stores'", "tables item, shop")),
        (("--rename", "shop=item"), ("would both be embedding_bags.item.",)),
        (("--rename", "shop"), ("OLD=NEW",)),
    ],
)
def test_what_does_not_fit_is_named_with_what_to_say(
    holdfast: Commands, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused = move(holdfast, "later", *options)
    assert refused.code == 1
    assert all(word in refused.err for word in words), refused.err
    assert not Path("later").exists()


def test_a_table_of_another_width_begins_anew_where_it_is_said(holdfast: Commands) -> None:
    Path("later.toml").write_text(CONFIG.replace("num_embeddings = 50 }", "num_embeddings = 70 }"))
    refused = move(holdfast, "later")
    assert refused.code == 1
    assert "--new shop" in refused.err
    said = move(holdfast, "later", "--new", "shop")
    assert said.code == 0, said.err
    assert "not used: embedding_bags.shop.weight, optimizer.shop.momentum1" in said.out


@pytest.mark.parametrize("name", ["model", "model.top"])
def test_modules_begin_anew_with_all_of_theirs(holdfast: Commands, name: str) -> None:
    Path("later.toml").write_text(CONFIG)
    said = move(holdfast, "later", "--new", name)
    assert said.code == 0, said.err
    assert ("bottom.0.weight" in said.out.partition("not used")[0]) == (name == "model")
    assert holdfast("export", "later", "later.safetensors").code == 0
    before, later = load_file("before.safetensors"), load_file("later.safetensors")
    is_same = {name: torch.equal(before[name], later[name]) for name in before if name.endswith("weight")}
    assert {module for module, same in is_same.items() if not same} == {
        module for module in is_same if module.startswith(f"{name}.")
    }


class Tensors:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        return self.tensors[name][first : first + count]


def names_of(table: str) -> list[str]:
    return [
        f"net.embedding_bags.{table}.weight",
        f"net.embedding_bags.{table}.weight.{table}.momentum1",
        f"optimizer.{table}.exp_avg",
        f"a._managed_collision_modules.{table}._mch_sorted_raw_ids",
    ]


NAMES = st.lists(st.sampled_from(["a", "b", "a.b", "b.a", "a.b.c", "weight.a", "item", "top"]), min_size=1, unique=True)


@given(NAMES, st.data())
def test_tables_change_places_and_modules_of_their_names_stay(tables: list[str], data: st.DataObject) -> None:
    others = data.draw(st.permutations(tables))
    in_file = {name: torch.tensor([number]) for number, table in enumerate(tables) for name in names_of(table)}
    modules = {f"model.{table}.bias": torch.tensor([-1 - number]) for number, table in enumerate(tables)}
    renamed = RenamedTensors(Tensors(in_file | modules), dict(zip(tables, others, strict=True)))
    expected = {name: number for number, table in enumerate(others) for name in names_of(table)}
    expected |= {name: int(tensor) for name, tensor in modules.items()}
    assert {name: int(renamed.rows(name, 0, 1)) for name in renamed.shapes()} == expected


def test_a_module_of_a_tables_name_goes_by_its_whole_name() -> None:
    file = Tensors({"embedding_bags.item.weight": torch.zeros(3, 2), "model.item.weight": torch.ones(4, 2)})
    renamed = RenamedTensors(file, {"model.item": "model.goods"})
    assert renamed.shapes() == {"embedding_bags.item.weight": (3, 2), "model.goods.weight": (4, 2)}


def test_a_script_imports_tables_under_another_schema(pool_root: Path) -> None:
    old = nn.Embedding(40, 8).weight.detach()
    state = {"embedding_bags.items.weight": old, "embedding_bags.gone.weight": old.clone()}
    save_file(state, pool_root / "old.safetensors")
    tables = [
        hf.EmbeddingBagConfig(name="new", num_embeddings=9, embedding_dim=3, feature_names=["new"]),
        hf.EmbeddingBagConfig(name="goods", num_embeddings=40, embedding_dim=8, feature_names=["good"]),
    ]
    options = {"new": ["new"], "rename": {"items": "goods"}}
    found = hf.import_tables(pool_root / "pool", tables, pool_root / "old.safetensors", **options)
    assert found is not None
    assert (found.tables, found.unused) == (("goods",), ("embedding_bags.gone.weight",))
    with hf.Pool(pool_root / "pool") as pool:
        rows = hf.EmbeddingBagCollection(pool, tables)
        hf.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[]).resume()
        with torch.no_grad():
            pooled = rows({"good": torch.tensor([[7]]), "new": torch.tensor([[2]])})
    assert torch.equal(pooled.to_dict()["good"][0], old[7])
    with pytest.raises(ConfigError, match="'other' is to be new, but there is no such table"):
        hf.import_tables(pool_root / "other", tables, pool_root / "old.safetensors", new=["other"])
