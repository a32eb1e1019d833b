"""Whole steps: through a pool as a run takes them, and with all rows in device memory, which is what they are held
against.

- Every step is committed to a pool on memory, dense state and all. Batches are read from a file on memory and planned
  by the loader's threads.
- A step of a run is the time from one that the pool has got to the next; of resident tables, from one mark in the
  device's queue to the next. Medians, after the scratchpad was filled and training has settled.
- With resident tables nothing is planned, sent or committed: the arrays of the batches are on the device before.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.batches import SCRATCHPADS
from gpu.host_work import host_times
from gpu.process import LeftOut
from gpu.resident import BatchArrays, ResidentTables
from gpu.shapes import EPSILON, LEARNING_RATE, WINDOW, Case
from holdfast import DeviceConfig, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdagrad
from holdfast.device.options import RowsWay
from holdfast.device.queues import current_queue
from holdfast.models.dlrm import DLRM
from holdfast.train.dense_part import DenseOptions, DensePart
from holdfast.train.options import TrainConfig
from holdfast.train.step_report import StepReport
from holdfast.train.trainer import Trainer
from larger.workload import CHUNK_ROWS, FileOfBatches
from peers.shapes import Shape

MARGIN = 2 * WINDOW  # steps after the timed ones: those have all that they wait for in steps like themselves
_RESIDENT_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How rows are reached, and how the dense part is computed. ratio: of the tables to the scratchpad."""

    rows: RowsWay
    ratio: int = SCRATCHPADS[0]
    relaxed: bool = False
    dense: DenseOptions = field(default_factory=DenseOptions)

    @property
    def config(self) -> dict[str, Any]:
        """Of the device, but for its kind and the scratchpad's size."""
        return {
            "rows": self.rows,
            "relaxed_lookup": self.relaxed,
            "compile": self.dense.compile,
            "graphs": self.dense.graphs,
        }


def check_options(options: DenseOptions, device: torch.device) -> None:
    """Raises LeftOut for what is a matter of GPUs alone."""
    if device.type != "cuda" and (options.graphs or options.compile):
        raise LeftOut("graphs and compiled code are measured on a GPU alone")


def make_pool(case: Case, directory: Path) -> None:
    """A pool with the shape's tables, every row of them written."""
    rows = min(CHUNK_ROWS, case.shape.num_embeddings)
    bound = case.shape.num_embeddings**-0.5
    weights = np.random.default_rng(1).uniform(-bound, bound, (rows, case.shape.embedding_dim)).astype(np.float32)
    state = np.full(rows, 0.01, dtype=np.float32)
    with _open_pool(directory) as pool:
        _make_rows(pool, case.shape, DeviceConfig())
        for table in range(case.shape.num_tables):
            for first in range(0, case.shape.num_embeddings, rows):
                count = min(rows, case.shape.num_embeddings - first)
                pool.core.import_rows(table, first, weights[:count].view(np.uint8).reshape(-1), state[:count])


def measure_resident(
    case: Case, source: FileOfBatches, first: int, options: DenseOptions, device: torch.device
) -> dict[str, Any]:
    """first: of the source's batches; they take turns."""
    check_options(options, device)
    shape = case.shape
    torch.manual_seed(1)
    tables = ResidentTables(shape, device)
    model, optimizer = _make_model(shape, nn.Identity())
    part = DensePart(model, optimizer, device, options, batch_size=shape.batch_size)
    batches = []
    for number in range(first, min(source.num_batches, first + _RESIDENT_BATCHES)):
        block = source.read_block(number)
        dense, labels = (torch.from_numpy(array).to(device) for array in (block.dense, block.labels))
        batches.append((BatchArrays.of(source.read_ids(number), shape, device), dense, labels))
    queue = current_queue(device)
    marks = []
    for step in range(case.settling + case.steps + 1):
        arrays, dense, labels = batches[step % len(batches)]
        bottom = part.forward_bottom(dense)
        pooled = tables.lookup(arrays).requires_grad_()
        part.train(bottom, labels, pooled)
        assert pooled.grad is not None
        tables.update(arrays, pooled.grad)
        marks.append(queue.mark(timed=True))
    marks[-1].wait()
    return _step_ms(mark.seconds_since(marks[0]) for mark in marks[case.settling :])


