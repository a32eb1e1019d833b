"""A vector for each id: what nn.Embedding looks up, trained as bags of one id are, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import holdfast
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import ConfigError, DataError, IdError
from holdfast.pools.read_only import at_rest, layout_of

ITEMS, SHOPS, DIM, SAMPLES, LENGTH = 400, 30, 6, 8, 5
OPTIMIZERS = [
    holdfast.SGD(lr=0.3), holdfast.Adagrad(lr=0.1), holdfast.RowWiseAdagrad(lr=0.1), holdfast.Adam(lr=0.02),
    holdfast.RowWiseAdam(lr=0.02),
]  # fmt: skip


def table(name: str, num_embeddings: int | None, features: list[str], **fields: Any) -> holdfast.EmbeddingBagConfig:
    fields = {"embedding_dim": DIM, **fields}
    return holdfast.EmbeddingBagConfig(name=name, num_embeddings=num_embeddings, feature_names=features, **fields)


def items() -> holdfast.EmbeddingBagConfig:
    return table("items", ITEMS, ["seen", "next", "other"])


def draw(number: int, *shape: int, high: int = ITEMS) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(number))


def ids_of(number: int) -> dict[str, Tensor]:
    """A sequence, what comes next in it, and one thing that does not."""
    whole = draw(number, SAMPLES, LENGTH + 1)
    whole[:, :2] *= draw(number + 1000, SAMPLES, 2, high=2)  # begins with padding, some of them
    return {"seen": whole[:, :-1], "next": whole[:, 1:], "other": draw(number + 2000, SAMPLES)}


def score(vectors: dict[str, Any]) -> Tensor:
    state = vectors["seen"].cumsum(1)
    return ((state * vectors["next"]).sum(-1) - (vectors["other"][:, None] * state).sum(-1)).square().mean()


class Life:
    """A pool, a collection over it, and a step of a loop."""

    def __init__(self, directory: Path, make: Callable[[holdfast.Pool], Any], medium: Any = "memory") -> None:
        self.directory = directory
        torch.manual_seed(0)
        self.pool = holdfast.Pool(directory, seed=2, medium=medium, log_bytes=1 << 20)
        self.rows = make(self.pool)
        self.dense = nn.Linear(DIM, 1)
        self.checkpoint = holdfast.Checkpoint(self.pool, model=self.dense, optimizer=[])
        self.checkpoint.resume()

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.rows.optimizer.step()
        self.checkpoint.commit()

    def end(self) -> str:
        self.pool.close()
        return digest_pool(_core.Reader(str(self.directory))).whole

    def touched(self, number: int = 0) -> list[int]:
        self.pool.close()
        with at_rest(self.directory) as (reader, _):
            return list(reader.touched_rows(number, 0, ITEMS))


def rows_in(directory: Path, count: int) -> Tensor:
    weights = np.zeros(count * DIM * 4, np.uint8)
    with at_rest(directory) as (reader, _):
        reader.read_rows(0, 0, count, weights, np.zeros(count * layout_of(reader.tables[0]).state_bytes, np.uint8))
    return torch.from_numpy(weights.view(np.float32).reshape(count, DIM).copy())


def test_vectors_and_their_training_are_those_of_an_embedding_with_padding(tmp_path: Path) -> None:
    life = Life(
        tmp_path / "pool",
        lambda pool: holdfast.EmbeddingCollection(pool, [items()], optimizer=holdfast.SGD(lr=0.3), padding_idx=0),
    )
    with torch.no_grad():
        begin = life.rows({"seen": torch.arange(ITEMS), "next": draw(1, 1), "other": draw(2, 1)})["seen"]
    twin = nn.Embedding(ITEMS, DIM, padding_idx=0, _weight=begin.clone())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    for number in range(6):
        ids = ids_of(number)
        vectors, expected = life.rows(ids), {name: twin(of_name) for name, of_name in ids.items()}
        for name, of_name in ids.items():
            assert vectors[name].shape == (*of_name.shape, DIM)
            torch.testing.assert_close(vectors[name], expected[name])
        optimizer.zero_grad()
        score(expected).backward()
        optimizer.step()
        life.step(score(vectors))
    assert 0 not in life.touched()
    torch.testing.assert_close(rows_in(tmp_path / "pool", ITEMS)[1:], twin.weight.detach()[1:])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_they_are_bags_of_one_id_to_the_bit(tmp_path: Path, optimizer: Any) -> None:
    sequences = Life(
        tmp_path / "sequences", lambda pool: holdfast.EmbeddingCollection(pool, [items()], optimizer=optimizer)
    )
    bags = Life(
        tmp_path / "bags",
        lambda pool: holdfast.EmbeddingBagCollection(pool, [table("items", ITEMS, ["id"])], optimizer=optimizer),
    )
    for number in range(4):
        ids = ids_of(number)
        sequences.step(score(sequences.rows(ids)))
        flat = torch.cat([of_name.reshape(-1) for of_name in ids.values()])
        pieces = torch.split(bags.rows({"id": flat})["id"], [of_name.numel() for of_name in ids.values()])
        shaped = [piece.view(*of_name.shape, DIM) for piece, of_name in zip(pieces, ids.values(), strict=True)]
        bags.step(score(dict(zip(ids, shaped, strict=True))))
    assert sequences.end() == bags.end()


def jagged_of(number: int, samples: int, *, high: int = ITEMS) -> tuple[Tensor, Tensor]:
    """Ids and offsets with the last one; some samples have none."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), draw(number, samples, high=4).cumsum(0)])
    return draw(number + 1, int(offsets[-1]), high=high), offsets


