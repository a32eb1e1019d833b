"""A capture is of one step of one pool: given to any other, it is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, Pool, clip_grad_norm_
from holdfast.errors import ConfigError, StepError

Medium = Literal["memory", "block"]
TABLE = EmbeddingBagConfig(num_embeddings=3000, embedding_dim=8, name="t", feature_names=["f"])
RATES = {
    "learning_rate": 0.1,
    "epsilon": 0.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "weight_decay": 0.0,
    "gradient_scale": 1.0,
}


def opened(directory: Path, medium: Medium, rows: int = 3000) -> tuple[Pool, EmbeddingBagCollection]:
    pool = Pool(directory, medium=medium, log_bytes=128 << 10, scratchpad_bytes=1 << 20)
    return pool, EmbeddingBagCollection(pool, [replace(TABLE, num_embeddings=rows)])


def batch(ids: list[int]) -> JaggedFeatures:
    return JaggedFeatures(["f"], torch.tensor(ids), torch.arange(len(ids) + 1))


IDS = [5, 1, 2999, 5]


def entries(pool: Pool, rows: EmbeddingBagCollection, captured: Any) -> dict[str, Callable[[], object]]:
    """Everything of the core that takes a capture."""
    core, plan = pool.core, rows.plan(batch(IDS)).plan
    matrix, lookups = np.zeros((len(IDS), 8), np.float32), np.zeros(len(IDS), np.float32)
    new_rows = np.zeros(3 * 32, np.uint8), np.zeros(3, np.float32)
    return {
        "lookup": lambda: core.lookup(captured, matrix),
        "lookup_rest": lambda: core.lookup_rest(captured, plan, matrix),
        "scale_gradients": lambda: core.scale_gradients(captured, 0, matrix, lookups),
        "sum_gradients": lambda: core.sum_gradients([(captured, matrix)]),
        "update": lambda: core.update([(captured, matrix)], **RATES),
        "update of two": lambda: core.update([(captured, matrix), (captured, matrix)], **RATES),
        "put": lambda: core.put([(captured, [0], *new_rows)]),
    }


@pytest.fixture(params=["memory", "block"])
def medium(request: pytest.FixtureRequest) -> Any:
    return request.param


def refused(verbs: dict[str, Callable[[], object]], match: str) -> None:
    for verb in verbs.values():
        with pytest.raises(StepError, match=match):
            verb()


def test_a_capture_of_an_older_step_is_refused(pool_root: Path, medium: Medium) -> None:
    pool, rows = opened(pool_root / "pool", medium)
    captured = rows.capture(rows.plan(batch(IDS)))
    pool.commit(1)
    for step in range(2, 40):  # the log goes round and grows
        rows(batch(list(range(step * 50, step * 50 + 40 * (step % 7 + 1))))).values().sum().backward()
        rows.optimizer.step()
        pool.commit(step)
    refused(entries(pool, rows, captured), "the capture is of step 1, and step 40 is under way")
    pool.close()


def test_a_capture_of_another_pool_or_of_an_earlier_opening_is_refused(pool_root: Path, medium: Medium) -> None:
    pool, rows = opened(pool_root / "pool", medium)
    other_pool, other_rows = opened(pool_root / "other", medium)
    captured = other_rows.capture(other_rows.plan(batch(IDS)))
    refused(entries(pool, rows, captured), "another pool's")
    other_pool.close()
    refused(entries(pool, rows, captured), "another pool's")
    refused(entries(other_pool, other_rows, captured), "the pool is closed")
    del other_pool, other_rows
    again, again_rows = opened(pool_root / "other", medium)
    refused(entries(again, again_rows, captured), "of an earlier opening")
    again.close()
    pool.close()


def test_a_capture_of_a_forward_that_was_thrown_away_still_holds_its_rows(pool_root: Path, medium: Medium) -> None:
    pool, rows = opened(pool_root / "pool", medium)
    first = rows.capture(rows.plan(batch(IDS)))
    wanted = rows.lookup(first, rows.plan(batch(IDS)))
    rows.capture(rows.plan(batch([7, 8])))  # nobody keeps it
    rows.optimizer.zero_grad()
    rows.capture(rows.plan(batch([9])))
    assert torch.equal(rows.lookup(first, rows.plan(batch(IDS))), wanted)
    pool.close()


def test_a_forward_that_was_thrown_away_begins_no_step(pool_root: Path, medium: Medium) -> None:
    with Pool(pool_root / "pool", medium=medium, log_bytes=128 << 10, dense_interval=4) as pool:
        rows = EmbeddingBagCollection(pool, [TABLE])
        checkpoint = Checkpoint(pool, model=torch.nn.Identity(), optimizer=[])
        checkpoint.resume()
        rows(batch(IDS)).values().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
        rows(batch([7, 8]))  # nobody keeps it
        assert (checkpoint.flush(), pool.durable_step) == (1, 1)
        kept = rows(batch([7, 8])).values()
        rows(batch([9])).values().sum().backward()
        rows.optimizer.step()
        assert kept.requires_grad and checkpoint.commit() == 2


def test_a_capture_that_moves_after_its_gradients_were_summed_is_updated_where_it_is(
    pool_root: Path, medium: Medium
) -> None:
    """The process died of SIGSEGV: what was thrown away before it is taken back by the next capture."""

    def train(name: str, *, twice: bool) -> list[torch.Tensor]:
        with Pool(pool_root / name, medium=medium, seed=1) as pool:
            rows = EmbeddingBagCollection(pool, [TABLE])
            others = EmbeddingBagCollection(pool, [replace(TABLE, name="u", feature_names=["g"])])
            for step in range(3):
                if twice:
                    vectors = rows(batch(list(range(500, 600)))).values()
                vectors = rows(batch(list(range(10 * step, 10 * step + 90)))).values()
                vectors.square().sum().backward()
                clip_grad_norm_([], rows, 0.5)
                others({"g": torch.arange(50)}).values().square().sum().backward()
                rows.optimizer.step()
                others.optimizer.step()
                del vectors
                pool.commit(step)
            return [of.read(0, torch.arange(3000)) for of in (rows, others)]

    once, twice = train("once", twice=False), train("twice", twice=True)
    assert all(torch.equal(of_once, of_twice) for of_once, of_twice in zip(once, twice, strict=True))


def test_rows_that_are_imported_after_a_forward_that_was_thrown_away_stay(pool_root: Path, medium: Medium) -> None:
    """What that captured would have taken them back, had the process died then."""
    pool, rows = opened(pool_root / "pool", medium)
    rows(batch(IDS))
    given = torch.arange(10 * 8.0).reshape(10, 8)
    pool.core.import_rows(0, 0, given.numpy().view(np.uint8).reshape(-1), np.zeros(10, np.float32))
    shutil.copytree(pool_root / "pool", pool_root / "killed")
    pool.close()
    for name in ("pool", "killed") if medium == "memory" else ("pool",):  # a row log has them when it is closed
        again, of_again = opened(pool_root / name, medium)
        assert torch.equal(of_again.read(0, torch.arange(10)), given)
        again.close()


def test_a_batch_that_was_captured_ahead_of_a_step_without_it_is_captured_in_its_own(
    pool_root: Path, medium: Medium
) -> None:
    pool, rows = opened(pool_root / "pool", medium)
    coming = rows.plan(batch(IDS))
    rows(batch(IDS)).values().sum().backward()
    rows.capture_ahead(coming)
    rows.optimizer.step()
    pool.commit(1)
    pool.commit(2)  # no forward: the loop left the batch out
    vectors = rows(coming).values()
    assert torch.equal(vectors, rows.read(0, torch.tensor(IDS)))
    vectors.sum().backward()
    rows.optimizer.step()
    assert pool.commit(3) == 3
    pool.close()


def test_a_plan_of_another_pool_is_refused(pool_root: Path, medium: Medium) -> None:
    pool, rows = opened(pool_root / "pool", medium, rows=10)
    larger_pool, larger = opened(pool_root / "other", medium)
    plan = larger.plan(batch(IDS)).plan
    out = np.zeros((len(IDS), 8), np.float32)
    core = pool.core
    verbs: list[Callable[[], object]] = [
        lambda: core.capture(plan),
        lambda: core.evaluate(plan, out),
        lambda: core.announce(plan),
        lambda: core.capture_ahead(plan),
        lambda: core.lookup_ahead(plan, plan, out),
        lambda: core.materialize(plan),
    ]
    for verb in verbs:
        with pytest.raises(ConfigError, match="another pool"):
            verb()
    rows(batch([1, 2]))
    pool.close()
    larger_pool.close()


def test_what_is_no_capture_is_refused(pool_root: Path, medium: Medium) -> None:
    pool, _ = opened(pool_root / "pool", medium)
    matrix = np.zeros((1, 8), np.float32)
    for verb in (
        lambda: pool.core.lookup(None, matrix),  # type: ignore[arg-type]
        lambda: pool.core.sum_gradients([(None, matrix)]),  # type: ignore[list-item]
        lambda: pool.core.update([(None, matrix)], **RATES),  # type: ignore[list-item]
        lambda: pool.core.put([(None, [0], np.zeros(0, np.uint8), np.zeros(0, np.float32))]),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError):
            verb()
    with pytest.raises(StepError):
        pool.core.update([], **RATES)
    with pytest.raises(StepError):
        pool.core.put([])
    pool.close()
