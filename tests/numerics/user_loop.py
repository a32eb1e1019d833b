"""A training loop as a user writes it, with parts of the user's own, stopped and gone on with in new objects.

The next life shares nothing with the one before but the pool: everything is made anew from other seeds, so whatever is
not given back shows in the digest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Checkpoint, EmbeddingBagCollection, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.pools.optim import RowWiseAdagrad
from twin import jagged, random_bags, table

SAMPLES = 6
STEPS = 9


@dataclass
class Parts:
    """What a user holds. after: what the loop does after each step with its loss, beside optimizer steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    given: dict[str, Any] = field(default_factory=dict)  # further arguments of Checkpoint
    noise: Callable[[], float] = lambda: 0.0  # added to the targets
    after: Callable[[float], object] = lambda loss: None
    backward: Callable[[Tensor], object] = Tensor.backward
    scaler: Any = None


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1)).to(dtype)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Life:
    """One life of a loop over a pool."""

    def __init__(self, directory: Path, make: Callable[[EmbeddingBagCollection], Parts], *, life: int) -> None:
        torch.manual_seed(life)
        random.seed(life)
        np.random.seed(life)  # noqa: NPY002
        self.pool = Pool(directory, medium="memory")
        with ExitStack() as on_error:
            on_error.callback(self.pool.close)
            self.rows = EmbeddingBagCollection(self.pool, [table("t", ["f"])], optimizer=RowWiseAdagrad(lr=0.05))
            self.parts = make(self.rows)
            given = {"optimizer": self.parts.optimizer, **self.parts.given}
            self.checkpoint = Checkpoint(self.pool, model=self.parts.model, **given)
            self.checkpoint.resume()
            on_error.pop_all()

    def train(self, last_step: int) -> None:
        parts = self.parts
        while self.pool.step < last_step:
            number = self.pool.step
            pooled = self.rows(jagged(random_bags(["f"], 20, SAMPLES, seed=number))).values()
            dtype = next(parts.model.parameters()).dtype
            out = parts.model(pooled.to(dtype))
            loss = (out.float() - number % 3 - parts.noise()).square().mean()
            if parts.scaler is None:
                parts.optimizer.zero_grad()
                parts.backward(loss)
                parts.optimizer.step()
                self.rows.optimizer.step()
            else:
                parts.optimizer.zero_grad()
                parts.scaler.scale(loss).backward()
                parts.scaler.step(parts.optimizer)
                parts.scaler.step(self.rows.optimizer)
                parts.scaler.update()
            parts.after(float(loss.detach()))
            self.checkpoint.commit()


def trained(directory: Path, make: Callable[[EmbeddingBagCollection], Parts], *, stops: tuple[int, ...] = ()) -> str:
    """The digest at the end of a run that was stopped after these steps."""
    for life, last_step in enumerate((*stops, STEPS)):
        run = Life(directory, make, life=100 + life)
        run.train(last_step)
        run.pool.close()
    return digest_pool(_core.Reader(str(directory))).whole