def test_sequences_of_many_lengths_stay_apart_in_tables_of_many_widths(tmp_path: Path) -> None:
    tables = [items(), table("shops", SHOPS, ["shop"], embedding_dim=3)]
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, tables))
    ids, offsets = jagged_of(3, 7)
    others, other_offsets = jagged_of(5, 2)
    shops = draw(9, 40, 2, high=SHOPS)
    found = life.rows({"seen": (ids, offsets), "next": (others, other_offsets), "shop": shops, "other": draw(7, 1)})
    alone = life.rows.eval()({"seen": ids, "next": others, "shop": shops, "other": draw(7, 1)})
    assert torch.equal(found["seen"].values(), alone["seen"])
    assert torch.equal(found["next"].values(), alone["next"])
    assert found["shop"].shape == (40, 2, 3)
    assert torch.equal(found["shop"], alone["shop"])
    assert torch.equal(found["seen"].lengths(), offsets.diff())
    assert torch.equal(found["next"].offsets(), other_offsets)


def test_vectors_may_be_changed_in_place_and_what_the_backward_needs_of_them_may_not(tmp_path: Path) -> None:
    tables = [items(), table("shops", SHOPS, ["shop"], embedding_dim=3)]
    ids = {**ids_of(1), "shop": jagged_of(5, 4, high=SHOPS)}
    ends = []
    for in_place in (True, False):
        life = Life(
            tmp_path / str(in_place),
            lambda pool: holdfast.EmbeddingCollection(pool, tables, optimizer=holdfast.SGD(lr=0.3)),
        )
        found = life.rows(ids)
        seen, shop = found["seen"], found["shop"].values()
        if in_place:
            seen += 0.5
            nn.ReLU(inplace=True)(seen)
            shop *= 3
        else:
            seen, shop = (seen + 0.5).relu(), shop * 3
        life.step(seen.square().sum() + shop.exp().sum() + found["next"].sin().sum())
        squares = (pieces := life.rows(ids))["seen"].square().sum()
        pieces["seen"].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()
        ends.append(life.end())
    assert ends[0] == ends[1]


def test_a_feature_that_the_loss_does_not_read_moves_no_row_of_its_own(tmp_path: Path) -> None:
    life = Life(
        tmp_path / "pool",
        lambda pool: holdfast.EmbeddingCollection(pool, [items()], optimizer=holdfast.SGD(lr=1.0)),
    )
    ids = {"seen": torch.tensor([[1, 2]]), "next": torch.tensor([3, 4, 5]), "other": torch.tensor([2])}
    with torch.no_grad():
        before = life.rows(ids)
    life.step(life.rows(ids)["seen"].sum())
    with torch.no_grad():
        after = life.rows(ids)
    assert torch.equal(after["next"], before["next"])
    assert torch.equal(after["seen"], before["seen"] - 1)
    assert torch.equal(after["other"], before["other"] - 1)


