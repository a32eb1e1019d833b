"""A training run of milliseconds that uses every part of the protocol: what the crash tests kill and resume.

It is the real thing in small: the real loader, pool, collection, checkpoint and DLRM, a momentum optimizer, a
learning-rate schedule, and a loss that draws from torch's generator: whatever is not restored shows in the digest.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import _core
from holdfast.data import Loader, SyntheticConfig, SyntheticSource
from holdfast.data.batch import Batch, JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.errors import PoolError
from holdfast.models import DLRM
from holdfast.pools.dial import MediumDial
from holdfast.pools.log_medium import LogMedium
from holdfast.pools.optim import SGD, Adagrad, Adam, RowOptimizerSpec, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.rows.row_access import PlannedFeatures
from holdfast.state.generators import rng_state, set_rng_state
from holdfast.train.checkpoint import Checkpoint

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
    """One run. window: batches whose rows are announced, the current one included. lr_change: (step, factor): from
    that step on learning rates are multiplied by factor. put_back: see DensePart. way, slot_bytes: DeviceConfig's
    rows and scratchpad_bytes, on the processor. log_apart: the row log lies in a folder `logs` beside the pool's.
    keys: the tables' ids are keys, which nobody counted; ttl_steps, max_keys, stay, admit_probability: of them."""

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
    trust_after_reboot: bool = False
    row_checksums: bool = False
    way: str = "near_memory"
    slot_bytes: int | None = None
    relaxed_lookup: bool = False
    synchronous: bool = False
    dial: str | None = None
    log_apart: bool = False
    keys: bool = False
    ttl_steps: int | None = None
    max_keys: int | None = None
    stay: str | None = None
    admit_probability: float | None = None


def scattered(features: JaggedFeatures) -> JaggedFeatures:
    """Keys instead of ids: another one each, all over the 64 bits, half of them negative."""
    return JaggedFeatures(features.keys(), features.values() * -0x61C8864680B583EB + 0x1234567, features.offsets())


class Watch:
    """Is told how far a run has come, and what the pool threw at it."""

    def reached(self, stage: str, pool: Pool | None) -> None:
        """opening (before there is a pool), training (before the first step), midway (half of the steps are done),
        closing."""

    def stepped(self, pool: Pool) -> None:
        """After every step."""

    def failed(self, error: PoolError, pool: Pool, take_step: Callable[[], None]) -> None:
        raise error


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


