"""A Checkpoint that resumes in the process that trained, as in a notebook after Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import SGD, Checkpoint, DeviceConfig, EmbeddingBagCollection, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import StateError, StepError
from twin import jagged, random_bags, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=19, pooling="mean")]


@pytest.mark.parametrize(
    ("medium", "way"), [("memory", "near_memory"), ("block", "near_memory"), ("block", "scratchpad")]
)
def test_a_resume_is_refused_where_the_newest_dense_state_is_older_than_the_rows(
    pool_root: Path, medium: Any, way: Any
):
    def open_loop(name: str) -> tuple[Pool, Checkpoint, Callable[[int], None]]:
        pool = Pool(pool_root / name, medium=medium, dense_interval=3)
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
        torch.manual_seed(1)
        head = nn.Linear(rows.output_width, 1)
        dense = torch.optim.SGD(head.parameters(), lr=0.1)
        checkpoint = Checkpoint(pool, model=head, optimizer=dense)

        def train(until: int) -> None:
            while pool.step < until:
                dense.zero_grad()
                head(rows(jagged(random_bags("abc", 20, 5, pool.step))).values()).square().sum().backward()
                dense.step()
                rows.optimizer.step()
                checkpoint.commit()

        checkpoint.resume()
        return pool, checkpoint, train

    pool, checkpoint, train = open_loop("pool")
    train(3)
    assert checkpoint.resume() == 3
    train(5)
    with pytest.raises(StepError, match=r"at step 5, and its newest dense state is of an earlier one.*open it again"):
        checkpoint.resume()
    pool.close()
    pool, checkpoint, train = open_loop("pool")
    assert pool.step == 3
    train(5)
    assert checkpoint.flush() == checkpoint.resume() == 5
    train(8)
    pool.close()
    pool, checkpoint, train = open_loop("whole")
    train(8)
    pool.close()
    whole, interrupted = (digest_pool(_core.Reader(str(pool_root / name))).tables for name in ("whole", "pool"))
    assert whole == interrupted


def test_what_a_failed_resume_loaded_by_halves_is_not_committed(pool_root: Path):
    def open_checkpoint(width: int) -> tuple[Pool, nn.Sequential, Checkpoint]:
        pool = Pool(pool_root / "pool")
        EmbeddingBagCollection(pool, TABLES)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
        return pool, model, Checkpoint(pool, model=model, optimizer=[])

    pool, model, checkpoint = open_checkpoint(1)
    checkpoint.resume()
    checkpoint.commit()
    expected = [parameter.clone() for parameter in model.parameters()]
    pool.close()
    pool, model, checkpoint = open_checkpoint(3)
    with pytest.raises(StateError, match="model"):
        checkpoint.resume()
    for write in (checkpoint.commit, checkpoint.flush):
        with pytest.raises(StepError, match="without resume, or after one that failed"):
            write()
    pool.close()
    pool, model, checkpoint = open_checkpoint(1)
    assert checkpoint.resume() == 1
    assert all(torch.equal(now, before) for now, before in zip(model.parameters(), expected, strict=True))
    pool.close()