def test_vectors_of_jagged_ids_are_padded_cut_and_trained_through_either(tmp_path: Path) -> None:
    life = Life(
        tmp_path / "pool",
        lambda pool: holdfast.EmbeddingCollection(
            pool, [table("items", ITEMS, ["seen"])], optimizer=holdfast.SGD(lr=1.0)
        ),
    )
    ids, offsets = torch.tensor([7, 8, 9, 10]), torch.tensor([0, 3, 3, 4])
    vectors = life.rows({"seen": (ids, offsets)})["seen"]
    values = vectors.values()
    padded = vectors.to_padded_dense(padding_value=-1.0)
    assert padded.shape == (3, 3, DIM)
    assert torch.equal(padded[0], values[:3])
    assert (padded[1] == -1).all()
    assert torch.equal(padded[2, 0], values[3])
    assert (padded[2, 1:] == -1).all()
    assert torch.equal(vectors.to_padded_dense(5)[:, :3], vectors.to_padded_dense())
    cut = vectors.to_padded_dense(2)
    assert torch.equal(cut, vectors.to_padded_dense()[:, :2])
    before = values.detach().clone()
    life.step(cut.sum() + padded.sum())  # the one has 7, 8 and 10, the other all of them
    with torch.no_grad():
        after = life.rows({"seen": ids})["seen"]
    assert torch.equal(before - after, torch.tensor([2.0, 2.0, 1.0, 2.0])[:, None].expand(4, DIM))


def nested(*ids: list[int]) -> Tensor:
    return torch.nested.nested_tensor(
        [torch.tensor(of_sample, dtype=torch.int64) for of_sample in ids], layout=torch.jagged
    )


def test_nested_ids_become_nested_vectors_that_train(tmp_path: Path) -> None:
    life = Life(
        tmp_path / "pool",
        lambda pool: holdfast.EmbeddingCollection(pool, [items()], optimizer=holdfast.SGD(lr=1.0), padding_idx=0),
    )
    ids = {"seen": nested([3, 4, 0], [5]), "next": torch.tensor([3, 4, 5]), "other": torch.tensor([9])}
    found = life.rows(ids)
    assert found["seen"].is_nested
    first, second = found["seen"].unbind()
    assert torch.equal(torch.cat([first[:2], second]), found["next"])
    assert not first[2].any()
    before = found["next"].detach().clone()
    query = torch.nested.nested_tensor_from_jagged(torch.ones(4, DIM), ids["seen"].offsets())
    life.step((found["seen"] * query).sum())
    with torch.no_grad():
        assert torch.equal(life.rows(ids)["next"], before - 1)
    assert life.touched() == [3, 4, 5, 9]  # and not 0


def test_bags_may_be_nested_whole_or_of_a_part(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingBagCollection(pool, [table("items", ITEMS, ["id"])]))
    life.rows.eval()
    expected = life.rows({"id": (torch.tensor([3, 4, 5]), torch.tensor([0, 2, 3]))}).values()
    assert torch.equal(life.rows({"id": nested([3, 4], [5])}).values(), expected)
    ids, offsets, lengths = torch.tensor([8, 3, 4, 8, 8, 5, 8]), torch.tensor([1, 5, 7]), torch.tensor([2, 1])
    part = torch.nested.nested_tensor_from_jagged(ids, offsets, lengths)
    assert [of_sample.tolist() for of_sample in part.unbind()] == [[3, 4], [5]]
    assert torch.equal(life.rows({"id": part}).values(), expected)
    assert torch.equal(life.rows({"id": nested([], [])}).values(), torch.zeros(2, DIM))
    for wrong in (nested([3], [4]).float(), torch.nested.nested_tensor([torch.tensor([1])])):
        with pytest.raises(DataError, match="feature 'id'"):
            life.rows({"id": wrong})


def test_a_keyed_jagged_tensor_is_taken_with_keys_in_any_order_and_others_beside(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()]))
    bags = {name: jagged_of(number, 6) for number, name in enumerate(["other", "tags", "next", "seen"])}
    whole = holdfast.JaggedFeatures.from_bags(bags)
    weighted = holdfast.JaggedFeatures(whole.keys(), whole.values(), whole.offsets(), torch.zeros(len(whole.values())))
    life.rows.eval()
    expected = life.rows({name: bags[name] for name in ("seen", "next", "other")})
    for features in (whole, weighted):
        found = life.rows(features)
        assert list(found) == ["seen", "next", "other"]
        for name, of_name in found.items():
            assert torch.equal(of_name.values(), expected[name].values())
            assert torch.equal(of_name.offsets(), bags[name][1])


