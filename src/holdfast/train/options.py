"""How the loop runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.data.lanes import MAX_BATCH_SIZE
from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the loop runs.

    batch_size: samples of a step. steps: where training ends (None: after `epochs`). epochs: passes over the data.
    seed: of the shuffle and of the generators. shuffle: every epoch anew. workers: threads of the loader. prefetch:
    batches planned ahead. lanes: of the stream (holdfast.data.Loader), of which another number is another order; where
    the number of trainers divides it, each decodes its share of the data (1: each decodes all). window: batches whose
    rows are fetched ahead, the current one included, where rows come through a scratchpad (0: none, rows are fetched
    when they are asked for). eval_every: steps from one evaluation to the next (0: only at the end). eval_batch_size:
    samples of a batch of an evaluation. bf16: autocast of the MLPs.
    max_grad_norm: of dense and row gradients together; None: no clipping. capture_ahead: log the next batch's rows
    while this one computes; for accelerators. new_data: where the pool was trained on other data, with the same
    columns, these follow them, from their first sample on, and `epochs` counts theirs; without it that is refused.
    """

    batch_size: int = 2048
    steps: int | None = None
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    workers: int = 1
    prefetch: int = 2
    lanes: int = 1
    window: int = 4
    eval_every: int = 0
    eval_batch_size: int = 8192
    bf16: bool = False
    max_grad_norm: float | None = None
    capture_ahead: bool = False
    new_data: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "workers", "prefetch", "lanes", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}; it must be at least 1")
        for name in ("batch_size", "eval_batch_size"):
            if getattr(self, name) > MAX_BATCH_SIZE:
                raise ConfigError(f"train.{name} = {getattr(self, name)}; it must be at most {MAX_BATCH_SIZE:,}")
        for name in ("steps", "eval_every", "window"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"train.{name} = {value}; it must not be negative")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed = {self.seed}; it must lie in [0, 2**63)")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ConfigError(f"train.max_grad_norm = {self.max_grad_norm}; it must be positive")


def last_step_of(config: TrainConfig, samples_left: int, *, after: int = 0) -> int:
    """Where training ends, which goes on after step `after`. samples_left: of all epochs."""
    if config.steps is not None:
        return config.steps
    return after + math.ceil(max(0, samples_left) / config.batch_size)
