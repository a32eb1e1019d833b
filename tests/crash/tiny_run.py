"""A training run of milliseconds that uses every part of the protocol: what the crash tests kill and resume.

It is the real thing in small: the real loader, pool, collection, checkpoint and DLRM, a momentum optimizer, a
learning-rate schedule, and a loss that draws from torch's generator: whatever is not restored shows in the digest.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast import _core
from holdfast.batch import Batch
from holdfast.data import Loader, SyntheticConfig, SyntheticSource
from holdfast.dense import Checkpoint
from holdfast.embedding import EmbeddingBagCollection, PlannedFeatures
from holdfast.models import DLRM
from holdfast.optim import SGD, Adagrad, Adam, RowOptimizerSpec, RowWiseAdagrad, RowWiseAdam
from holdfast.pool import Pool
from holdfast.state_tree import rng_state, set_rng_state
from holdfast.tables import EmbeddingBagConfig

ROW_OPTIMIZERS: dict[str, type[RowOptimizerSpec]] = {
    "sgd": SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "adam": Adam,
    "rowwise_adam": RowWiseAdam,
}
ROWS = (600, 90, 7)
DIM = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. window: batches whose rows are announced, the current one included. lr_change: (step, factor): from that
    step on learning rates are multiplied by factor. put_back: see DensePart."""

    steps: int = 8
    batch_size: int = 24
    lookups: int = 2
    optimizer: str = "rowwise_adagrad"
    dtype: str = "fp32"
    dense_interval: int = 1
    log_bytes: int | None = None
    scratchpad_bytes: int | None = None
    window: int = 0
    capture_ahead: bool = False
    micro_batches: int = 1
    skip_every: int = 0
    lr_change: tuple[int, float] | None = None
    put_back: tuple[int, int] | None = None
    recovery: str = "exact"
    medium: str = "memory"


class DensePart:
    """All that is dense, random numbers too. put_back: (step, earlier): after that step it becomes what it was after
    the earlier one."""

    def __init__(self, items: Sequence[Any], put_back: tuple[int, int] | None) -> None:
        self._items = items
        self._step, self._earlier = put_back or (None, None)
        self._kept: tuple[list[Any], Any] | None = None

    def at(self, step: int) -> None:
        """Between `step` and the next."""
        if step == self._earlier:
            self._kept = copy.deepcopy([item.state_dict() for item in self._items]), rng_state()
        if step == self._step:
            assert self._kept is not None
            for item, state in zip(self._items, self._kept[0], strict=True):
                item.load_state_dict(state)
            set_rng_state(self._kept[1])


def train(directory: str, options: Options) -> dict[str, int]:
    """Makes the pool or goes on where it is, to `options.steps`; closes it. Returns where it went on and how often it
    was in step with its loader."""
    torch.set_num_threads(1)
    _core.set_num_threads(1)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  (its state is part of the digest)
    torch.manual_seed(5)
    source = SyntheticSource(
        SyntheticConfig(num_samples=options.batch_size * 5 + 3, rows=ROWS, lookups=options.lookups, num_dense=4)
    )
    with Pool(
        directory,
        seed=3,
        medium=options.medium,  # type: ignore[arg-type]
        log_bytes=options.log_bytes,
        scratchpad_bytes=options.scratchpad_bytes,
        dense_interval=options.dense_interval,
        recovery=options.recovery,  # type: ignore[arg-type]
    ) as pool:
        rows = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(
                    num_embeddings=count,
                    embedding_dim=DIM,
                    name=f"table_{i}",
                    feature_names=[source.features[i].name],
                    data_type=options.dtype,
                )
                for i, count in enumerate(ROWS)
            ],
            optimizer=ROW_OPTIMIZERS[options.optimizer](lr=0.05),
        )
        model = DLRM(
            embeddings=rows, num_dense=4, embedding_dim=DIM, num_features=len(ROWS), bottom=[16, DIM], top=[12, 1]
        )
        dense = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.StepLR(item, 3, 0.7) for item in (dense, rows.optimizer)]
        with Loader(
            source,
            batch_size=options.batch_size,
            seed=11,
            transform=lambda batch: rows.plan(batch.features),
        ) as loader:
            checkpoint = Checkpoint(pool, model=model, optimizer=dense, scheduler=schedules, loader=loader)
            resumed_at = checkpoint.resume()
            upcoming: deque[tuple[Batch, PlannedFeatures]] = deque()
            dense_part = DensePart((model, dense, rows.optimizer, *schedules), options.put_back)
            while pool.step < options.steps:
                dense_part.at(pool.step)
                step = pool.step + 1
                if options.lr_change is not None and step == options.lr_change[0]:
                    for item in (dense, rows.optimizer):
                        for group in item.param_groups:
                            group["lr"] *= options.lr_change[1]
                dense.zero_grad()
                end = 0
                for part in range(options.micro_batches):
                    while len(upcoming) < max(1, options.window):
                        upcoming.append(next(loader))
                        if options.window > 0:
                            rows.announce(upcoming[-1][1])
                    batch, planned = upcoming.popleft()
                    end = batch.first_sample + batch.size
                    logits = model.from_pooled(batch.dense, rows.lookup(rows.capture(planned), planned))
                    if options.capture_ahead and part == options.micro_batches - 1:
                        upcoming.append(next(loader))
                        rows.capture_ahead(upcoming[-1][1])
                    target = batch.labels * (0.9 + 0.1 * torch.rand(()))
                    torch.nn.functional.binary_cross_entropy_with_logits(logits, target).backward()
                skipped = options.skip_every > 0 and step % options.skip_every == 0
                if not skipped:
                    dense.step()
                    rows.optimizer.step()
                for schedule in schedules:
                    schedule.step()
                checkpoint.commit(end)
            checkpoint.flush()
            assert pool.durable_step == options.steps
            traffic = pool.core.traffic() or {}
        return {
            "resumed_at": resumed_at,
            "undone": pool.recovered.records_undone,
            "merged_bytes": int(traffic.get("merged_bytes", 0)),
        }
