"""The loop: a batch's way through the house, all eight verbs of it.

recover, then for every batch: plan (ahead, in the loader's thread) → capture → lookup → train → update → commit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.batch import Batch
from holdfast.data.loader import Loader
from holdfast.data.source import Source
from holdfast.dense import Checkpoint
from holdfast.embedding import EmbeddingBagCollection, PlannedFeatures, clip_grad_norm_
from holdfast.errors import NonFiniteLoss
from holdfast.metrics import Evaluation, evaluate_scores
from holdfast.models.dlrm import DLRM
from holdfast.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the loop runs. steps: where training ends (None: after `epochs`). prefetch: batches planned ahead."""

    batch_size: int = 2048
    steps: int | None = None
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    workers: int = 1
    prefetch: int = 2
    eval_every: int = 0
    eval_batch_size: int = 8192
    bf16: bool = False
    max_grad_norm: float | None = None
    capture_ahead: bool = False

    def __post_init__(self) -> None:
        for field in ("batch_size", "epochs", "workers", "prefetch", "eval_batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 1")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps = {self.steps}; it must not be negative")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. stage_ms: wall time of each verb; plan is the wait for the loader, which plans ahead."""

    step: int
    durable_step: int
    loss: float
    samples: int
    stage_ms: dict[str, float]


class Stopwatch:
    """Splits a step's wall time into stages."""

    def __init__(self) -> None:
        self.stage_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stage_ms[stage] = (now - self._last) * 1e3
        self._last = now


class Trainer:
    """A model, its pool and its data, ready to step. Context manager: closes loader and pool."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        pool: Pool,
        rows: EmbeddingBagCollection,
        model: DLRM,
        dense_optimizer: torch.optim.Optimizer,
        source: Source,
        extra: dict[str, object] | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.rows = rows
        self.model = model
        self._dense_optimizer = dense_optimizer
        self.loader: Loader[tuple[Batch, PlannedFeatures]] = Loader(
            source,
            batch_size=config.batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            workers=config.workers,
            prefetch=config.prefetch,
            transform=lambda batch: rows.plan(batch.features),
        )
        self.checkpoint = Checkpoint(
            pool, model=model, optimizer=dense_optimizer, loader=self.loader, extra=extra
        )
        self._loss = nn.BCEWithLogitsLoss()
        self._next: tuple[Batch, PlannedFeatures] | None = None

    @property
    def last_step(self) -> int:
        """Where training ends."""
        if self.config.steps is not None:
            return self.config.steps
        return math.ceil(self.config.epochs * self.loader.samples_per_epoch / self.config.batch_size)

    def recover(self) -> int:
        """The recover verb's second half: the pool has rolled its rows back when it was opened; now the dense state."""
        return self.checkpoint.resume()

    def steps(self) -> Iterator[StepReport]:
        """Trains to the last step; yields after every commit. Raises NonFiniteLoss, and the pool stays where it was."""
        while self.pool.step < self.last_step:
            yield self._step()

    def _step(self) -> StepReport:
        watch = Stopwatch()
        batch, planned = self._next or next(self.loader)  # plan
        self._next = None
        watch.lap("plan")
        capture = self.rows.capture(planned)
        watch.lap("capture")
        pooled = self.rows.lookup(capture, planned)
        if self.config.capture_ahead:
            self._next = next(self.loader)
            self.rows.capture_ahead(self._next[1])
        watch.lap("lookup")
        loss = self._train(batch, pooled)
        watch.lap("train")
        self.rows.optimizer.step()  # update
        watch.lap("update")
        step = self.checkpoint.commit(batch.first_sample + batch.size)
        watch.lap("commit")
        return StepReport(step, self.pool.durable_step, loss, batch.size, watch.stage_ms)

    def _train(self, batch: Batch, pooled: Tensor) -> float:
        """Forward, backward and the dense optimizer's step. Rows' gradients stay with the collection."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            logits = self.model.from_pooled(batch.dense, pooled)
        loss = self._loss(logits.float(), batch.labels)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss of step {self.pool.step + 1} is {value}: nothing was updated, the pool stays at step "
                f"{self.pool.step}; lower the learning rate or set train.max_grad_norm"
            )
        self._dense_optimizer.zero_grad()
        loss.backward()
        if self.config.max_grad_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.rows, self.config.max_grad_norm)
        self._dense_optimizer.step()
        return value

    @torch.no_grad()
    def evaluate(self, source: Source, on_batch: Callable[[int], None] | None = None) -> Evaluation:
        """AUC and log-loss over all of `source`. Leaves no trace: no log, no row, no random number."""
        self.model.eval()
        scores, labels = [], []
        try:
            with Loader(source, batch_size=self.config.eval_batch_size, seed=0) as loader:
                for batch in loader.once():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
                        scores.append(self.model(batch.dense, batch.features).float())
                    labels.append(batch.labels)
                    if on_batch is not None:
                        on_batch(batch.size)
        finally:
            self.model.train()
        return evaluate_scores(torch.cat(scores), torch.cat(labels))

    def close(self) -> None:
        """Stops the loader; makes everything durable and closes the pool."""
        with ExitStack() as stack:
            stack.callback(self.pool.close)
            self.loader.close()
