"""A small training whose every bit is looked at, with the rows kept in either store.

Two collections in one pool, with fp32, fp16 or bf16 rows, empty bags and repeated ids, and a dense part beside them.
The log is so small that a few steps fill it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from holdfast import Adam, Checkpoint, EmbeddingBagCollection, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.pools.optim import RowOptimizerSpec, RowWiseAdagrad
from holdfast.rows.row_access import PlannedFeatures
from twin import jagged, random_bags, table

SAMPLES = 8
LOG_BYTES = 96 << 10
ALL_ROWS = 1 << 20  # bytes: more than the tables have
ROWS_OF: Mapping[str, int] = {"ab": 300, "c": 90, "d": 40}  # by features


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step does. thrown_away: a forward whose output nobody uses, before the micro-batches that count."""

    micro_batches: int = 1
    thrown_away: bool = False
    evaluates: bool = False
    updates: bool = True


ADAGRAD = RowWiseAdagrad(lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained: all of this may show in the digest."""

    steps: tuple[Step, ...] = ()
    optimizer: RowOptimizerSpec = ADAGRAD
    dtype: str = "fp32"
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Way:
    """How it is trained: none of this may."""

    medium: Literal["memory", "block"] = "block"
    scratchpad_bytes: int = ALL_ROWS
    log_bytes: int = LOG_BYTES
    window: int = 0
    num_threads: int = 1
    dense_interval: int = 1


@dataclass(frozen=True)
class Found:
    digest: str
    outputs: str  # of every forward, evaluations included
    traffic: dict[str, float] | None = field(compare=False)


class Training:
    """A pool in training; makes it or goes on where it is. Context manager: closes it."""

    def __init__(self, directory: Path, run: Run, way: Way) -> None:
        _core.set_num_threads(way.num_threads)
        torch.manual_seed(run.seed)
        self.run, self.way = run, way
        self.pool = Pool(
            directory,
            seed=3,
            medium=way.medium,
            log_bytes=way.log_bytes,
            scratchpad_bytes=way.scratchpad_bytes,
            dense_interval=way.dense_interval,
        )
        first = [
            table("t", ["a", "b"], rows=300, dim=8, data_type=run.dtype),
            table("u", ["c"], rows=90, dim=3, pooling="mean"),
        ]
        second = [table("v", ["d"], rows=40, dim=16, data_type="bf16")]
        self.collections = [
            EmbeddingBagCollection(self.pool, first, optimizer=run.optimizer),
            EmbeddingBagCollection(self.pool, second, optimizer=Adam(lr=0.02)),
        ]
        self.model = torch.nn.Linear(sum(rows.output_width for rows in self.collections), 1)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.checkpoint = Checkpoint(self.pool, model=self.model, optimizer=self.dense)
        self.checkpoint.resume()
        self.outputs = hashlib.sha256()
        self._upcoming: deque[list[PlannedFeatures]] = deque()
        self._num_planned = self.pool.core.cursor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, trace)

    def plan(self, number: int) -> list[PlannedFeatures]:
        """Of batch `number`, by collection."""
        bags = {}
        for features, num_rows in ROWS_OF.items():
            bags.update(random_bags(features, num_rows, SAMPLES, 100_000 * self.run.seed + 1000 * number + num_rows))
        together = jagged(bags)
        return [rows.plan(together) for rows in self.collections]

    def forward(self, planned: list[PlannedFeatures]) -> Tensor:
        pooled = [rows.lookup(rows.capture(plan), plan) for rows, plan in zip(self.collections, planned, strict=True)]
        self.outputs.update(torch.cat(pooled, 1).detach().numpy().tobytes())
        return torch.cat(pooled, 1)

    def throw_away(self, number: int) -> None:
        self.forward(self.plan(number))

    def evaluate(self, number: int) -> None:
        with torch.no_grad():
            for rows, plan in zip(self.collections, self.plan(number), strict=True):
                self.outputs.update(rows(plan).values().numpy().tobytes())

    def begin_step(self, step: Step) -> int:
        """All of a step but its commit; returns the cursor at its end, in batches: a run goes on with the batch after
        the last that counted."""
        number = self.pool.step
        end = self.pool.core.cursor + step.micro_batches
        self.dense.zero_grad()
        if step.thrown_away:
            self.throw_away(10_000 + number)
        for _ in range(step.micro_batches):
            self.model(self.forward(self._take())).square().mean().backward()
        if step.evaluates:
            self.evaluate(20_000 + number)
        if step.updates:
            self.dense.step()
            for rows in self.collections:
                rows.optimizer.step()
        return end

    def step(self, step: Step) -> None:
        self.checkpoint.commit(self.begin_step(step))

    def _take(self) -> list[PlannedFeatures]:
        while len(self._upcoming) < max(1, self.way.window):
            self._upcoming.append(self.plan(self._num_planned))
            self._num_planned += 1
            if self.way.window > 0:
                for rows, planned in zip(self.collections, self._upcoming[-1], strict=True):
                    rows.announce(planned)
        return self._upcoming.popleft()


def digest(directory: Path) -> str:
    return digest_pool(_core.Reader(str(directory))).whole


def train(directory: Path, run: Run, way: Way) -> Found:
    """All of `run`, and what it left."""
    with Training(directory, run, way) as training:
        for step in run.steps:
            training.step(step)
        training.checkpoint.flush()
        traffic = training.pool.core.traffic()
    return Found(digest(directory), training.outputs.hexdigest(), traffic)
