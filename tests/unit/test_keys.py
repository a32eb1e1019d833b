"""Tables whose ids are keys: any 64 bits, that nobody has counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import SGD, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, _core
from holdfast.admin.by_key import keyed_rows
from holdfast.admin.digest import digest_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.data.batch import JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, PoolFull, StepError
from holdfast.pools.read_only import ReadOnlyPool, new_log_bytes
from holdfast.pools.tables import normalize, to_spec

DIM = 8
BATCH = 16
STORES: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory"},
    "block": {"medium": "block", "log_bytes": 1 << 20, "scratchpad_bytes": 200_000},
}


def table(**changes: Any) -> EmbeddingBagConfig:
    fields: dict[str, Any] = {
        "num_embeddings": None,
        "capacity": 2000,
        "embedding_dim": DIM,
        "name": "items",
        "feature_names": ["item", "seen"],
    }
    return EmbeddingBagConfig(**{**fields, **changes})


def batch_of(step: int) -> JaggedFeatures:
    """Two features' keys, all over the 64 bits; some keys are of many batches, and some of every batch are new."""
    draw = np.random.default_rng(step)
    of_old = draw.integers(0, 20 * step, 2 * BATCH)
    keys = (of_old.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    keys[:2] = (np.iinfo(np.int64).min, -1)
    return JaggedFeatures(["item", "seen"], torch.from_numpy(keys), torch.arange(0, 2 * BATCH + 1))


class Run:
    """A linear model over the bags of a pool's keyed table."""

    def __init__(self, directory: Path, options: dict[str, Any], **of_table: Any) -> None:
        torch.manual_seed(1)
        self.pool = Pool(directory, seed=4, dense_interval=2, **options)
        self.rows = EmbeddingBagCollection(self.pool, [table(**of_table)], optimizer=SGD(lr=0.5))
        self.model = torch.nn.Linear(2 * DIM, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpoint = Checkpoint(self.pool, model=self.model, optimizer=self.optimizer)
        self.checkpoint.resume()

    def train_to(self, last: int, batches: Callable[[int], JaggedFeatures] = batch_of) -> None:
        while self.pool.step < last:
            self.optimizer.zero_grad()
            self.model(self.rows(batches(self.pool.step + 1)).values()).square().mean().backward()
            self.optimizer.step()
            self.rows.optimizer.step()
            self.checkpoint.commit()

    def read(self, keys: list[int]) -> torch.Tensor:
        with torch.no_grad():
            values = torch.tensor([*keys, *keys])
            return self.rows(JaggedFeatures(["item", "seen"], values, torch.arange(len(values) + 1))).values()[:, :DIM]

    def close(self) -> str:
        self.checkpoint.flush()
        self.pool.close()
        return digest_pool(_core.Reader(str(self.pool.directory))).whole


@pytest.mark.parametrize("store", STORES)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(pool_root: Path, store: str) -> None:
    one = Run(pool_root / "one", STORES["memory"])
    one.train_to(12)
    for last in (1, 4, 5, 12):
        part = Run(pool_root / "parts", STORES[store])
        part.train_to(last)
        found = part.close()
    assert found == one.close()


@pytest.mark.parametrize("store", STORES)
def test_rows_are_updated_as_a_dict_of_vectors_would_be(pool_root: Path, store: str) -> None:
    keys = sorted({int(key) for step in range(1, 7) for key in batch_of(step).values()})
    run = Run(pool_root / "pool", STORES[store])
    vectors = dict(zip(keys, run.read(keys), strict=True))
    for step in range(1, 7):
        batch, values = batch_of(step), [int(key) for key in batch_of(step).values()]
        with torch.no_grad():
            expected = torch.cat([torch.stack([vectors[key] for key in values[:BATCH]]),
                                  torch.stack([vectors[key] for key in values[BATCH:]])], dim=1)  # fmt: skip
            assert torch.equal(run.rows(batch).values(), expected)
        pooled = run.rows(batch).values()
        pooled.retain_grad()
        run.model(pooled).square().mean().backward()
        gradient: dict[int, torch.Tensor] = {}
        for place, key in enumerate(values):
            part = pooled.grad[place % BATCH, place // BATCH * DIM :][:DIM]  # type: ignore[index]
            gradient[key] = gradient[key] + part if key in gradient else part
        for key, of_key in gradient.items():
            vectors[key] = vectors[key] - 0.5 * of_key
        run.rows.optimizer.step()
        run.checkpoint.commit()
    assert torch.equal(run.read(keys), torch.stack([vectors[key] for key in keys]))
    run.close()


@pytest.mark.parametrize("store", STORES)
def test_what_is_looked_up_in_vain_leaves_no_trace(pool_root: Path, store: str) -> None:
    plain, curious = Run(pool_root / "plain", STORES["memory"]), Run(pool_root / "curious", STORES[store])
    plain.train_to(6)
    unknown = curious.read([77, 78, 77])
    for step in range(1, 7):
        curious.rows.plan(batch_of(step + 40))  # a batch that never comes: its keys have rows, and no values
        with torch.no_grad():
            curious.rows(batch_of(step + 40))
        curious.rows(batch_of(step + 50))  # a forward that is thrown away
        curious.train_to(step)
    assert torch.equal(curious.read([77, 78, 77]), unknown)
    assert torch.equal(unknown[0], unknown[2])
    assert not torch.equal(unknown[0], unknown[1])
    assert curious.close() == plain.close()


def test_a_reader_finds_keys_and_reads_others_as_they_begin(pool_root: Path) -> None:
    run = Run(pool_root / "pool", STORES["memory"])
    run.train_to(3)
    known = [int(key) for key in batch_of(3).values()]
    expected = run.read([*known, 123_456_789])
    run.close()
    of_reader: Any = ReadOnlyPool(pool_root / "pool")
    rows = EmbeddingBagCollection(of_reader, [table()], optimizer=SGD(lr=0.5))
    values = torch.tensor([*known, 123_456_789] * 2)
    with torch.no_grad():
        found = rows(JaggedFeatures(["item", "seen"], values, torch.arange(len(values) + 1))).values()
    assert torch.equal(found[:, :DIM], expected)


def test_keys_without_rows_left_are_refused_and_the_others_go_on(pool_root: Path) -> None:
    with Pool(pool_root / "pool", medium="memory") as pool:
        rows = EmbeddingBagCollection(pool, [table(capacity=4, feature_names=["item"])])

        def features(keys: list[int]) -> JaggedFeatures:
            return JaggedFeatures(["item"], torch.tensor(keys), torch.arange(len(keys) + 1))

        rows(features([1, 2, 3]))
        with pytest.raises(PoolFull, match="table 'items' has a key in each of its 4 rows"):
            rows(features([4, 5]))
        rows(features([3, 2, 1, 4]))


def test_a_batch_that_was_planned_to_be_evaluated_is_not_trained(pool_root: Path) -> None:
    with Pool(pool_root / "pool", medium="memory") as pool:
        rows = EmbeddingBagCollection(pool, [table()])
        planned = rows.plan(batch_of(1), evaluates=True)
        with pytest.raises(StepError, match="planned to be evaluated"):
            rows(planned)


def drifting_batch(step: int) -> JaggedFeatures:
    """Keys of a window that moves on by five at each step, and now and then one that was left long ago."""
    draw = np.random.default_rng(step)
    ids = draw.integers(5 * step, 5 * step + 30, 2 * BATCH)
    ids[:2] = (draw.integers(0, 5 * step), 10_000 + step // 20)
    return JaggedFeatures(["item", "seen"], torch.from_numpy(ids * -0x61C8864680B583EB), torch.arange(2 * BATCH + 1))


@dataclass
class Remembered:
    vector: torch.Tensor
    step: int
    updates: int


class Model:
    """What a table with keys is, as a dict: keys that are left behind are found out by a look at all of them."""

    def __init__(self, initial: Callable[[list[int]], torch.Tensor], policy: dict[str, Any]) -> None:
        self._initial = initial
        self._ttl_steps = policy.get("ttl_steps", 1 << 40)
        self._max_keys = policy.get("max_keys", 1 << 40)
        self._admit_after = policy.get("admit_after", 1)
        self._admit = policy.get("admit", lambda count: policy.get("admit_probability", 1.0))
        stay = policy.get("stay", lambda updates: 0)
        self._stay = (lambda updates: updates - 1) if stay == "lfu" else stay
        self._newest = 0
        self.keys: dict[int, Remembered] = {}

    def leave_behind(self, step: int) -> None:
        """Before `step`."""

        def score(known: Remembered) -> int:
            return known.step + int(self._stay(1 << known.updates.bit_length() - 1))

        self.keys = {key: known for key, known in self.keys.items() if step - score(known) <= self._ttl_steps}
        best = sorted((score(known) for known in self.keys.values()), reverse=True)
        if len(best) <= self._max_keys:
            return
        too_many = best[self._max_keys]
        least = too_many + 1 if too_many < self._newest + self._stay(1) else best[self._max_keys - 1]
        self.keys = {
            key: known for key, known in self.keys.items() if score(known) >= least or known.step == self._newest
        }

    def trains(self, key: int, occurrence: int) -> bool:
        """The key's clock against the sum of what its occurrences added, in floating point."""
        clock, passed = 64 - math.log2(draw_of(4, 0, key)), 0.0
        for count in range(self._admit_after, occurrence + 1):
            chance = self._admit(min(count, 16))
            passed += math.inf if chance == 1 else -math.log2(1 - chance)
        return passed > clock

    def read(self, keys: list[int]) -> torch.Tensor:
        initial = self._initial(keys)
        rows = [self.keys[key].vector if key in self.keys else initial[i] for i, key in enumerate(keys)]
        return torch.stack(rows)

    def update(self, step: int, gradient: dict[int, torch.Tensor]) -> None:
        for key, of_key in gradient.items():
            before = self.keys.get(key) or Remembered(self._initial([key])[0], 0, 0)
            vector = before.vector - 0.5 * of_key if self.trains(key, before.updates + 1) else before.vector
            self.keys[key] = Remembered(vector, step, before.updates + 1)
        self._newest = step


def draw_of(pool_seed: int, table: int, key: int) -> int:
    """The 64 bits that say when a key is admitted, as docs/FORMAT.md has them."""
    bits = 0x61646D697373696F
    for value in (pool_seed, table, key):
        bits = ((bits + 0x9E3779B97F4A7C15) ^ value) & MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        bits ^= bits >> 31
    return bits


MASK = (1 << 64) - 1
POLICIES: dict[str, dict[str, Any]] = {
    "ttl": {"ttl_steps": 9},
    "max_keys": {"max_keys": 60},
    "both": {"ttl_steps": 12, "max_keys": 70},
    "admission": {"admit_after": 3},
    "all": {"ttl_steps": 14, "max_keys": 80, "admit_after": 2},
    "chance of later ones": {"admit_probability": 0.5, "admit_after": 2, "ttl_steps": 14},
    "chances": {"admit": lambda count: (0.0, 0.2, 0.9, 0.1)[min(count, 4) - 1], "max_keys": 70},
    "lfu": {"max_keys": 60, "stay": "lfu"},
    "stay": {"max_keys": 40, "ttl_steps": 12, "stay": lambda updates: 4 + min(updates, 8) * 9},
    "stay for age": {"ttl_steps": 5, "stay": lambda updates: 2 * updates, "admit_probability": 0.7},
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES)
def test_keys_are_left_behind_and_begin_anew_as_in_a_model(pool_root: Path, policy: str, store: str) -> None:
    options = {"capacity": 400, **POLICIES[policy]}
    steps, asked = 70, [int(key) for step in range(1, 71, 7) for key in drifting_batch(step).values()]
    untrained = Run(pool_root / "untrained", STORES["memory"], **options)
    model = Model(untrained.read, POLICIES[policy])
    run = Run(pool_root / "pool", STORES[store], **options)
    seen: set[int] = set()
    for step in range(1, steps + 1):
        model.leave_behind(step)
        batch = drifting_batch(step)
        keys = [int(key) for key in batch.values()]
        seen.update(keys)
        if step % 7 == 0:
            assert torch.equal(run.read(asked), model.read(asked)), f"before step {step}"
        pooled = run.rows(batch).values()
        assert torch.equal(torch.cat((pooled[:, :DIM], pooled[:, DIM:])), model.read(keys)), f"in step {step}"
        pooled.retain_grad()
        run.model(pooled).square().mean().backward()
        gradient: dict[int, torch.Tensor] = {}
        for place, key in enumerate(keys):
            part = pooled.grad[place % BATCH, place // BATCH * DIM :][:DIM]  # type: ignore[index]
            gradient[key] = gradient[key] + part if key in gradient else part
        run.rows.optimizer.step()
        run.checkpoint.commit()
        model.update(step, gradient)
        if step % 19 == 0:
            run.close()
            run = Run(pool_root / "pool", STORES[store], **options)
    run.close()
    model.leave_behind(steps + 1)
    reader = _core.Reader(str(pool_root / "pool"))
    _, records = keyed_rows(reader, 0)
    found = {int(record["key"]): (int(record["step"]), int(record["updates"])) for record in records}
    assert found == {key: (known.step, known.updates) for key, known in model.keys.items()}
    if POLICIES[policy].keys() & {"ttl_steps", "max_keys"} and policy != "stay":
        assert max(reader.touched_rows(0, 0, 1000)) < 0.8 * len(seen), "rows are another key's after a while"


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_are_handed_to_the_next_step_are_those_that_are_home(pool_root: Path, policy: str) -> None:
    digests = []
    for name in ("ahead", "in its step"):
        run = Run(pool_root / name, STORES["memory"], capacity=400, **POLICIES[policy])
        planned = run.rows.plan(drifting_batch(1))
        for step in range(1, 30):
            run.model(run.rows.lookup(run.rows.capture(planned), planned)).square().mean().backward()
            planned = run.rows.plan(drifting_batch(step + 1))
            if name == "ahead":
                run.rows.capture_ahead(planned)
            run.rows.optimizer.step()
            run.checkpoint.commit()
        digests.append(run.close())
    assert digests[0] == digests[1]


def test_a_further_collection_changes_nothing_of_which_keys_are_left_behind(pool_root: Path) -> None:
    """The pool is made anew with its table, under a collection that is there already."""
    with Pool(pool_root / "pool", seed=1, medium="memory") as pool:
        rows = EmbeddingBagCollection(pool, [table(feature_names=["item"], ttl_steps=2)], optimizer=SGD(lr=1.0))
        more = EmbeddingBagCollection(pool, [table(name="more", feature_names=["more"], ttl_steps=2)])
        seen = []
        for step in range(1, 6):
            key = torch.tensor([5 if step in (1, 5) else 6])
            pooled = rows({"item": (key, torch.tensor([0, 1]))}).values()
            seen.append(pooled.detach())
            (pooled.sum() + more({"more": (key, torch.tensor([0, 1]))}).values().sum()).backward()
            rows.optimizer.step()
            more.optimizer.step()
            pool.commit(step)
        assert torch.equal(seen[0], seen[4])
        assert not torch.equal(seen[1], seen[3])


@pytest.mark.parametrize("policy", ["both", "all", "chances", "lfu", "stay", "stay for age"])
def test_lives_that_end_anywhere_leave_the_same_keys_behind(pool_root: Path, policy: str) -> None:
    options = {"capacity": 400, **POLICIES[policy]}
    one = Run(pool_root / "one", STORES["memory"], **options)
    one.train_to(80, drifting_batch)
    for last in (3, 40, 41, 77, 80):
        part = Run(pool_root / "parts", STORES["block"], **options)
        part.train_to(last, drifting_batch)
        found = part.close()
    assert found == one.close()


def test_a_batch_that_was_planned_long_ago_is_planned_again(pool_root: Path) -> None:
    run = Run(pool_root / "pool", STORES["memory"], capacity=400, ttl_steps=3)
    early = run.rows.plan(drifting_batch(1000))
    run.train_to(30, drifting_batch)
    run.rows(early)
    run.train_to(31, drifting_batch)
    run.train_to(120, drifting_batch)
    with pytest.raises(StepError, match="keys of it have left their rows since: plan it again"):
        run.rows(early)
    run.pool.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_embeddings": 10, "keys": "int64"}, "num_embeddings = 10; it must be None where there are keys"),
        ({"keys": "float"}, "keys = 'float'; it must be 'int64'"),
        ({"capacity": 0}, "capacity = 0; it must be between"),
        ({"num_embeddings": 10, "capacity": 10}, "capacity = 10; it must be None where num_embeddings"),
        ({"num_embeddings": 10, "capacity": None, "ttl_steps": 4}, "ttl_steps = 4; it must be None where there are no"),
        ({"max_keys": 2001}, "max_keys = 2001; it must be between 1 and 2000"),
        ({"max_keys": 1.5}, "max_keys = 1.5; it must be a whole number"),
        ({"ttl_steps": "4"}, "ttl_steps = '4'; it must be a whole number"),
        ({"capacity": 10.5}, "capacity = 10.5; it must be a whole number"),
        ({"embedding_dim": 2.5}, "embedding_dim = 2.5; it must be a whole number"),
        ({"num_embeddings": 9.5, "capacity": None}, "num_embeddings = 9.5; it must be a whole number"),
        ({"num_embeddings": float("inf"), "capacity": None}, "num_embeddings = inf; it must be a whole number"),
        ({"admit_probability": 0.0}, "admit_probability = 0.0; it must be above 0"),
        ({"admit_probability": 1.5}, "admit_probability = 1.5; it must be above 0, and 1 at most"),
        ({"admit_probability": 0.5, "admit": [0.5]}, "None where there is admit"),
        ({"num_embeddings": 10, "capacity": None, "admit": [1.0]}, "it must be None where there are no keys"),
        ({"admit": [0.5, 0.0]}, "chances from 0 to 1, the last one above 0"),
        ({"admit": lambda count: 2.0 / count}, "chances from 0 to 1, the last one above 0"),
        ({"admit": []}, "chances from 0 to 1, the last one above 0"),
        ({"stay": "lfu"}, "None where neither ttl_steps nor max_keys leaves keys behind"),
        ({"stay": "mru", "ttl_steps": 4}, "stay = 'mru'; it must be 'lru', 'lfu', or a function"),
        ({"stay": lambda updates: -updates, "ttl_steps": 4}, "do not fall with the number of updates"),
        ({"stay": [3, 2], "ttl_steps": 4}, "do not fall with the number of updates"),
        ({"stay": [1 << 25], "ttl_steps": 4}, "whole numbers from 0 to 16777216"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(pool_root: Path, changes: dict[str, Any], message: str) -> None:
    with Pool(pool_root / "pool") as pool, pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(pool, [table(**changes)])


def test_a_table_does_not_begin_or_cease_to_have_keys(pool_root: Path) -> None:
    Run(pool_root / "pool", STORES["memory"]).close()
    for other, message in (
        (table(num_embeddings=2000, capacity=None), "keys = int64, now it is none"),
        (table(capacity=2001), "capacity = 2000, now it is 2001"),
    ):
        with Pool(pool_root / "pool") as pool, pytest.raises(ConfigError, match=message):
            EmbeddingBagCollection(pool, [other], optimizer=SGD(lr=0.5))


@pytest.mark.parametrize(
    ("made_with", "other", "message"),
    [
        ({}, {"admit_probability": 0.5}, r"chances to be admitted = \[1.0\], now it is \[0.5\]"),
        ({"admit": [0.0, 0.25]}, {"admit": [0.0, 0.5]}, r"= \[0.0, 0.25\], now it is \[0.0, 0.5\]"),
        ({"max_keys": 9}, {"max_keys": 9, "stay": [0, 2]}, r"stay = \[\], now it is \[0, 2, 2"),
    ],
)
def test_a_pool_that_was_made_with_another_rule_is_refused(
    pool_root: Path, made_with: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    Run(pool_root / "pool", STORES["memory"], **made_with).close()
    with Pool(pool_root / "pool") as pool, pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(pool, [table(**other)], optimizer=SGD(lr=0.5))


def test_rules_that_say_the_same_in_other_words_are_one(pool_root: Path) -> None:
    """What was chosen is kept in the pool, as numbers."""
    Run(pool_root / "pool", STORES["memory"], admit=lambda count: 0.25, max_keys=9, stay="lfu").close()
    again = {"admit_probability": 0.25, "max_keys": 9, "stay": lambda updates: updates - 1}
    Run(pool_root / "pool", STORES["memory"], **again).close()
    Run(pool_root / "plain", STORES["memory"], max_keys=9).close()
    Run(pool_root / "plain", STORES["memory"], max_keys=9, admit_probability=1.0, stay="lru").close()


def test_what_became_of_keys_is_counted(pool_root: Path) -> None:
    """Against the records: a key is admitted once, and what is not admitted was held back as often as it counts."""
    options = {"capacity": 3000, "admit_probability": 0.3}
    run = Run(pool_root / "pool", STORES["memory"], **options)
    run.train_to(25, drifting_batch)
    counts = run.pool.key_counts()
    run.close()
    found = inspect_pool(pool_root / "pool")["tables"][0]["keys"]
    _, records = keyed_rows(_core.Reader(str(pool_root / "pool")), 0)
    model = Model(lambda keys: torch.zeros(len(keys), DIM), options)
    first = [next(n for n in range(1, 1 << 30) if model.trains(int(record["key"]), n)) for record in records]
    waits = [int(record["updates"]) < of_key for record, of_key in zip(records, first, strict=True)]
    held_back = sum(min(int(record["updates"]), of_key - 1) for record, of_key in zip(records, first, strict=True))
    assert 0 < sum(waits) < len(records)
    assert counts == {"admitted": len(records) - sum(waits), "held_back": held_back, "left_behind": 0}
    assert found == {"live": len(records), "not_admitted": sum(waits), "left_behind": 0}


def test_keys_that_are_left_behind_are_counted_from_the_opening_on(pool_root: Path) -> None:
    options = {"capacity": 3000, "max_keys": 60, "stay": "lfu"}
    found = []
    for last in (20, 40):
        run = Run(pool_root / "pool", STORES["memory"], **options)
        assert run.pool.key_counts() == {"admitted": 0, "held_back": 0, "left_behind": 0}
        run.train_to(last, drifting_batch)
        counts = run.pool.key_counts()
        assert counts is not None
        found.append(counts["left_behind"])
        run.close()
    straight = Run(pool_root / "straight", STORES["memory"], **options)
    straight.train_to(40, drifting_batch)
    counts = straight.pool.key_counts()
    assert counts is not None
    assert sum(found) == counts["left_behind"] > 60
    straight.close()


def test_a_pool_in_which_all_keys_stay_counts_nothing(pool_root: Path) -> None:
    run = Run(pool_root / "pool", STORES["memory"])
    assert run.pool.key_counts() is None
    run.close()


@pytest.mark.parametrize("rule", [{"admit_probability": 0.5}, {"max_keys": 9, "stay": "lfu"}])
def test_slots_of_a_device_refuse_rules_that_they_do_not_know(pool_root: Path, rule: dict[str, Any]) -> None:
    with (
        Pool(pool_root / "pool", medium="memory") as pool,
        pytest.raises(ConfigError, match=rf"device\.rows = 'scratchpad': table 'items' has {[*rule][-1]}"),
    ):
        EmbeddingBagCollection(pool, [table(**rule)], device=DeviceConfig(rows="scratchpad"))


def test_a_capacity_that_nobody_chose_is_no_reason_for_a_log_of_gigabytes() -> None:
    def log_bytes(**changes: Any) -> int:
        return new_log_bytes(True, [to_spec(normalize(table(**changes)), optimizer=0)], 1 << 30)

    assert log_bytes(capacity=None) <= 1 << 30 < log_bytes(capacity=1 << 28)
    assert log_bytes(capacity=1 << 28, max_keys=5000) <= 64 << 20
