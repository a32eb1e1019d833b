"""The README's loop over a pool that is opened again, defaults throughout: the first steps, and once it is warm.

Tables are written in full, a few steps are trained on other batches, and the pool is closed: so a resume finds it. What
is timed is what a reader of the README would write, over batches that are in memory, wrapped once.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import holdfast
from ours.measure import dense_parameters
from ours.systems import Holdfast
from peers.batches import make_batches
from peers.measure import make_model
from peers.systems import LEARNING_RATE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from peers.shapes import Shape

_STEPS_BEFORE = 5
_MOST_STEPS = 2000  # for which it may be warming
_OTHER_SEED = 2
_BESIDE_A_ROW = 48  # bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    dense: Tensor
    features: holdfast.JaggedFeatures
    labels: Tensor


def _batches(shape: Shape, count: int, seed: int = 1) -> list[_Batch]:
    keys = [f"f{number}" for number in range(shape.num_tables)]
    return [
        _Batch(batch.dense, holdfast.JaggedFeatures(keys, batch.ids, batch.offsets), batch.labels)
        for batch in make_batches(shape, count, seed)
    ]


class _Loop:
    def __init__(self, shape: Shape, optimizer: str, directory: Path) -> None:
        self.system = Holdfast(shape, optimizer, directory, [])
        self.pool, self.rows = self.system.pool, self.system.rows
        self.model: Any = make_model(shape, self.rows)
        self.dense_optimizer = torch.optim.SGD(dense_parameters(self.model), lr=LEARNING_RATE, fused=True)
        self.checkpoint = holdfast.Checkpoint(self.pool, model=self.model, optimizer=self.dense_optimizer)
        self.checkpoint.resume()

    def train(self, batches: Iterable[_Batch], steps: int) -> list[float]:
        """Milliseconds of each step, taking the batch included."""
        step_ms = []
        began = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            self.dense_optimizer.zero_grad(set_to_none=True)
            logits = self.model.from_pooled(batch.dense, self.rows(batch.features).values())
            loss = binary_cross_entropy_with_logits(logits, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.dense_optimizer.step()
            self.rows.optimizer.step()
            self.checkpoint.commit(loss=loss.detach())
            now = time.perf_counter()
            step_ms.append((now - began) * 1e3)
            began = now
        return step_ms

    def is_warming(self) -> bool:
        return bool((self.pool.traffic() or {}).get("is_warming"))


def _seconds_of_first_touch(shape: Shape) -> float:
    """Touches as much memory as the tables take, and gives it back.

    The host of a virtual machine takes up to seconds for a GiB that it has to find first, and takes it back when it has
    been free for a while: that is neither the pool's time nor the baseline's, whose tables are in memory already.
    """
    began = time.perf_counter()
    torch.ones(shape.num_tables * shape.num_embeddings * (4 * shape.embedding_dim + _BESIDE_A_ROW), dtype=torch.uint8)
    return time.perf_counter() - began


def measure(shape: Shape, optimizer: str, directory: Path, *, steps: int, num_batches: int) -> dict[str, Any]:
    """``first_ms``: of the `steps` steps after opening. ``step_ms``: of as many once it is warm, every batch seen."""
    filled = Holdfast(shape, optimizer, directory, [])
    filled.fill(shape)
    filled.close()
    before = _Loop(shape, optimizer, directory)
    before.train(holdfast.prefetch(_batches(shape, _STEPS_BEFORE, _OTHER_SEED), before.pool), _STEPS_BEFORE)
    before.pool.close()

    batches = _batches(shape, num_batches)
    first_touch_s = _seconds_of_first_touch(shape)
    began = time.perf_counter()
    loop = _Loop(shape, optimizer, directory)
    opened_s = time.perf_counter() - began
    coming = holdfast.prefetch(itertools.cycle(batches), loop.pool)
    first_ms = loop.train(coming, steps)
    after_first = loop.pool.traffic()
    between_ms: list[float] = []
    while len(between_ms) < max(num_batches - steps, 0) or (loop.is_warming() and len(between_ms) < _MOST_STEPS):
        between_ms += loop.train(coming, 1)
    step_ms = loop.train(coming, steps)
    result = {
        "first_touch_s": first_touch_s,
        "opened_s": opened_s,
        "first_ms": first_ms,
        "num_between": len(between_ms),
        "step_ms": step_ms,
        "traffic_after_first": after_first,
        "traffic": loop.pool.traffic(),
        "system": loop.system.facts(),
    }
    loop.pool.close()
    return result
