"""Routes and routed plans through the binding: two pools that each have the rows of some shards do together what one
pool does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast import EmbeddingBagConfig, Pool, _core
from holdfast.errors import ConfigError, DataError, IdError
from holdfast.pools.optim import OPTIMIZERS, SGD
from holdfast.pools.tables import normalize_all

SHARDS = 4
OWNER_OF_SHARD = [0, 1, 1, 0]
ROWS = 100
DIM = 8
STRIDE = 32768
FEATURES = [("a", 0), ("b", 1), ("c", 0)]
NUM_SAMPLES = 6


def mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ (x >> 31)


def place_of(row: int) -> int:
    stripe = row // SHARDS
    return (row + mixed(stripe)) % SHARDS * STRIDE + stripe


def a_router(*, numbers_ids: bool = False) -> _core.Router:
    """Of a table that is split, and of a mean over one that the owner of shard 2 has whole."""
    tables = [(ROWS, DIM, 0, 0, True, None), (ROWS, DIM, 1, 2, False, None)]
    return _core.Router(tables, FEATURES, OWNER_OF_SHARD, 2, numbers_ids)


class Owner:
    """A pool that knows rows by their places, as an owner's does."""

    def __init__(self, directory: Path) -> None:
        tables = [
            EmbeddingBagConfig(
                num_embeddings=SHARDS * STRIDE, embedding_dim=DIM, name="split", feature_names=["a", "c"]
            ),
            EmbeddingBagConfig(
                num_embeddings=ROWS, embedding_dim=DIM, name="whole", feature_names=["b"], pooling="mean"
            ),
        ]
        self.pool = Pool(directory, seed=3, log_bytes=1 << 18)
        numbers = self.pool.attach(normalize_all(tables), SGD().kind, OPTIMIZERS)
        self.core = self.pool.core.collection(numbers, FEATURES)

    def lookup(self, plan: _core.Plan) -> np.ndarray:
        out = np.empty((plan.num_bags, plan.output_width), np.float32)
        self.pool.core.evaluate(plan, out)
        return out

    def train(self, plan: _core.Plan, grad: np.ndarray) -> None:
        capture = self.pool.core.capture(plan)
        self.pool.core.update(
            [(capture, grad)],
            learning_rate=0.5,
            epsilon=0,
            beta1=0,
            beta2=0,
            weight_decay=0,
            gradient_scale=1,
        )
        self.pool.commit(1)


class Group:
    """Trainers that each have some of a batch's samples, and two owners."""

    def __init__(self, owners: list[Owner], ids: np.ndarray, offsets: np.ndarray, cuts: list[int]) -> None:
        router = a_router()
        self.owners = owners
        self.routes = [router.route(ids, offsets, None, [0, 1, 2], 3, begin, end) for begin, end in pairwise(cuts)]
        self.plans = [
            owner.core.plan_routed(
                np.stack([route.counts[o] for route in self.routes]),
                np.concatenate([cut(route.message, route.message_words)[o] for route in self.routes]),
                False,
            )
            for o, owner in enumerate(owners)
        ]

    def lookup(self) -> np.ndarray:
        sent = [
            np.split(owner.lookup(plan)[0], np.cumsum(plan.output_floats)[:-1])
            for owner, plan in zip(self.owners, self.plans, strict=True)
        ]
        outs = []
        for m, route in enumerate(self.routes):
            out = np.empty((route.num_bags, len(FEATURES) * DIM), np.float32)
            route.combine(np.concatenate([of_owner[m] for of_owner in sent]), out)
            outs.append(out)
        return np.concatenate(outs)

    def train(self, grad: np.ndarray) -> None:
        blocks = []
        begin = 0
        for route in self.routes:
            of_route = np.empty(int(route.block_floats.sum()), np.float32)
            route.spread(grad[begin : begin + route.num_bags], of_route)
            blocks.append(cut(of_route, route.block_floats))
            begin += route.num_bags
        for o, (owner, plan) in enumerate(zip(self.owners, self.plans, strict=True)):
            owner.train(plan, np.concatenate([of_route[o] for of_route in blocks])[None])


def cut(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])