def test_padding_may_be_no_id_at_all_and_is_of_one_table(tmp_path: Path) -> None:
    tables = [items(), table("shops", SHOPS, ["shop"])]
    life = Life(
        tmp_path / "pool",
        lambda pool: holdfast.EmbeddingCollection(pool, tables, padding_idx={"items": -1}),
    )
    ids = {"seen": torch.tensor([[3, -1], [-1, -1]]), "next": torch.tensor([-1]), "other": torch.tensor([0])}
    found = life.rows({**ids, "shop": torch.tensor([0, 1])})
    assert (found["seen"] == 0).all(-1).tolist() == [[False, True], [True, True]]
    assert (found["next"] == 0).all()
    assert not (found["shop"] == 0).any()
    life.step(found["seen"].sum() + found["next"].sum() + found["other"].sum() + found["shop"].sum())
    assert life.touched() == [0, 3]
    wrong: list[tuple[Any, str]] = [
        ({"shop": 0}, "no table 'shop' "),
        ("0", "'items': '0'"),
        ({"shops": 1.0}, "an int"),
    ]
    for padding, message in wrong:
        with holdfast.Pool(tmp_path / "pool", seed=2) as pool, pytest.raises(ConfigError, match=message):
            holdfast.EmbeddingCollection(pool, tables, padding_idx=padding)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"next": torch.full((3, 2), 1).index_fill(0, torch.tensor([2]), ITEMS)}, IdError,
         rf"\[0, {ITEMS}\): {ITEMS} \(feature next, sample 2\)"),
        ({"seen": (torch.tensor([1, 2, -3]), torch.tensor([0, 0, 2, 2]))}, IdError, r"-3 \(feature seen, sample 3\)"),
        ({"other": torch.tensor([[0.5]])}, DataError, "feature 'other': ids must be an int64 or int32 tensor"),
        ({"other": torch.tensor(3)}, DataError, "feature 'other': ids must be an int64 or int32 tensor of one"),
        ({"seen": (torch.tensor([1, 2]), torch.tensor([0, 5]))}, DataError, "feature 'seen'"),
        ({"seen": [1, 2]}, DataError, "feature 'seen'"),
    ],
)  # fmt: skip
def test_ids_that_cannot_be_are_named_by_feature_and_sample(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()], padding_idx=0))
    with pytest.raises(error, match=message):
        life.rows({**ids_of(1), **changed})
    life.step(score(life.rows(ids_of(1))))  # and nothing is left of it


def test_of_tables_with_keys_no_id_is_out_of_range(tmp_path: Path) -> None:
    tables = [table("keyed", None, ["user"], capacity=5), table("items", ITEMS, ["seen"])]
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, tables))
    with pytest.raises(IdError, match=f"{ITEMS + 1} .feature seen, sample 1"):
        life.rows({"user": torch.tensor([1 << 50]), "seen": torch.tensor([3, ITEMS + 1])})


@pytest.mark.parametrize(
    "offsets", [[0, 2, 1, 3, 3, 3, 4], [-1, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4]]
)
def test_offsets_that_go_back_or_beyond_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()]))
    features = holdfast.JaggedFeatures(["seen", "next", "other"], torch.tensor([1, 2, 3, 4]), torch.tensor(offsets))
    with pytest.raises(DataError, match="do not fit 3 features with 4 ids"):
        life.rows(features)


def test_a_feature_that_is_missing_is_named(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()]))
    with pytest.raises(ConfigError, match="no feature 'other' "):
        life.rows({name: ids for name, ids in ids_of(1).items() if name != "other"})


def test_a_batch_of_nothing_is_looked_up(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()], padding_idx=0))
    nothing = torch.zeros(0, dtype=torch.int32)
    empty = torch.zeros(0, LENGTH, dtype=torch.int64)
    found = life.rows({"seen": empty, "next": (nothing, nothing), "other": torch.zeros(3, dtype=torch.int64)})
    assert found["seen"].shape == (0, LENGTH, DIM)
    assert found["next"].to_padded_dense().shape == (0, 0, DIM)
    assert torch.equal(found["other"], torch.zeros(3, DIM))
    life.step(found["seen"].sum() + found["other"].sum())
    assert life.pool.step == 1


