"""Tables with keys whose rows lie in slots of a device, the processor as the device: the run is the one that it is
beside the pool, whichever keys are left behind, however few slots there are, and wherever a life ends."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Adam, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdagrad, _core
from holdfast.admin.by_key import keyed_rows
from holdfast.admin.digest import digest_pool
from holdfast.data.batch import JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, StepError
from holdfast.rows.row_access import PlannedFeatures

pytestmark = pytest.mark.dear

BATCH = 16
STEPS = 40
AHEAD = 3
STORES: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory"},
    "block": {"medium": "block", "log_bytes": 1 << 20, "scratchpad_bytes": 200_000},
}
NEAR = DeviceConfig()
WAYS = {
    "scratchpad": DeviceConfig(rows="scratchpad"),
    "few slots": DeviceConfig(rows="scratchpad", scratchpad_bytes=45_000),
    "direct": DeviceConfig(rows="direct"),
    "direct, few slots": DeviceConfig(rows="direct", scratchpad_bytes=45_000),
}
POLICIES: dict[str, dict[str, int]] = {
    "all stay": {},
    "ttl": {"ttl_steps": 7},
    "max_keys": {"max_keys": 60},
    "admission": {"admit_after": 3},
    "all": {"ttl_steps": 12, "max_keys": 80, "admit_after": 2},
}


def keys_of(step: int, feature: int) -> torch.Tensor:
    """Of a window that moves on by five at each step, and some that were left long ago."""
    draw = np.random.default_rng((step, feature))
    ids = draw.integers(5 * step, 5 * step + 30, BATCH)
    old = draw.random(BATCH) < 0.2
    ids[old] = draw.integers(0, 5 * step + 1, old.sum())
    return torch.from_numpy(ids * -0x61C8864680B583EB)


def batch_of(step: int) -> JaggedFeatures:
    plain = torch.from_numpy(np.random.default_rng((step, 7)).integers(0, 50, BATCH))
    ids = torch.cat((keys_of(step, 0), keys_of(step, 1), plain))
    return JaggedFeatures(["item", "seen", "shop"], ids, torch.arange(3 * BATCH + 1))


def other_batch_of(step: int) -> JaggedFeatures:
    return JaggedFeatures(["user"], keys_of(step, 2), torch.arange(BATCH + 1))


class Run:
    """Two collections: a table with keys beside one without; and one with keys, 16-bit rows and another optimizer."""

    def __init__(self, directory: Path, device: DeviceConfig, policy: dict[str, int], store: str = "memory") -> None:
        torch.manual_seed(1)
        keyed: dict[str, Any] = {"num_embeddings": None, "capacity": 400, **policy}
        self.pool = Pool(directory, seed=4, dense_interval=2, **STORES[store])
        self.rows = [
            EmbeddingBagCollection(
                self.pool,
                [
                    EmbeddingBagConfig(embedding_dim=8, name="items", feature_names=["item", "seen"], **keyed),
                    EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="shops", feature_names=["shop"]),
                ],
                optimizer=RowWiseAdagrad(lr=0.5),
                device=device,
            ),
            EmbeddingBagCollection(
                self.pool,
                [EmbeddingBagConfig(embedding_dim=6, name="users", feature_names=["user"], data_type="bf16", **keyed)],
                optimizer=Adam(lr=0.05),
                device=device,
            ),
        ]
        self.model = torch.nn.Linear(30, 1)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpoint = Checkpoint(self.pool, model=self.model, optimizer=self.dense)
        self.checkpoint.resume()
        self._coming: deque[list[PlannedFeatures]] = deque()

    def _plan(self, step: int) -> list[PlannedFeatures]:
        return [rows.plan(batch(step)) for rows, batch in zip(self.rows, (batch_of, other_batch_of), strict=True)]

    def _look_up(self, planned: list[PlannedFeatures]) -> torch.Tensor:
        pooled = [rows.lookup(rows.capture(of), of) for rows, of in zip(self.rows, planned, strict=True)]
        return torch.cat(pooled, dim=1)

    def train_to(self, last: int) -> None:
        """Batches are planned and announced some steps ahead. Each fifth step is skipped; in each seventh, a batch that
        never comes is looked up first."""
        while (step := self.pool.step + 1) <= last:
            while len(self._coming) <= AHEAD:
                planned = self._plan(step + len(self._coming))
                self._coming.append(planned)
                for rows, of in zip(self.rows, planned, strict=True):
                    rows.announce(of)
            planned = self._coming.popleft()
            if step % 7 == 0:
                self._look_up(self._plan(step + 1000))
            self.dense.zero_grad()
            self.model(self._look_up(planned)).square().mean().backward()
            if step % 5 == 0:
                for rows in self.rows:
                    rows.optimizer.zero_grad()
            else:
                self.dense.step()
                for rows in self.rows:
                    rows.optimizer.step()
            self.checkpoint.commit()

    def close(self) -> str:
        self.checkpoint.flush()
        self.pool.close()
        return digest_pool(_core.Reader(str(self.pool.directory))).whole


def trained(directory: Path, *args: Any) -> str:
    run = Run(directory, *args)
    run.train_to(STEPS)
    return run.close()


def found_in(directory: Path) -> dict[int, tuple[int, int]]:
    """Of the first table, each key's newest step and its updates."""
    _, records = keyed_rows(_core.Reader(str(directory)), 0)
    return {int(record["key"]): (int(record["step"]), int(record["updates"])) for record in records}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_in_slots_ends_with_the_bits_of_one_beside_the_pool(pool_root: Path, policy: str) -> None:
    near = trained(pool_root / "near", NEAR, POLICIES[policy])
    assert len(found_in(pool_root / "near")) > 30
    for way, device in WAYS.items():
        assert trained(pool_root / way, device, POLICIES[policy]) == near, way
        assert found_in(pool_root / way) == found_in(pool_root / "near")


