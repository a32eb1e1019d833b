"""What forward takes, and what it refuses: shapes like TorchRec's, ids out of range, verbs out of order."""

from __future__ import annotations

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, unique
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import (
    SGD,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    MediumDial,
    Pool,
    RowWiseAdagrad,
    _core,
)
from holdfast.errors import ConfigError, DataError, HoldfastError, IdError, PoolBusy, StepError
from row_reference import Bags
from twin import Twin, jagged, random_bags, random_weights, same_bits, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=4, pooling="mean")]


@unique
class DataType(Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@unique
class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class Keyed:
    """As much of TorchRec's KeyedJaggedTensor as holdfast uses."""

    def __init__(self, bags: Bags, keys: list[str], *, ids: torch.dtype, offsets: torch.dtype, weights=None) -> None:
        ragged = jagged(bags, weights, keys)
        self._keys, self._weights = keys, ragged.weights_or_none()
        self._values, self._offsets = ragged.values().to(ids), ragged.offsets().to(offsets)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        return self._weights


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_keyed_jagged_tensor_may_have_other_keys_between_and_any_order(
    pool_root: Path, ids: torch.dtype, offsets: torch.dtype, weighted: bool
):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        bags = {**random_bags("abc", 20, 5, seed=1), "foreign": [[1 << 30]] * 5, "other": [[]] * 5}
        weights = random_weights(bags, seed=2) if weighted else None
        keyed = Keyed(bags, ["foreign", "c", "b", "other", "a"], ids=ids, offsets=offsets, weights=weights)
        output = twin.emb(keyed)
        assert same_bits(output.values(), twin.forward(bags, weights))
        coefficients = twin.coefficients(5, seed=3)
        (output.values() * coefficients).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients, weights))
        twin.check()


def test_the_result_reads_like_a_keyed_tensor(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        bags = random_bags("abc", 20, 5, seed=1)
        output = twin.emb(jagged(bags, keys="cba"))
        assert output.keys() == ["a", "b", "c"]
        assert output.length_per_key() == [8, 8, 4]
        assert output.values().shape == (5, 20)
        assert same_bits(output["b"], twin.tables[0].pool(bags["b"], None))
        assert list(output.to_dict()) == ["a", "b", "c"]
        assert torch.equal(output.to_dict()["c"], output["c"])


@pytest.mark.parametrize("include_last_offset", [False, True])
def test_ids_and_offsets_of_torchs_embedding_bag_are_taken_feature_by_feature(
    pool_root: Path, include_last_offset: bool
):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        bags = {feature: [[1, 2], [], [3, 3], [4]] for feature in "cab"}
        pairs = {}
        for feature, of_feature in bags.items():
            ragged = jagged({feature: of_feature})
            pairs[feature] = (ragged.values(), ragged.offsets() if include_last_offset else ragged.offsets()[:-1])
        assert same_bits(twin.emb(pairs).values(), twin.forward(bags))


def test_a_planned_batch_may_come_from_another_thread(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, Adam(lr=0.1)) as twin, ThreadPoolExecutor(2) as threads:
        batches = [random_bags("abc", 20, 5, seed) for seed in range(6)]
        plans = [threads.submit(twin.emb.plan, jagged(bags)) for bags in batches]
        for bags, plan in zip(batches, plans, strict=True):
            assert same_bits(twin.emb(plan.result()).values(), twin.forward(bags))


def test_torchrecs_table_configs_are_taken_with_their_enums(pool_root: Path):
    theirs = [
        SimpleNamespace(
            num_embeddings=20,
            embedding_dim=8,
            name="t",
            feature_names=["a", "b"],
            data_type=DataType.BF16,
            pooling=PoolingType.MEAN,
            weight_init_max=None,
            weight_init_min=None,
            init_fn=None,
            need_pos=False,
        ),
        SimpleNamespace(num_embeddings=5, embedding_dim=4, name="u", feature_names=["c"]),
    ]
    ours = [table("t", ["a", "b"], data_type="bf16", pooling="mean"), table("u", ["c"], rows=5, dim=4)]
    with Pool(pool_root / "pool", seed=7) as pool:
        emb = EmbeddingBagCollection(pool, theirs, optimizer=SGD())
        configs = emb.embedding_bag_configs()
        assert [(config.data_type, config.pooling) for config in configs] == [("bf16", "mean"), ("fp32", "sum")]
    with Twin(pool_root / "pool", ours, SGD()) as twin:
        twin.check()
        with pytest.raises(ConfigError, match=r"table 't': init_fn"):
            EmbeddingBagCollection(twin.pool, [SimpleNamespace(**{**vars(theirs[0]), "init_fn": print})])


@pytest.mark.parametrize("wanted", [SGD, torch.optim.SGD([torch.zeros(1)], lr=0.1), 0.1])
def test_an_optimizer_that_is_none_of_rows_is_refused_before_a_pool_is_made(pool_root: Path, wanted: object):
    with (
        Pool(pool_root / "pool") as pool,
        pytest.raises(ConfigError, match=r"optimizer = (SGD|float); it must be a row"),
    ):
        EmbeddingBagCollection(pool, TABLES, optimizer=wanted)
    assert not (pool_root / "pool").exists()


def test_a_feature_of_two_tables_and_a_table_that_differs_are_told_what_leads_there(pool_root: Path):
    def rows_of(*tables: Any, optimizer: Any = None) -> None:
        with Pool(pool_root / "pool", seed=1) as pool:
            EmbeddingBagCollection(pool, tables, optimizer=optimizer)

    with pytest.raises(ConfigError, match=r"feature 'a' .* a name of its own for the same ids"):
        rows_of(table("deep", ["a"]), table("linear", ["a"], dim=1))
    rows_of(table("t", ["a"]))
    with pytest.raises(ConfigError, match=r"num_embeddings = 20, now it is 40.*restore --rows"):
        rows_of(table("t", ["a"], rows=40))
    with pytest.raises(ConfigError, match=r"optimizer = .*, now it is adam.*export, then import"):
        rows_of(table("t", ["a"]), optimizer=Adam())


def test_one_text_as_feature_names_is_no_list_of_its_letters(pool_root: Path):
    with pytest.raises(ConfigError, match=r"table 't': feature_names = .*user.*a list of names"):
        EmbeddingBagCollection(
            Pool(pool_root / "pool"),
            [EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names="user")],
        )


