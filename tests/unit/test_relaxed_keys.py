"""A relaxed lookup where keys are left behind: it reads of every key what a plain lookup of its step would read,
whatever the step before, during which it began, leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import SGD, EmbeddingBagCollection, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.data.batch import JaggedFeatures
from holdfast.errors import StepError
from holdfast.rows.row_access import PlannedFeatures
from test_keys import DIM, POLICIES, STORES, Model, table

BAGS = 12
STEPS = 50
LEAVING = [name for name in POLICIES if name != "admission"]


def batch_of(step: int) -> JaggedFeatures:
    """Bags of up to four keys of a window that moves on by five at each step, and of some that were left long ago."""
    draw = np.random.default_rng(step)
    offsets = np.concatenate(([0], draw.choice([0, 1, 2, 4], 2 * BAGS).cumsum()))
    ids = draw.integers(5 * step, 5 * step + 30, offsets[-1])
    old = draw.random(len(ids)) < 0.2
    ids[old] = draw.integers(0, 5 * step + 1, old.sum())
    return JaggedFeatures(
        ["item", "seen"], torch.from_numpy(ids * -0x61C8864680B583EB), torch.from_numpy(offsets.astype(np.int64))
    )


def bags_of(features: JaggedFeatures) -> list[list[int]]:
    """Each bag's keys."""
    offsets, values = features.offsets().tolist(), features.values().tolist()
    return [values[begin:end] for begin, end in pairwise(offsets)]


def pooled_in_parts(features: JaggedFeatures, before: JaggedFeatures | None, model: Model) -> torch.Tensor:
    """``[BAGS, 2 * DIM]``: of each bag the sum of its own rows, and that of its shared ones, added."""
    shared = set() if before is None else set(before.values().tolist())
    sums = []
    for keys in bags_of(features):
        parts = [torch.zeros(DIM), torch.zeros(DIM)]
        for key in keys:
            parts[key in shared] += model.read([key])[0]
        sums.append(parts[0] + parts[1])
    return torch.cat((torch.stack(sums[:BAGS]), torch.stack(sums[BAGS:])), dim=1)


def gradient_of(step: int) -> torch.Tensor:
    return torch.randn(BAGS, 2 * DIM, generator=torch.Generator().manual_seed(step))


class Run:
    """Lookups in two parts: the first while the step before is under way; of a pool that was opened anew, after it."""

    def __init__(self, directory: Path, store: str, policy: dict[str, int]) -> None:
        self.pool = Pool(directory, seed=4, **STORES[store])
        self.rows = EmbeddingBagCollection(self.pool, [table(capacity=400, **policy)], optimizer=SGD(lr=0.5))
        self.planned = self.rows.plan(batch_of(self.pool.step + 1))
        if self.pool.step != 0:
            self.rows.lookup_ahead(self.planned, self.rows.plan(batch_of(self.pool.step)))

    def train_to(self, last: int, see: Callable[[int, torch.Tensor], None] = lambda step, pooled: None) -> None:
        """Each fourth step is skipped: it is committed without an update."""
        while (step := self.pool.step + 1) <= last:
            pooled = self.rows.lookup(self.rows.capture(self.planned), self.planned)
            see(step, pooled.detach())
            coming = self.rows.plan(batch_of(step + 1))
            self.rows.lookup_ahead(coming, self.planned)
            pooled.backward(gradient_of(step))
            if step % 4 == 0:
                self.rows.optimizer.zero_grad()
            else:
                self.rows.optimizer.step()
            self.pool.commit(step)
            self.planned = coming

    def close(self) -> str:
        self.pool.flush()
        self.pool.close()
        return digest_pool(_core.Reader(str(self.pool.directory))).whole


def initial_values(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    keys = sorted({key for step in range(STEPS + 2) for key in batch_of(step).values().tolist()})
    with Pool(directory, seed=4, medium="memory") as pool, torch.no_grad():
        rows = EmbeddingBagCollection(pool, [table(capacity=400)], optimizer=SGD(lr=0.5))
        offsets = torch.arange(2 * len(keys) + 1)
        vectors = rows(JaggedFeatures(["item", "seen"], torch.tensor([*keys, *keys]), offsets)).values()[:, :DIM]
    initial = dict(zip(keys, vectors, strict=True))
    return lambda asked: torch.stack([initial[key] for key in asked])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", LEAVING)
def test_what_a_step_leaves_behind_is_read_as_it_begins_by_the_lookup_that_began_before(
    pool_root: Path, policy: str, store: str
) -> None:
    model = Model(initial_values(pool_root / "untrained"), POLICIES[policy])
    early: list[dict[int, int]] = [{}]  # of the keys that there were when a lookup began, their steps
    num_lost = 0

    def see(step: int, pooled: torch.Tensor) -> None:
        nonlocal num_lost
        model.leave_behind(step)
        features = batch_of(step)
        assert torch.equal(pooled, pooled_in_parts(features, batch_of(step - 1) if step > 1 else None, model)), step
        num_lost += sum(key in early[0] and key not in model.keys for key in set(features.values().tolist()))
        early[0] = {key: known.step for key, known in model.keys.items()}
        if step % 4 != 0:
            gradient: dict[int, torch.Tensor] = {}
            for place, keys in enumerate(bags_of(features)):
                part = gradient_of(step)[place % BAGS, place // BAGS * DIM :][:DIM]
                for key in keys:
                    gradient[key] = gradient[key] + part if key in gradient else part
            model.update(step, gradient)

    run = Run(pool_root / "pool", store, POLICIES[policy])
    run.train_to(STEPS, see)
    run.close()
    assert num_lost > 0, "the lookups that began early had nothing to read over"


@pytest.mark.parametrize("policy", LEAVING)
def test_lives_that_end_anywhere_are_one_run(pool_root: Path, policy: str) -> None:
    one = Run(pool_root / "one", "memory", POLICIES[policy])
    one.train_to(STEPS)
    for last in (3, 20, 21, 37, STEPS):
        part = Run(pool_root / "parts", "block", POLICIES[policy])
        part.train_to(last)
        found = part.close()
    assert found == one.close()


def test_the_rest_of_another_lookup_is_refused(pool_root: Path) -> None:
    run = Run(pool_root / "pool", "memory", {"ttl_steps": 3})
    run.train_to(2)
    now, out = run.rows.plan(batch_of(2)).plan, np.zeros((BAGS, 2 * DIM), np.float32)
    planned: PlannedFeatures = run.rows.plan(batch_of(3))
    with pytest.raises(StepError, match="first part was not the last"):
        run.pool.core.lookup_rest(run.pool.core.capture(planned.plan), now, out)
    run.pool.close()