def a_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    lengths = random.integers(0, 5, len(FEATURES) * NUM_SAMPLES)
    return random.integers(0, ROWS, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize("cuts", [[0, NUM_SAMPLES], [0, 2, 2, NUM_SAMPLES]])
def test_owners_of_shards_train_like_one_pool(pool_root: Path, cuts: list[int]) -> None:
    ids, offsets = a_batch()
    owners = [Owner(pool_root / "owner-0"), Owner(pool_root / "owner-1")]
    group = Group(owners, ids, offsets, cuts)
    one = Owner(pool_root / "one")
    places = np.array([place_of(row) for row in range(ROWS)])
    begin_b, end_b = offsets[NUM_SAMPLES], offsets[2 * NUM_SAMPLES]
    where = places[ids]
    where[begin_b:end_b] = ids[begin_b:end_b]
    plan = one.core.plan(where, offsets, None, [0, 1, 2], 3, False)

    for _ in range(2):  # before training, and after it
        pooled = group.lookup()
        np.testing.assert_allclose(pooled, one.lookup(plan), atol=1e-6)
        assert (pooled[:, DIM : 2 * DIM] == one.lookup(plan)[:, DIM : 2 * DIM]).all()
        if one.pool.step == 0:
            grad = np.random.default_rng(6).standard_normal(pooled.shape, np.float32)
            group.train(grad)
            one.train(plan, grad)
    for owner in [*owners, one]:
        owner.pool.close()


def test_ids_that_come_again_travel_as_numbers_and_are_the_same_rows(pool_root: Path) -> None:
    owners = [Owner(pool_root / "owner-0"), Owner(pool_root / "owner-1")]
    random = np.random.default_rng(9)
    lengths = random.integers(0, 40, len(FEATURES) * NUM_SAMPLES)
    ids = random.integers(0, 12, lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sent, pooled = [], []
    for numbers_ids in (False, True):
        route = a_router(numbers_ids=numbers_ids).route(ids, offsets, None, [0, 1, 2], 3, 0, NUM_SAMPLES)
        messages = cut(route.message, route.message_words)
        blocks = [
            owner.lookup(owner.core.plan_routed(route.counts[o : o + 1], messages[o], False))[0]
            for o, owner in enumerate(owners)
        ]
        out = np.empty((NUM_SAMPLES, len(FEATURES) * DIM), np.float32)
        route.combine(np.concatenate(blocks), out)
        sent.append(len(route.message))
        pooled.append(out)
    assert sent[1] < 0.75 * sent[0]
    assert (pooled[0] == pooled[1]).all()
    for owner in owners:
        owner.pool.close()


def test_a_batch_without_ids_is_routed_too(pool_root: Path) -> None:
    owner = Owner(pool_root / "owner")
    route = a_router().route(np.empty(0, np.int64), np.zeros(3 * 2 + 1, np.int32), None, [0, 1, 2], 3, 0, 2)
    assert route.message.shape == (0,)
    assert route.counts.shape == (2, 3, 2)
    assert not route.counts.any()
    plan = owner.core.plan_routed(route.counts[:1], route.message, True)
    assert (plan.num_bags, plan.output_width, plan.output_floats) == (1, 0, [0])
    out = np.ones((2, 3 * DIM), np.float32)
    route.combine(np.empty(0, np.float32), out)
    assert not out.any()
    owner.pool.close()


def test_what_cannot_be_routed_or_planned_is_refused(pool_root: Path) -> None:
    owner = Owner(pool_root / "owner")
    ids, offsets = a_batch()
    router = a_router()
    with pytest.raises(ValueError, match="one weight per id"):
        router.route(ids, offsets, np.ones(len(ids) - 1, np.float32), [0, 1, 2], 3, 0, NUM_SAMPLES)
    with pytest.raises(ValueError, match="does not have these samples"):
        router.route(ids, offsets, None, [0, 1, 2], 3, 0, NUM_SAMPLES + 1)
    with pytest.raises(ConfigError, match="no owner 2"):
        _core.Router([(ROWS, DIM, 0, 0, True, None)], [("a", 0)], [0, 1, 2, 0], 2)
    route = router.route(ids, offsets, None, [0, 1, 2], 3, 0, NUM_SAMPLES)
    with pytest.raises(DataError, match="the message of trainer 0, feature 'a'"):
        owner.core.plan_routed(-route.counts[:1], route.message[: route.message_words[0]], False)
    with pytest.raises(DataError, match="words"):
        owner.core.plan_routed(route.counts[:1], route.message, False)
    with pytest.raises(ValueError, match="has a weight"):
        route.gather_weights(np.empty(len(ids), np.float32), np.empty(len(ids), np.float32))
    with pytest.raises(ValueError, match="num_features"):
        owner.core.plan_routed(route.counts[:1, :2].copy(), route.message, False)
    bad = ids.copy()
    bad[-1] = ROWS
    with pytest.raises(IdError, match=rf"feature 'c': id outside \[0, {ROWS}\): {ROWS} "):
        router.route(bad, offsets, None, [0, 1, 2], 3, 0, NUM_SAMPLES)
    owner.pool.close()