def test_a_table_as_a_dict_is_told_to_become_a_config(pool_root: Path):
    """Of a dict, `keys` is a method: an OmegaConf node was said to have keys."""
    node = {"name": "t", "num_embeddings": 5, "embedding_dim": 4, "feature_names": ["t"]}
    with Pool(pool_root / "pool") as pool, pytest.raises(ConfigError, match=r"a table is a dict; make an Embedding"):
        EmbeddingBagCollection(pool, [node])


def refuses(twin: Twin, features, error: type[HoldfastError], *words: str) -> None:
    """forward raises an error that has all these words, in training and in evaluation, and changes nothing."""
    twin.pool.flush()
    files_before = {path: path.read_bytes() for path in twin.pool.directory.rglob("*") if path.is_file()}
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(error) as raised:
            twin.emb(features)
        missing = [word for word in words if word not in str(raised.value)]
        assert not missing, str(raised.value)
    twin.pool.flush()
    assert files_before == {path: path.read_bytes() for path in twin.pool.directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("value", [-1, 20, 1 << 40, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("feature", ["a", "b"])
def test_an_id_out_of_range_names_feature_sample_and_value_and_changes_nothing(
    pool_root: Path, feature: str, value: int
):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        twin.step(random_bags("abc", 20, 5, seed=1), seed=1)
        bags = {key: [[1], [2, 3], [], [4, 5], [6]] for key in "abc"}
        bags[feature] = [[1], [2, 3], [], [4, value], [6]]
        refuses(twin, jagged(bags, keys="cba"), IdError, f"'{feature}'", "sample 3", str(value), "[0, 20)")
        twin.step(random_bags("abc", 20, 5, seed=2), seed=2)
        twin.check()


def test_a_bad_id_is_a_value_error_too(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin, pytest.raises(ValueError, match="outside"):
        twin.emb(jagged({"a": [[-5]], "b": [[]], "c": [[]]}))


def shaped_like(values, offsets, weights=None) -> SimpleNamespace:
    return SimpleNamespace(
        keys=lambda: ["a", "b", "c"],
        values=lambda: values,
        offsets=lambda: offsets,
        weights_or_none=lambda: weights,
    )


@pytest.mark.parametrize(
    ("values", "offsets", "weights"),
    [
        (torch.arange(3), torch.tensor([0, 1, 2, 4]), None),
        (torch.arange(3), torch.tensor([0, 2, 1, 3]), None),
        (torch.arange(3), torch.tensor([-1, 1, 2, 3]), None),
        (torch.arange(3), torch.tensor([0, 1, 2]), None),
        (torch.arange(3), torch.tensor([], dtype=torch.int64), None),
        (torch.arange(3), torch.tensor([0.0, 1.0, 2.0, 3.0]), None),
        (torch.arange(3).float(), torch.arange(4), None),
        (torch.arange(3), torch.arange(4), torch.ones(2)),
        (torch.arange(3), torch.arange(4), torch.ones(3, dtype=torch.int64)),
        (torch.arange(4).view(2, 2), torch.arange(4), None),
    ],
    ids=[
        "offsets beyond the ids",
        "offsets that go back",
        "a negative offset",
        "offsets too few",
        "no offsets",
        "float offsets",
        "float ids",
        "weights too few",
        "integer weights",
        "a matrix of ids",
    ],
)
def test_tensors_that_do_not_fit_together_are_a_data_error(pool_root: Path, values, offsets, weights):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        refuses(twin, shaped_like(values, offsets, weights), DataError)


IDS = torch.arange(3)


@pytest.mark.parametrize("ids", [IDS.to_sparse(), IDS.to("meta")], ids=["sparse", "meta"])
def test_ids_that_lie_in_no_plain_memory_are_a_data_error(pool_root: Path, ids: torch.Tensor):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        for refused in (ids, (ids, IDS), (IDS, ids)):
            refuses(
                twin, {"a": IDS, "b": refused, "c": IDS}, DataError, "feature 'b'", "int64 or int32 tensor, not (3,)"
            )
        refuses(twin, shaped_like(ids, torch.arange(4)), DataError, "ids are")
        refuses(twin, shaped_like(IDS, torch.arange(4).to_sparse()), DataError, "offsets are of layout")
        sequences = EmbeddingCollection(twin.pool, [table("t", ["a", "b"])], optimizer=SGD())
        with pytest.raises(DataError, match=r"feature 'b': ids must be .* not \(3,\) torch.int64 "):
            sequences({"a": IDS, "b": ids})


def test_a_feature_that_a_batch_has_twice_is_named(pool_root: Path):
    """The second one was left out."""
    twice = SimpleNamespace(
        keys=lambda: ["a", "b", "c", "b"],
        values=lambda: torch.arange(4),
        offsets=lambda: torch.arange(5),
        weights_or_none=lambda: None,
    )
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        refuses(twin, twice, DataError, "feature 'b' more than once")


@pytest.mark.parametrize("ids", [[1, 2], torch.tensor(1), torch.tensor([[1, 2]])], ids=["list", "scalar", "matrix"])
def test_ids_to_read_that_are_no_row_of_numbers_are_a_data_error(pool_root: Path, ids: Any):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin, pytest.raises(DataError, match="a tensor of one dimension"):
        twin.emb.read(0, ids)


def test_a_missing_feature_is_named(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        refuses(twin, jagged({"a": [[1]], "c": [[1]]}), ConfigError, "'b'")


class Frame:
    """As a data frame of pandas, which has columns by name and is no Mapping."""

    keys = values = list


@pytest.mark.parametrize("features", [torch.tensor([1]), [1, 2], "a", None, Frame()])
def test_what_is_no_features_at_all_says_what_are(pool_root: Path, features):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        refuses(twin, features, DataError, "a dict", "or a KeyedJaggedTensor", f"not a {type(features).__name__}")


def test_a_second_pool_of_this_process_is_busy_and_says_where(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()), pytest.raises(PoolBusy, match="in this process already; close that"):
        Pool(pool_root / "pool")


def test_a_pool_that_nobody_has_any_more_is_not_in_the_way_of_the_next_one(pool_root: Path):
    """A function that ended, by Ctrl-C perhaps: there is nothing left that its caller could close."""

    def train_a_step() -> None:
        Twin(pool_root / "pool", TABLES, SGD(lr=0.1)).step(random_bags("abc", 20, 5, seed=1), seed=1)

    gc.disable()
    try:
        train_a_step()
        with Pool(pool_root / "pool") as pool:
            assert pool.step == 1
    finally:
        gc.enable()


def test_a_forward_between_update_and_commit_is_a_step_error(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags = random_bags("abc", 20, 5, seed=1)
        coefficients = twin.coefficients(5, seed=1)
        (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
        twin.emb.optimizer.step()
        with pytest.raises(StepError, match="step 1 has updated its rows already: commit it"):
            twin.emb(jagged(bags))
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.step(bags, seed=2)
        twin.check()


def test_a_backward_after_the_commit_is_a_step_error(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        loss = twin.emb(jagged(random_bags("abc", 20, 5, seed=1))).values().sum()
        twin.pool.commit(5)
        with pytest.raises(StepError, match="a forward of step 1, which is over"):
            loss.backward()
        twin.step(random_bags("abc", 20, 5, seed=2), seed=2)
        twin.check()


def test_a_second_update_of_a_table_in_one_step_is_a_step_error(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags, coefficients = random_bags("abc", 20, 5, seed=1), twin.coefficients(5, seed=1)
        first = (twin.emb(jagged(bags)).values() * coefficients).sum()
        second = (twin.emb(jagged(bags)).values() * coefficients).sum()
        first.backward()
        twin.emb.optimizer.step()
        second.backward()
        with pytest.raises(StepError, match="table 't'"):
            twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


def test_a_table_that_two_collections_update_in_one_step_is_a_step_error_that_says_what_to_do(pool_root: Path):
    """To commit first, as it said, would have left out what the second one had to update."""
    with Pool(pool_root / "pool") as pool:
        first, second = (EmbeddingBagCollection(pool, [table("t", ["a"])], optimizer=SGD(lr=0.1)) for _ in range(2))
        features = jagged(random_bags("a", 20, 5, seed=1))
        (first(features).values() + second(features).values()).sum().backward()
        first.optimizer.step()
        with pytest.raises(StepError, match=r"table 't' were updated.*by another collection.*let one collection read"):
            second.optimizer.step()


def test_a_thread_that_trains_beside_another_is_refused_and_changes_nothing(pool_root: Path):
    dial = MediumDial(like="cxl-pmem", read_latency_s=0.01)  # so that threads meet in the verbs
    with Pool(pool_root / "pool", dial=dial) as pool:
        rows = EmbeddingBagCollection(pool, [table("t", ["a"])], optimizer=SGD(lr=0.1))
        features = jagged(random_bags("a", 20, 5, seed=1))
        refused: list[str] = []

        def capture(_: int) -> None:
            try:
                rows(features)
            except StepError as error:
                refused.append(str(error))

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(capture, range(40)))
        assert refused
        assert all("one thread trains, others may plan and evaluate" in words for words in refused)
        rows(features).values().sum().backward()
        rows.optimizer.step()
        assert pool.commit(5) == 1
    assert _core.Reader(str(pool_root / "pool")).verify() == []


def test_two_collections_on_one_pool_update_their_tables_in_one_step(pool_root: Path):
    tables = [table("t", ["a"]), table("u", ["a"])]
    with Twin(pool_root / "pool", [tables[0]], Adam(lr=0.1)):
        pass
    with Pool(pool_root / "both") as pool:
        features = [table("t", ["a"]), table("u", ["b"])]
        both = EmbeddingBagCollection(pool, features, optimizer=Adam(lr=0.1))
        start = both(jagged({"a": [[1]], "b": [[1]]})).values().detach().clone()
        of_t = EmbeddingBagCollection(pool, features[:1], optimizer=Adam(lr=0.1))
        of_u = EmbeddingBagCollection(pool, features[1:], optimizer=Adam(lr=0.1))
        (of_t(jagged({"a": [[1]]})).values().sum() + of_u(jagged({"b": [[1]]})).values().sum()).backward()
        of_t.optimizer.step()
        of_u.optimizer.step()
        pool.commit(1)
        moved = both(jagged({"a": [[1]], "b": [[1]]})).values().detach()
        torch.testing.assert_close(moved, start - 0.1, rtol=0, atol=1e-6)
        assert pool.core.row_updates == 1


def test_an_update_without_a_backward_does_nothing(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, Adam(lr=0.1)) as twin:
        twin.emb(jagged(random_bags("abc", 20, 5, seed=1)))
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        assert twin.pool.core.row_updates == 0
        twin.check()


def test_a_closure_is_called_once_and_rows_are_updated_with_its_gradients(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, Adam(lr=0.1)) as twin:
        bags, coefficients = random_bags("abc", 20, 5, seed=1), twin.coefficients(5, seed=1)
        losses: list[Tensor] = []

        def closure() -> float:
            twin.emb.optimizer.zero_grad()
            losses.append((twin.emb(jagged(bags)).values() * coefficients).sum())
            losses[-1].backward()
            return losses[-1].item()

        closure()  # its gradients are none of the update's: the next call forgets them
        with torch.no_grad():
            assert twin.emb.optimizer.step(closure) == losses[1].item()
        assert len(losses) == 2
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


def test_a_closed_pool_refuses_every_verb(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        features = jagged(random_bags("abc", 20, 5, seed=1))
        twin.pool.close()
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), pytest.raises(StepError, match="closed"):
                twin.emb(features)
        with pytest.raises(StepError, match="closed"):
            twin.pool.commit(1)
        twin.pool.close()


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("field", ["lr", "weight_decay", "eps"])
def test_a_hyperparameter_that_makes_every_row_infinite_is_refused_when_it_is_said(field: str, value: float):
    with pytest.raises(ConfigError, match=f"Adam: {field} = .*finite, and not negative"):
        Adam(**{"lr": 0.1, field: value})
