"""The loop: a batch's way through the house, all eight verbs of it.

recover, then for every batch: plan (ahead, in the loader's thread) → capture → lookup → train → update → commit.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn

from holdfast.data.batch import Batch
from holdfast.data.loader import Loader
from holdfast.data.source import Source, check_columns
from holdfast.device.arrivals import ArrivingLoss
from holdfast.device.faults import device_errors
from holdfast.device.options import DeviceConfig
from holdfast.device.queues import Clock, Sending, Work, current_queue, new_queue
from holdfast.errors import ConfigError, HoldfastError, NonFiniteLoss
from holdfast.group.serving import Verb
from holdfast.pools.pool import Pool
from holdfast.rows.collection import clip_grad_norm_
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.rows.row_access import Captured, PlannedFeatures
from holdfast.train.batches import make_loader
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.declared_dense import dense_part
from holdfast.train.dense_part import in_parts
from holdfast.train.evaluation import EvaluationStopped, collect_scores
from holdfast.train.metrics import Evaluation, evaluate_packed
from holdfast.train.options import TrainConfig, last_step_of
from holdfast.train.step_report import Span, StepReport, Stopwatch, background_of, keys_since, traffic_since

_Planned: TypeAlias = tuple[Batch, tuple[PlannedFeatures, Span]]


def _plan(rows: EmbeddingBagCollection, batch: Batch) -> tuple[PlannedFeatures, Span]:
    """The plan verb, as a thread of the loader runs it."""
    began = time.perf_counter()
    planned = rows.plan(batch.features)
    return planned, Span(threading.current_thread().name, began, time.perf_counter())


@dataclass(frozen=True, slots=True)
class _Upcoming:
    """A batch that was taken from the loader; dense and labels are on their way to the device."""

    batch: Batch
    planned: PlannedFeatures
    planning: Span
    dense: Sending
    labels: Sending


@dataclass(frozen=True, slots=True)
class _Issued:
    """A step that the pool may not have yet."""

    step: int
    samples: int
    loss: ArrivingLoss
    watch: Stopwatch
    planning: Span
    work: list[Work]
    captured: Captured
    traffic: dict[str, float] | None
    keys: dict[str, int] | None


class Trainer:
    """A model, its pool and its data, ready to step. Context manager: closes loader and pool.

    model: over `rows`; ``model(dense, features)`` gives logits ``[B]``. scheduler: of the dense optimizer's learning
    rates; steps once a batch. device: as the collection `rows` was made with. stopping: asked between two steps; where
    it says so, training ends there, and `stopped` is set.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        pool: Pool,
        rows: EmbeddingBagCollection,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        source: Source,
        device: DeviceConfig | None = None,
        extra: dict[str, object] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.pool = pool
        self.rows = rows
        self.model = model
        self.dense_optimizer = dense_optimizer
        device = device or DeviceConfig()
        self._relaxed_lookup = device.relaxed_lookup
        parts = in_parts(model, num_dense=source.num_dense, pooled_width=rows.output_width)
        self._dense = dense_part(
            *(parts, dense_optimizer, rows.device, device, config),
            scheduler=scheduler,
            part=pool.part,
            gradients_travel=rows.answers_late,
        )
        self._clock = Clock(rows.device)
        self._to_device = new_queue(rows.device)
        self._losses = new_queue(rows.device)
        self._part_count = pool.part[1]
        if config.batch_size < self._part_count:
            raise ConfigError(f"train.batch_size = {config.batch_size} is less than the {self._part_count} trainers")
        plan = partial(_plan, rows)
        self.loader: Loader[_Planned] = make_loader(source, config, plan, pool.part, in_order=rows.has_keys)
        self.checkpoint = Checkpoint(
            pool,
            model=model,
            optimizer=dense_optimizer,
            scheduler=() if scheduler is None else scheduler,
            loader=self.loader,
            extra=extra,
        )
        self.stopped = False
        self.last_step = 0  # where training ends: known when it is recovered
        self._exchange = True  # a rank has something of its own to tell
        self._stopping = stopping
        self._upcoming: deque[_Upcoming] = deque()
        self._issued: deque[_Issued] = deque()
        self._before: PlannedFeatures | None = None  # of the step before the first of this life
        self._told: dict[str, float] | None = None  # of the pool's traffic
        self._told_of_keys: dict[str, int] | None = None

    @property
    def description(self) -> str:
        """Where rows are looked up and updated, or what stands in for the dense part; in words."""
        return self._dense.description or self.rows.description

    @property
    def speaks(self) -> bool:
        """Of the run, on the terminal and in files."""
        return self.pool.group.rank == 0

    @property
    def can_flush_alone(self) -> bool:
        """Whether no other rank would have to take part."""
        return self.pool.group.world_size == 1

    def recover(self) -> int:
        """The recover verb's second half: the pool has rolled its rows back when it was opened; now the dense state."""
        step = self.checkpoint.resume()
        end = self.loader.origin + self.config.epochs * self.loader.samples_per_epoch
        self.last_step = last_step_of(self.config, end - self.loader.samples, after=step)
        if self._relaxed_lookup and self.loader.samples > self.loader.origin:
            # How a relaxed lookup splits its sums is decided by the batch before, too.
            cursor = self.loader.samples
            self.loader.seek(cursor - self.config.batch_size)
            _, (self._before, _) = next(self.loader)
            self.loader.seek(cursor)
        return step

    def steps(self) -> Iterator[StepReport]:
        """Trains to the last step, or until `stopping` says so; yields when the pool has a step, in order.

        On a device it may have begun later steps by then; but where an evaluation is due after a step it has not.
        Raises NonFiniteLoss, and the pool stays where it was."""
        self._told = self._traffic()
        self._told_of_keys = self.pool.key_counts()
        if not self.pool.group.is_trainer:
            yield from self._serve()
            return
        while self.pool.step < self.last_step:
            if self._stopping():
                self.stopped = True
                break
            self._issued.append(self._step())
            yield from self._retired()
            if self.config.eval_every and self.pool.step % self.config.eval_every == 0:
                yield from self._retire_all()
        yield from self._retire_all()

    def flush(self) -> None:
        """Makes the newest step durable, its dense state included, whatever the dense interval; waits for it."""
        if self.pool.group.is_trainer:
            self.checkpoint.flush()
        else:
            self.pool.serve_until(Verb.FLUSH)

    def _serve(self) -> Iterator[StepReport]:
        """The steps of a rank that owns rows and trains nothing."""
        while self.pool.step < self.last_step and not self.stopped:
            watch = Stopwatch()
            self.pool.serve_until(Verb.COMMIT)
            watch.lap("serve")
            self.stopped = self._stopping()
            yield StepReport(
                step=self.pool.step,
                durable_step=self.pool.durable_step,
                loss=math.nan,
                samples=self.config.batch_size,
                began=watch.began,
                stage_ms=watch.stage_ms,
                planning=Span("", watch.began, watch.began),
                logged_bytes=0,
                log_bytes_free=self.pool.log_bytes_free,
                traffic=self._traffic_since_told(),
                keys=self._keys_since_told(),
                background=background_of(self.pool),
            )

    def _step(self) -> _Issued:
        watch = Stopwatch()
        with device_errors(f"step {self.pool.step + 1}", step=lambda: self.pool.retired_step):
            current = self._take()  # plan
            watch.lap("plan")
            if self._before is not None:
                self.rows.lookup_ahead(current.planned, self._before)
                self._before = None
            dense, labels = current.dense.take(), current.labels.take()
            bottom = None
            if self._dense.is_beside:
                bottom = self._dense.forward_bottom(dense)  # computes while rows are looked up
                watch.lap("train")
            capture = self.rows.capture(current.planned)
            watch.lap("capture")
            if bottom is None and self.rows.answers_late:
                bottom = self._dense.forward_bottom(dense)
                watch.lap("train")
            pooled = self.rows.lookup(capture, current.planned)
            watch.lap("lookup")
            if self.config.capture_ahead and self._upcoming:
                self.rows.capture_ahead(self._upcoming[0].planned)
                watch.lap("capture_ahead")
            queue = current_queue(self.rows.device)
            began = queue.mark(timed=True)
            loss = self._dense.train(
                dense if bottom is None else bottom,
                labels,
                pooled,
                before_step=self._before_step,
                weight=current.batch.size * self._part_count / self.config.batch_size,
            )
            trained = Work("train", "device", began, queue.mark(timed=True))
            arriving = ArrivingLoss(loss, self._losses)
            watch.lap("train")
            if self._relaxed_lookup and self._upcoming:
                self.rows.lookup_ahead(self._upcoming[0].planned, current.planned)
                watch.lap("lookup_ahead")
            self._dense.wait_for_gradients()
            if not self.pool.commits_behind:
                NonFiniteLoss.check(arriving.value(), self.pool.step + 1)
                watch.lap("train")
            self.rows.optimizer.step()  # update
            watch.lap("update")
            self._dense.wait()
            watch.lap("train")
            step = self.checkpoint.commit_with(
                current.batch.first_sample + self.config.batch_size, arriving, exchange=self._exchange
            )
            watch.lap("commit")
        return _Issued(
            step=step,
            samples=self.config.batch_size,
            loss=arriving,
            watch=watch,
            planning=current.planning,
            work=[trained, *self.rows.work_of(capture)] if self.pool.commits_behind else [],
            captured=capture,
            traffic=self._traffic_since_told(),
            keys=self._keys_since_told(),
        )

    def _retire_all(self) -> Iterator[StepReport]:
        while self.pool.retire():
            yield from self._retired()
        yield from self._retired()

    def _retired(self) -> Iterator[StepReport]:
        """Of the issued steps, those that the pool has."""
        while self._issued and self._issued[0].step <= self.pool.retired_step:
            issued = self._issued.popleft()
            yield StepReport(
                step=issued.step,
                durable_step=self.pool.durable_step,
                loss=issued.loss.value(),
                samples=issued.samples,
                began=issued.watch.began,
                stage_ms=issued.watch.stage_ms,
                laps=issued.watch.laps,
                planning=issued.planning,
                logged_bytes=issued.captured.bytes,
                log_bytes_free=self.pool.log_bytes_free,
                traffic=issued.traffic,
                keys=issued.keys,
                device={work.name: Span(work.queue, *self._clock.span(work)) for work in issued.work},
                background=background_of(self.pool),
            )

    def _traffic_since_told(self) -> dict[str, float] | None:
        """What a report says of it: with what ran between two steps, so that reports add up to all there was."""
        before, self._told = self._told, self._traffic()
        return traffic_since(before, self._told)

    def _keys_since_told(self) -> dict[str, int] | None:
        """The same of keys."""
        before, self._told_of_keys = self._told_of_keys, self.pool.key_counts()
        return keys_since(before, self._told_of_keys)

    def _traffic(self) -> dict[str, float] | None:
        """Of the pool's scratchpad and of the device's."""
        of_pool, of_device = self.pool.traffic(), self.rows.traffic()
        if of_pool is None and not of_device:
            return None
        return {**(of_pool or {}), **of_device}

    def _take(self) -> _Upcoming:
        """The next batch. The ones after it, as far as the window goes, are taken from the loader and announced."""
        looks_forward = self.rows.looks_forward and self.config.window > 0
        wanted = self.config.window if looks_forward else 1
        if self.rows.answers_late and not self.pool.looks_forward:
            wanted = min(wanted, 2)  # ids are to travel; no row has to come from a disk
        if self.config.capture_ahead or self._relaxed_lookup:
            wanted = max(wanted, 2)
        while len(self._upcoming) < min(wanted, self.last_step - self.pool.step):
            batch, (planned, planning) = next(self.loader)
            dense, labels = (Sending(t, self.rows.device, self._to_device) for t in (batch.dense, batch.labels))
            self._upcoming.append(_Upcoming(batch, planned, planning, dense, labels))
            if looks_forward:
                self.rows.announce(planned)
        return self._upcoming.popleft()

    def _before_step(self, loss: Tensor) -> None:
        """All gradients are there, and nothing is updated."""
        if loss.device.type == "cpu" or self._part_count > 1:
            NonFiniteLoss.check(float(loss), self.pool.step + 1)  # before others see it: this rank is named
        if self._part_count > 1:
            differs = torch.tensor(float(self.checkpoint.differs_from_told()), device=loss.device)
            beside = torch.stack((loss, differs))
            self.pool.average_gradients(self.model, beside)
            loss.copy_(beside[0])
            self._exchange = bool(beside[1] > 0)
        if self.config.max_grad_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.rows, self.config.max_grad_norm)

    def evaluate(self, source: Source, on_batch: Callable[[int], None] | None = None) -> Evaluation | None:
        """AUC and log-loss over all of `source`, on rank 0; None elsewhere. Leaves no trace: no log, no row, no random
        number. All ranks call it.

        Raises EvaluationStopped where `stopping` says so, ConfigError where the source has other columns than the
        training data."""
        check_columns(source, self.loader.source)
        if not self.pool.group.is_trainer:
            self.pool.serve_until(Verb.REST)
            if self._stopping():
                raise EvaluationStopped
            return None

        def count(samples: int) -> None:
            if self._stopping():
                raise EvaluationStopped
            if on_batch is not None:
                on_batch(samples)

        with ExitStack() as stack:
            stack.enter_context(device_errors("evaluating", step=lambda: self.pool.retired_step))
            stack.callback(self.pool.rest)
            scores = collect_scores(self.model, source, self.config, count, self.pool.part)
        if self._part_count == 1:
            return scores.evaluate()
        everyones = self.pool.group.gather_bytes(scores.packed(), "the scores", among_trainers=True)
        return evaluate_packed(everyones) if self.pool.group.rank == 0 else None

    def close(self) -> None:
        """Stops the loader; makes everything durable and closes the pool."""
        with ExitStack() as stack:
            stack.callback(self.pool.close)
            self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(HoldfastError):
            self.loader.close()
        self.pool.__exit__(kind, error, trace)