class TinyRun:
    """Everything that a step needs. `pool` is closed by whoever made it, and `loader`."""

    def __init__(self, pool: Pool, options: Options) -> None:
        self.pool = pool
        self.options = options
        source = SyntheticSource(
            SyntheticConfig(num_samples=options.batch_size * 5 + 3, rows=ROWS, lookups=options.lookups, num_dense=4)
        )
        self.rows = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(
                    num_embeddings=None if options.keys else count,
                    capacity=2 * count if options.keys else None,
                    ttl_steps=options.ttl_steps,
                    max_keys=options.max_keys,
                    stay=options.stay,
                    admit_probability=options.admit_probability,
                    embedding_dim=DIM,
                    name=f"table_{i}",
                    feature_names=[source.features[i].name],
                    data_type=options.dtype,
                )
                for i, count in enumerate(ROWS)
            ],
            optimizer=ROW_OPTIMIZERS[options.optimizer](lr=0.05),
            device=DeviceConfig(
                rows=options.way,  # type: ignore[arg-type]
                scratchpad_bytes=options.slot_bytes,
                relaxed_lookup=options.relaxed_lookup,
            ),
        )
        self.model = DLRM(
            embeddings=self.rows, num_dense=4, embedding_dim=DIM, num_features=len(ROWS), bottom=[16, DIM], top=[12, 1]
        )
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedules = [torch.optim.lr_scheduler.StepLR(item, 3, 0.7) for item in (self.dense, self.rows.optimizer)]
        self.loader: Loader[tuple[Batch, PlannedFeatures]] = Loader(
            source,
            batch_size=options.batch_size,
            seed=11,
            transform=lambda batch: self.rows.plan(scattered(batch.features) if options.keys else batch.features),
        )
        self.checkpoint = Checkpoint(
            pool, model=self.model, optimizer=self.dense, scheduler=self.schedules, loader=self.loader
        )
        self._dense_part = DensePart((self.model, self.dense, self.rows.optimizer, *self.schedules), options.put_back)
        self._upcoming: deque[tuple[Batch, PlannedFeatures]] = deque()
        self._before: PlannedFeatures | None = None

    def resume(self) -> int:
        step = self.checkpoint.resume()
        if self.options.relaxed_lookup and step > 0:
            # The batch before decides how sums are split.
            cursor = self.loader.samples
            self.loader.seek(cursor - self.options.batch_size)
            _, self._before = next(self.loader)
            self.loader.seek(cursor)
        return step

    def take_step(self) -> None:
        options = self.options
        self._dense_part.at(self.pool.step)
        step = self.pool.step + 1
        if options.lr_change is not None and step == options.lr_change[0]:
            for item in (self.dense, self.rows.optimizer):
                for group in item.param_groups:
                    group["lr"] *= options.lr_change[1]
        self.dense.zero_grad()
        end = 0
        for part in range(options.micro_batches):
            end = self._accumulate(is_last=part == options.micro_batches - 1)
        skipped = options.skip_every > 0 and step % options.skip_every == 0
        if not skipped:
            self.dense.step()
            self.rows.optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        self.checkpoint.commit(end)

    def _accumulate(self, *, is_last: bool) -> int:
        """Forward and backward of a micro-batch; returns the samples consumed up to its end."""
        while len(self._upcoming) < max(1, self.options.window):
            self._upcoming.append(next(self.loader))
            if self.options.window > 0:
                self.rows.announce(self._upcoming[-1][1])
        batch, planned = self._upcoming.popleft()
        if self.options.relaxed_lookup:
            if self._before is not None:
                self.rows.lookup_ahead(planned, self._before)
            self._before = planned
        logits = self.model.from_pooled(batch.dense, self.rows.lookup(self.rows.capture(planned), planned))
        if self.options.capture_ahead and is_last:
            self._upcoming.append(next(self.loader))
            self.rows.capture_ahead(self._upcoming[-1][1])
        target = batch.labels * (0.9 + 0.1 * torch.rand(()))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, target).backward()
        return batch.first_sample + batch.size


def log_apart(directory: str) -> LogMedium:
    logs = Path(directory).parent / "logs"
    logs.mkdir(exist_ok=True)
    return LogMedium(directory=logs)


def train(directory: str, options: Options, watch: Watch | None = None) -> dict[str, int]:
    """Makes the pool or goes on where it is, to `options.steps`; closes it. Returns where it went on and how often it
    was in step with its loader."""
    watch = watch or Watch()
    torch.set_num_threads(1)
    _core.set_num_threads(1)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  (its state is part of the digest)
    torch.manual_seed(5)
    watch.reached("opening", None)
    with Pool(
        directory,
        seed=3,
        medium=options.medium,  # type: ignore[arg-type]
        log_bytes=options.log_bytes,
        row_checksums=options.row_checksums,
        synchronous=options.synchronous,
        dial=None if options.dial is None else MediumDial(like=options.dial),  # type: ignore[arg-type]
        log=log_apart(directory) if options.log_apart else None,
        scratchpad_bytes=options.scratchpad_bytes,
        dense_interval=options.dense_interval,
        recovery=options.recovery,  # type: ignore[arg-type]
        trust_after_reboot=options.trust_after_reboot,
    ) as pool:
        run = TinyRun(pool, options)
        traffic: dict[str, float] = {}
        with run.loader:
            resumed_at = run.resume()
            try:
                watch.reached("training", pool)
                while pool.step < options.steps:
                    if pool.step == options.steps // 2:
                        watch.reached("midway", pool)
                    run.take_step()
                    watch.stepped(pool)
                run.checkpoint.flush()
                assert pool.durable_step == options.steps
                watch.reached("closing", pool)
                traffic = pool.core.traffic() or {}
                pool.close()
            except PoolError as error:
                watch.failed(error, pool, run.take_step)
        return {
            "resumed_at": resumed_at,
            "undone": pool.recovered.records_undone,
            "merged_bytes": int(traffic.get("merged_bytes", 0)),
        }
