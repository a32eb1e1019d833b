"""Numbers that are none never stay in a pool: gradients that are not finite, settings that would make rows so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import SGD, Checkpoint, DeviceConfig, EmbeddingBagCollection, Pool
from holdfast.errors import NonFiniteLoss
from twin import jagged, random_bags, same_bits, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=19, pooling="mean")]


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_a_gradient_that_is_not_finite_never_stays_in_the_pool(way: Any, with_loss: bool, pool_root: Path) -> None:
    """Where the loss is finite, too: the root of 0 has none."""

    def rows_of(pool: Pool) -> list[Tensor]:
        return [pool.collections[0].read(number, torch.arange(20)) for number in range(2)]

    def train(*factors: float) -> list[Tensor]:
        with Pool(pool_root / "pool", seed=7) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
            checkpoint = Checkpoint(pool, model=nn.Identity(), optimizer=[])
            checkpoint.resume()
            for factor in factors:
                loss = (factor * rows(jagged(random_bags("abc", 20, 5, pool.step))).values()).square().sum().sqrt()
                assert loss.isfinite()
                loss.backward()
                rows.optimizer.step()
                checkpoint.commit(loss=loss if with_loss else None)
            checkpoint.flush()
            return rows_of(pool)

    train(1.0)
    with pytest.raises(NonFiniteLoss, match=r"gradient of the rows of step 3 is not finite: the pool stays at step 2"):
        train(1.0, 0.0)
    with Pool(pool_root / "pool") as pool:
        EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
        assert pool.step == 2
        assert all(row.isfinite().all() for row in rows_of(pool))
    assert all(row.isfinite().all() for row in train(1.0))


def test_a_gradient_that_is_not_finite_is_refused_however_often_its_step_is_committed(pool_root: Path) -> None:
    with Pool(pool_root / "pool", seed=7) as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        before = rows.read(0, torch.arange(20))
        (rows(jagged(random_bags("abc", 20, 5, 1))).values() * float("nan")).sum().backward()
        rows.optimizer.zero_grad()  # the loop found it: nothing is updated
        rows.optimizer.step()
        assert pool.commit(1) == 1
        assert same_bits(rows.read(0, torch.arange(20)), before)
        (rows(jagged(random_bags("abc", 20, 5, 1))).values() * float("nan")).sum().backward()
        rows.optimizer.step()
        for _ in range(2):
            with pytest.raises(NonFiniteLoss, match="the pool stays at step 1"):
                pool.commit(2)