def test_rows_of_coming_sequences_are_there_before_their_turn_with_the_same_bits(tmp_path: Path) -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        for number in itertools.count():
            yield {**ids_of(number), "label": torch.ones(SAMPLES)}

    digests = []
    for wrapped in (False, True):
        life = Life(
            tmp_path / f"wrapped {wrapped}",
            lambda pool: holdfast.EmbeddingCollection(pool, [items()], padding_idx=0),
            medium="block",
        )
        for batch in itertools.islice(holdfast.prefetch(batches(), life.pool) if wrapped else batches(), 12):
            life.step(score(life.rows(batch)))
        traffic = life.pool.traffic()
        assert traffic is not None
        assert traffic["rows_missed"] > 0
        assert (traffic["demand_fetches"] == 0) == wrapped
        digests.append(life.end())
    assert digests[0] == digests[1]


def test_keys_get_rows_in_sequences_too_and_padding_gets_none(tmp_path: Path) -> None:
    keyed = table("items", None, ["seen"], capacity=100)
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [keyed], padding_idx=0))
    ids = torch.tensor([[0, 1 << 60, -5], [0, 0, -5]])
    for _ in range(2):
        life.step(life.rows({"seen": ids})["seen"].sum())
    assert len(life.touched()) == 2


def test_a_copy_that_averages_reads_the_same_rows_and_looking_leaves_no_trace(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool", lambda pool: holdfast.EmbeddingCollection(pool, [items()], padding_idx=0))
    averaged = AveragedModel(nn.ModuleDict({"rows": life.rows, "dense": life.dense}))
    for number in range(3):
        life.step(score(life.rows(ids_of(number))))
        averaged.update_parameters(nn.ModuleDict({"rows": life.rows, "dense": life.dense}))
    averaged.eval()
    step = life.pool.step
    assert torch.equal(averaged.module["rows"](ids_of(5))["seen"], life.rows(ids_of(5))["seen"])
    life.rows.optimizer.zero_grad()
    assert life.pool.step == step


def test_bags_and_sequences_share_a_pool_and_one_norm(tmp_path: Path) -> None:
    with holdfast.Pool(tmp_path / "pool", seed=1) as pool:
        sequences = holdfast.EmbeddingCollection(pool, [items()], optimizer=holdfast.SGD(lr=1.0))
        bags = holdfast.EmbeddingBagCollection(pool, [table("shops", SHOPS, ["shop"])], optimizer=holdfast.SGD(lr=1.0))
        dense = nn.Linear(1, 1)
        checkpoint = holdfast.Checkpoint(pool, model=dense, optimizer=[])
        checkpoint.resume()
        ids = {**ids_of(1), "shop": draw(4, SAMPLES, 2, high=SHOPS)}
        loss = score(sequences(ids)) + bags(ids)["shop"].square().sum()
        loss.backward()
        norms = [rows.gradient_norm() for rows in (sequences, bags)]
        total = holdfast.clip_grad_norm_(dense.parameters(), [sequences, bags], 1e-3)
        torch.testing.assert_close(total, torch.stack(norms).norm())
        sequences.optimizer.step(), bags.optimizer.step()
        assert checkpoint.commit() == 1


@pytest.mark.parametrize("ways", ["scratchpad", "direct"])
def test_a_device_looks_sequences_up_as_the_processor_does(tmp_path: Path, ways: Any) -> None:
    found = []
    for rows in ("near_memory", ways):
        device = holdfast.DeviceConfig(kind="cpu", rows=rows)
        life = Life(
            tmp_path / rows,
            lambda pool, device=device: holdfast.EmbeddingCollection(
                pool, [items()], optimizer=holdfast.Adam(lr=0.02), device=device, padding_idx=0
            ),
        )
        for number in range(5):
            life.step(score(life.rows(ids_of(number))))
        life.pool.close()
        found.append(rows_in(tmp_path / rows, ITEMS))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], torch.zeros_like(found[0]))
