"""Training steps and embedding steps of one system, as peers.measure has them for a peer."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from peers.measure import make_model
from peers.systems import LEARNING_RATE

if TYPE_CHECKING:
    from torch import Tensor

    from ours.systems import System
    from peers.batches import Batch
    from peers.shapes import Shape


def dense_parameters(model: Any) -> list[Tensor]:
    return [*model.get_submodule("bottom").parameters(), *model.get_submodule("top").parameters()]


class Training:
    """A system in training: model, dense optimizer, and the batches, which it goes round."""

    def __init__(self, system: System, shape: Shape, batches: list[Batch], *, bf16: bool) -> None:
        self.system = system
        self.batches = batches
        self.bf16 = bf16
        self.model: Any = make_model(shape, system.embeddings)
        self.dense_optimizer = torch.optim.SGD(dense_parameters(self.model), lr=LEARNING_RATE, fused=True)
        self.loss = math.nan
        self.num_steps = 0
        system.attach_model(self.model, self.dense_optimizer)

    def _train(self, batch: Batch, pooled: Tensor) -> None:
        autocast = torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()
        with autocast:
            logits = self.model.from_pooled(batch.dense, pooled)
        loss = binary_cross_entropy_with_logits(logits.float(), batch.labels)
        self.loss = float(loss.detach())
        if not math.isfinite(self.loss):  # what holdfast.train.trainer does before anything is updated
            raise FloatingPointError(f"the loss is {self.loss}")
        torch.autograd.backward(loss)
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)

    def step(self) -> dict[str, float]:
        """One whole step; gives the milliseconds of each verb."""
        number = self.num_steps % len(self.batches)
        self.num_steps += 1
        return self.system.step(number, self.batches[number], self._train)


def time_steps(training: Training, *, steps: int, warmup: int) -> dict[str, Any]:
    """``step_ms`` per step, ``verb_ms`` per verb and step, the first (before any update) and last loss."""
    first_loss = math.nan
    for number in range(max(1, warmup)):
        training.step()
        if number == 0:
            first_loss = training.loss
    step_ms: list[float] = []
    verb_ms: dict[str, list[float]] = {}
    for _ in range(steps):
        begin = time.perf_counter()
        verbs = training.step()
        step_ms.append((time.perf_counter() - begin) * 1e3)
        for verb, elapsed_ms in verbs.items():
            verb_ms.setdefault(verb, []).append(elapsed_ms)
    return {"step_ms": step_ms, "verb_ms": verb_ms, "first_loss": first_loss, "last_loss": training.loss}


def time_embeddings(training: Training, shape: Shape, *, steps: int, warmup: int) -> dict[str, Any]:
    """The tables alone, with a fixed gradient: everything from ids to rows at home, the log's seal included."""
    width = shape.num_tables * shape.embedding_dim
    grad = torch.randn((shape.batch_size, width), generator=torch.Generator().manual_seed(1)) * 1e-3
    embedding_ms: list[float] = []
    verb_ms: dict[str, list[float]] = {}
    for number in range(warmup + steps):
        index = number % len(training.batches)
        verbs = training.system.embedding_step(index, training.batches[index], grad)
        if number < warmup:
            continue
        embedding_ms.append(sum(verbs.values()))
        for verb, elapsed_ms in verbs.items():
            verb_ms.setdefault(verb, []).append(elapsed_ms)
    return {"embedding_ms": embedding_ms, "embedding_verb_ms": verb_ms}