def measure_steps(
    case: Case, source: FileOfBatches, num_filling: int, way: Way, directory: Path, device: torch.device, ends: float
) -> dict[str, Any]:
    """Trains the pool in `directory` on. ends: when time is up, by time.monotonic. Raises LeftOut where it is."""
    check_options(way.dense, device)
    shape = case.shape
    config = DeviceConfig(
        kind=device.type,
        scratchpad_bytes=None if way.rows == "near_memory" else case.table_bytes // way.ratio,
        **way.config,
    )
    workers = max(1, (os.cpu_count() or 2) // 2)
    num_steps = num_filling + case.settling + case.steps + MARGIN
    with ExitStack() as stack:
        pool = stack.enter_context(_open_pool(directory))
        rows = _make_rows(pool, shape, config)
        torch.manual_seed(1)
        model, optimizer = _make_model(shape, rows)
        trainer = Trainer(
            TrainConfig(
                batch_size=shape.batch_size,
                steps=pool.step + num_steps,
                shuffle=False,
                workers=workers,
                prefetch=workers,
                window=WINDOW,
                bf16=way.dense.bf16,
                capture_ahead=way.rows == "near_memory",
            ),
            pool=pool,
            rows=rows,
            model=model,
            dense_optimizer=optimizer,
            source=source,
            device=config,
            stopping=lambda: time.monotonic() > ends,
        )
        stack.enter_context(trainer)
        first = trainer.recover() + 1
        # A run takes the whole file; one that failed has left the next in the middle of it.
        epoch = trainer.loader.samples_per_epoch
        trainer.loader.seek(-(-trainer.loader.samples // epoch) * epoch)
        run = _run(trainer)
        if trainer.stopped:
            raise LeftOut(f"time was up after {len(run.reports)} of {num_steps} steps")
        last = first + num_steps - MARGIN - 1
        return {
            **run.figures(last - case.steps, last, WINDOW if rows.looks_forward else 1),
            "workers": workers,
            "dense_bytes_in": 4 * shape.batch_size * (shape.num_dense + 1),
            "dense_bytes_out": _state_bytes(model, optimizer),
            "total_rows": shape.num_tables * shape.num_embeddings,
            "filling_steps": num_filling,
            "durable_step": pool.durable_step,
        }


@dataclass(frozen=True, slots=True)
class _Run:
    reports: dict[int, StepReport]
    ended: dict[int, float]
    retired_in: dict[int, int]

    def figures(self, before: int, last: int, window: int) -> dict[str, Any]:
        """Of the steps after `before`, up to `last`."""
        timed = [self.reports[step] for step in range(before + 1, last + 1)]
        times = host_times(self.reports, self.retired_in, window)
        host = [times[report.step] for report in timed if report.step in times]
        names = dict.fromkeys(name for report in timed for name in report.stage_ms)
        spans = dict.fromkeys(name for report in timed for name in report.device)
        found: dict[str, Any] = {
            **_step_ms(self.ended[step] for step in range(before, last + 1)),
            "stage_ms": {name: _median(report.stage_ms.get(name, 0.0) for report in timed) for name in names},
            "device_ms": {
                name: _median(
                    1e3 * (span.ended - span.began) for report in timed if (span := report.device.get(name)) is not None
                )
                for name in spans
            },
            "planning_ms": _median(1e3 * (report.planning.ended - report.planning.began) for report in timed),
            "logged_bytes": statistics.fmean(report.logged_bytes for report in timed),
            "first_loss": min(self.reports.items())[1].loss,
            "last_loss": timed[-1].loss,
        }
        if host:
            found["host_work_ms"] = _median(time.work for time in host)
            found["wait_for_loader_ms"] = _median(time.for_loader for time in host)
            found["wait_for_device_ms"] = _median(time.for_device for time in host)
        traffic = [report.traffic for report in timed if report.traffic is not None]
        if traffic and "device_slots" in traffic[0]:
            found |= {
                name: statistics.fmean(of_step[name] for of_step in traffic)
                for name in ("device_slots", "device_bytes_in", "device_bytes_out", "device_window_shrunk")
            }
            half = len(traffic) // 2
            found["hit_rate"] = _hit_rate(traffic)
            found["hit_rate_of_halves"] = [_hit_rate(traffic[:half]), _hit_rate(traffic[half:])]
        return found


def _run(trainer: Trainer) -> _Run:
    run = _Run({}, {}, {})
    for report in trainer.steps():
        run.ended[report.step] = time.perf_counter()
        run.reports[report.step] = report
        run.retired_in[report.step] = trainer.pool.step
    return run


def _hit_rate(traffic: list[dict[str, float]]) -> float:
    hit, missed = (sum(of_step[f"device_rows_{name}"] for of_step in traffic) for name in ("hit", "missed"))
    return hit / max(1, hit + missed)


def _step_ms(at: Iterable[float]) -> dict[str, Any]:
    """at: when steps ended, in seconds; the first counts as a beginning."""
    step_ms = [1e3 * (after - before) for before, after in pairwise(at)]
    return {
        "median_ms": statistics.median(step_ms),
        "mean_ms": statistics.fmean(step_ms),
        "worst_ms": max(step_ms),
        "steps": len(step_ms),
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _open_pool(directory: Path) -> Pool:
    return Pool(directory, seed=1, medium="memory", dense_interval=1)


def _make_rows(pool: Pool, shape: Shape, config: DeviceConfig) -> EmbeddingBagCollection:
    """Raises RuntimeError where the device does not register the pool's memory: that would be another way."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=shape.num_embeddings,
            embedding_dim=shape.embedding_dim,
            feature_names=[f"f{number}"],
        )
        for number in range(shape.num_tables)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="device.rows = 'direct'")
        return EmbeddingBagCollection(
            pool, tables, optimizer=RowWiseAdagrad(lr=LEARNING_RATE, eps=EPSILON), device=config
        )


def _make_model(shape: Shape, embeddings: nn.Module) -> tuple[DLRM, torch.optim.Optimizer]:
    model = DLRM(
        embeddings=embeddings,
        num_dense=shape.num_dense,
        embedding_dim=shape.embedding_dim,
        num_features=shape.num_tables,
        bottom=shape.bottom,
        top=shape.top,
    )
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    kept: list[object] = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in (*model.state_dict().values(), *kept) if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)
