"""The loop of a group: the verbs of holdfast/train.py, with the wire between them.

    owners:    plan → capture → lookup ─vectors→            ─gradients→ update → commit
    trainers:                           bottom MLP → train →            dense step → commit

Counts and ids of a later batch travel, and are planned, while this one computes. Every rank takes part in every
collective, in this order: vectors, counts and ids of the batch ahead, gradients; dense gradients among trainers beside.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from holdfast import _core
from holdfast.batch import Batch
from holdfast.data.loader import Loader
from holdfast.data.source import Source
from holdfast.dense import TrainingState
from holdfast.errors import ConfigError, HoldfastError, NonFiniteLoss
from holdfast.metrics import Evaluation, evaluate_scores
from holdfast.models.dlrm import DLRM
from holdfast.sharding.exchange import Exchange, Travelling
from holdfast.sharding.group import Group, Pending
from holdfast.sharding.pool import GroupPool
from holdfast.sharding.rows import ShardedRows, clip_factor
from holdfast.sharding.state import GroupState, checksum_of
from holdfast.train import (
    EvaluationStopped,
    Span,
    StepReport,
    Stopwatch,
    TrainConfig,
    background_of,
    last_step_of,
    traffic_since,
)

_Routed = tuple[Batch, tuple[_core.Route, Span]]


@dataclass(slots=True)
class _Ahead:
    """A batch whose ids travel; `routed` on trainers, but where there is no further batch."""

    routed: _Routed | None
    travelling: Travelling
    step: int


class GroupTrainer:
    """A rank of a group, ready to step. Context manager: closes loader, pool and group."""

    can_flush_alone = False  # the others would have to take part

    def __init__(
        self,
        config: TrainConfig,
        *,
        pool: GroupPool,
        rows: ShardedRows,
        model: DLRM,
        dense_optimizer: torch.optim.Optimizer,
        source: Source,
        extra: dict[str, object] | None = None,
    ) -> None:
        self.config = config
        self.group = pool.group
        self.pool = pool
        self.rows = rows
        self.model = model
        self.dense_optimizer = dense_optimizer
        self.stopped = False
        self.opening_seconds: dict[str, float] = {}
        trainers = self.group.roles.trainers
        if config.batch_size < len(trainers):
            raise ConfigError(f"train.batch_size = {config.batch_size} is less than the {len(trainers)} trainers")
        if config.capture_ahead:
            raise ConfigError("train.capture_ahead works on one rank only; leave it out")
        self._part = (self.group.rank, len(trainers)) if self.group.is_trainer else (0, 1)  # of every batch
        self.loader: Loader[_Routed] = Loader(
            source,
            batch_size=config.batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            workers=config.workers,
            prefetch=config.prefetch,
            part=self._part,
            transform=lambda batch: _route(rows, batch),
        )
        self._state = GroupState(
            self.group,
            TrainingState(
                model=model,
                optimizers=[dense_optimizer],
                row_optimizers=[rows.optimizer],
                loader=self.loader,
                extra=extra,
            ),
        )
        self._exchange = Exchange(
            self.group, [pool.manifest.is_wide(table) for table in rows.table_of_feature], rows.plan
        )
        self._loss = nn.BCEWithLogitsLoss()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._upcoming: deque[_Ahead] = deque()
        self._dense_crc = -1
        self._begun = pool.step  # the last step whose batch is on its way

    @property
    def speaks(self) -> bool:
        """Of the run, on the terminal and in files."""
        return self.group.rank == 0

    @property
    def last_step(self) -> int:
        """Where training ends."""
        return last_step_of(self.config, self.loader.samples_per_epoch)

    def recover(self, saved: tuple[bytes, bytes] | None) -> int:
        """The dense state of the step that the pool went back to, as GroupPool.dense_state gave it; a new pool's is
        written. All ranks call it."""
        if saved is None:
            self._state.exchange_random_numbers()
            self.pool.write_first_dense(self._state.collect(0))
        else:
            self._state.restore(*saved)
        self.loader.seek(self.pool.cursor)
        return self.pool.step

    def steps(self) -> Iterator[StepReport]:
        """Trains to the last step, or until a rank was asked to stop; yields after every commit."""
        ahead = self.config.window if self.pool.looks_forward and self.config.window > 0 else 1
        while self.pool.step < self.last_step and not self.stopped:
            while len(self._upcoming) < ahead:
                following = self._begin_batch()
                self._exchange.send_ids(following.travelling)
                self._plan(following)
                self._upcoming.append(following)
            yield self._step(self._upcoming.popleft())

    # A step.

    def _step(self, current: _Ahead) -> StepReport:
        watch = Stopwatch()
        self.group.step = self.pool.step + 1
        member = self.pool.member
        traffic_before = None if member is None else member.traffic()
        batch = current.travelling
        capture = pooled = gradients = None
        if batch.plan is not None:
            capture = self.rows.capture(batch.plan)
            watch.lap("capture")
            pooled = torch.empty(sum(batch.plan.output_floats))
            self.rows.lookup(capture, pooled)
            watch.lap("lookup")
        vectors, received = self._exchange.send_vectors(batch, pooled)
        following = self._begin_batch()
        watch.lap("plan")
        bottom = None if current.routed is None else self._bottom(current.routed[0])
        watch.lap("train")
        vectors.wait()
        self._exchange.send_ids(following.travelling)
        watch.lap("wire")
        self.pool.take_note(following.travelling.statuses)
        is_due = self.pool.dense_is_due
        dense_sum = None
        if current.routed is not None:
            assert bottom is not None
            loss, gradients = self._train(current.routed, bottom, received)
            dense_sum = _DenseSum(self._parameters, loss, changed=is_due and self._state.random_numbers_changed())
            dense_sum.begin(self.group)
        watch.lap("train")
        arriving, row_gradients = self._exchange.send_gradients(batch, gradients)
        self._plan(following)
        watch.lap("plan")
        arriving.wait()
        if dense_sum is not None:
            dense_sum.wait()
        watch.lap("wire")
        if capture is not None:
            self.rows.add_gradient(capture, row_gradients)
        if self.config.max_grad_norm is not None:
            self._clip(self.config.max_grad_norm)
        self.rows.optimizer.step()
        watch.lap("update")
        if dense_sum is not None:
            self.dense_optimizer.step()
            watch.lap("train")
        self.stopped = any(status.stops for status in following.travelling.statuses)
        step = self._commit(is_due=is_due, random_numbers_changed=dense_sum is not None and dense_sum.changed)
        self._upcoming.append(following)
        watch.lap("commit")
        return StepReport(
            step=step,
            durable_step=self.pool.durable_step,
            loss=math.nan if dense_sum is None else dense_sum.loss,
            samples=self.config.batch_size,
            began=watch.began,
            stage_ms=watch.stage_ms,
            planning=Span("", watch.began, watch.began) if current.routed is None else current.routed[1][1],
            logged_bytes=0 if capture is None else capture.bytes,
            log_bytes_free=0 if member is None else member.log_bytes_free,
            traffic=traffic_since(traffic_before, None if member is None else member.traffic()),
            background=[] if member is None else background_of(member),
        )

    def _begin_batch(self) -> _Ahead:
        """The next batch's counts, and how far this rank is, are on their way."""
        self._begun += 1
        routed = next(self.loader) if self.group.is_trainer and self._begun <= self.last_step else None
        status = self.pool.status(stops=self.group.stopping(), dense_crc=self._dense_crc)
        return _Ahead(routed, self._exchange.send_counts(None if routed is None else routed[1][0], status), self._begun)

    def _plan(self, ahead: _Ahead) -> None:
        self._exchange.plan(ahead.travelling)
        if self.pool.looks_forward and ahead.travelling.plan is not None and ahead.step <= self.last_step:
            self.rows.announce(ahead.travelling.plan)

    def _bottom(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            x: Tensor = self.model.bottom(batch.dense)
        return x

    def _train(self, routed: _Routed, bottom: Tensor, received: Tensor) -> tuple[float, Tensor]:
        """Forward and backward; returns this trainer's share of the loss, and the gradients of what it received."""
        batch, (route, _) = routed
        pooled = torch.empty(batch.size, self.rows.output_width)
        route.combine(received.numpy(), pooled.numpy())
        pooled.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            logits = self.model.from_bottom(bottom, pooled)
        loss = self._loss(logits.float(), batch.labels)
        if batch.size != self.config.batch_size:
            loss = loss * (batch.size / self.config.batch_size)
        value = float(loss.detach())
        NonFiniteLoss.check(value, self.group.step)
        self.dense_optimizer.zero_grad()
        loss.backward()
        assert pooled.grad is not None
        gradients = torch.empty(sum(route.block_floats))
        route.spread(pooled.grad.contiguous().numpy(), gradients.numpy())
        return value, gradients

    def _clip(self, max_norm: float) -> None:
        """Row gradients of all owners and dense gradients together."""
        square = self.rows.gradient_square()
        if self.group.rank == 0:
            square += sum(float(p.grad.double().square().sum()) for p in self._parameters if p.grad is not None)
        total = torch.tensor([square], dtype=torch.float64)
        self.group.sum_over_all(total, "the gradients' norm").wait()
        factor = clip_factor(float(total), max_norm)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.rows.scale_gradients(factor)

    def _commit(self, *, is_due: bool, random_numbers_changed: bool) -> int:
        cursor = self.pool.cursor + self.config.batch_size
        dense = None
        if is_due:
            if random_numbers_changed:
                self._state.exchange_random_numbers()
            dense = self._state.collect(cursor)
            self._dense_crc = checksum_of(self._parameters) if self.group.is_trainer else -1
        return self.pool.commit(cursor, dense)

    def flush(self) -> None:
        """Makes the newest step durable on every rank, its dense state included; waits for it. All ranks call it."""
        self._state.exchange_random_numbers()
        self.pool.flush(lambda: self._state.collect(self.pool.cursor))

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, source: Source, on_batch: Callable[[int], None] | None = None) -> Evaluation | None:
        """AUC and log-loss over all of `source`, on rank 0; None elsewhere. All ranks call it. Leaves no trace.

        on_batch: told the samples of every batch that is done. Raises EvaluationStopped where a rank was asked to stop.
        """
        was_training = self.model.training
        self.model.eval()
        scores: list[Tensor] = []
        size = self.config.eval_batch_size
        num_batches = math.ceil(source.num_samples / size)
        try:
            with Loader(
                source, batch_size=size, seed=0, part=self._part, transform=lambda batch: _route(self.rows, batch)
            ) as loader:
                batches = islice(loader.once(), num_batches) if self.group.is_trainer else iter(())
                for number in range(num_batches):
                    scores += self._evaluate_batch(next(batches, None))
                    if on_batch is not None:
                        on_batch(min(size, source.num_samples - number * size))
        finally:
            self.model.train(was_training)
        mine = torch.cat(scores).numpy().tobytes() if scores else b""
        everyones = self.group.gather_bytes(mine, "the scores")
        if self.group.rank != 0:
            return None
        pairs = torch.frombuffer(bytearray(b"".join(everyones)), dtype=torch.float32).view(-1, 2)
        return evaluate_scores(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def _evaluate_batch(self, routed: _Routed | None) -> list[Tensor]:
        """Logits and labels of this trainer's part, float32 [n, 2]."""
        status = self.pool.status(stops=self.group.stopping(), dense_crc=-1)
        travelling = self._exchange.send_counts(None if routed is None else routed[1][0], status)
        self._exchange.send_ids(travelling)
        self._exchange.plan(travelling)
        pooled = None
        if travelling.plan is not None:
            pooled = torch.empty(sum(travelling.plan.output_floats))
            self.rows.evaluate(travelling.plan, pooled)
        vectors, received = self._exchange.send_vectors(travelling, pooled)
        vectors.wait()
        if any(status.stops for status in travelling.statuses):
            raise EvaluationStopped
        if routed is None:
            return []
        batch, (route, _) = routed
        joined = torch.empty(batch.size, self.rows.output_width)
        route.combine(received.numpy(), joined.numpy())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            logits = self.model.from_pooled(batch.dense, joined)
        return [torch.stack((logits.float(), batch.labels), dim=1)]

    # The end.

    def close(self) -> None:
        """Closes this rank's loader and pools, and leaves the group."""
        with ExitStack() as stack:
            stack.callback(self.group.close)
            stack.callback(self.pool.close)
            self.loader.close()

    def abandon(self) -> None:
        """The same, quietly: for when another error is on its way."""
        with suppress(HoldfastError):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.group.tell_failure(error)
            self.abandon()


class _DenseSum:
    """The dense gradients of all trainers added up, and with them their shares of the loss, in one flat buffer: the
    same layout, so the same order of summation, in every step of every life."""

    def __init__(self, parameters: Sequence[nn.Parameter], loss: float, *, changed: bool) -> None:
        self.loss = loss
        self.changed = changed  # some trainer's random numbers
        self._parameters = parameters
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def begin(self, group: Group) -> None:
        if len(group.roles.trainers) == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        tail = torch.tensor([self.loss, float(self.changed)])
        self._flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), tail])
        self._pending = group.sum_over_trainers(self._flat, "dense gradients")

    def wait(self) -> None:
        """The sums are in the parameters' gradients then, as they would be after one process's backward."""
        if self._flat is None or self._pending is None:
            return
        self._pending.wait()
        end = 0
        for parameter in self._parameters:
            begin, end = end, end + parameter.numel()
            parameter.grad = self._flat[begin:end].view_as(parameter)
        self.loss, changed = self._flat[end:].tolist()
        self.changed = changed > 0


def _route(rows: ShardedRows, batch: Batch) -> tuple[_core.Route, Span]:
    """A trainer's half of the plan verb, as a thread of the loader runs it."""
    began = time.perf_counter()
    route = rows.route(batch.features)
    return route, Span(threading.current_thread().name, began, time.perf_counter())