@pytest.mark.parametrize("policy", ["ttl", "all"])
def test_also_over_a_row_log(pool_root: Path, policy: str) -> None:
    near = trained(pool_root / "near", NEAR, POLICIES[policy])
    assert trained(pool_root / "slots", WAYS["few slots"], POLICIES[policy], "block") == near


@pytest.mark.parametrize("way", WAYS)
def test_lives_that_end_anywhere_are_one_run(pool_root: Path, way: str) -> None:
    near = trained(pool_root / "near", NEAR, POLICIES["all"])
    found = ""
    for last in (1, 16, 17, 30, STEPS):
        part = Run(pool_root / "parts", WAYS[way], POLICIES["all"])
        part.train_to(last)
        found = part.close()
    assert found == near


def test_an_evaluation_reads_what_a_lookup_would_and_gives_new_keys_no_rows(pool_root: Path) -> None:
    runs = [Run(pool_root / str(i), device, {"ttl_steps": 3}) for i, device in enumerate((NEAR, WAYS["scratchpad"]))]
    seen = []
    for run in runs:
        run.train_to(20)
        with torch.no_grad():
            seen.append([run.rows[0](batch_of(step)).values() for step in (3, 19, 20, 21, 500)])
        evaluated = run.rows[0].plan(batch_of(900), evaluates=True)
        with pytest.raises(StepError, match="planned to be evaluated"):
            run.rows[0].capture(evaluated)
        run.train_to(25)
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert runs[0].close() == runs[1].close()


def test_a_batch_that_was_planned_long_ago_is_planned_again_and_nothing_is_lost(pool_root: Path) -> None:
    run = Run(pool_root / "pool", WAYS["scratchpad"], {"ttl_steps": 3, "capacity": 1000})
    early = run.rows[0].plan(batch_of(1000))
    run.train_to(90)
    with pytest.raises(StepError, match="keys of it have left their rows since: plan it again"):
        run.rows[0].capture(early)
    run.train_to(95)
    found = run.close()
    through = Run(pool_root / "through", NEAR, {"ttl_steps": 3, "capacity": 1000})
    through.train_to(95)
    assert found == through.close()


def test_slots_are_of_tables_with_keys_or_of_tables_without(pool_root: Path) -> None:
    with Pool(pool_root / "pool", medium="memory") as pool:
        tables = [
            EmbeddingBagConfig(num_embeddings=count, embedding_dim=8, name=name, feature_names=[name])
            for name, count in (("a", None), ("b", 90), ("c", None))
        ]
        EmbeddingBagCollection(pool, tables)
        collection = pool.core.collection([0, 1, 2], [("a", 0), ("b", 1), ("c", 2)])
        _core.SlotDirectory(collection, [0, 2], 10)
        with pytest.raises(ConfigError, match="all have keys or none"):
            _core.SlotDirectory(collection, [0, 1], 10)
