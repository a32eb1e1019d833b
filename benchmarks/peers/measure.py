"""One system, one shape, one optimizer: time per step, and of the embedding part alone."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from peers.checkpoints import CHECKPOINTERS, Checkpointer
from peers.systems import LEARNING_RATE, PeerTables

if TYPE_CHECKING:
    from peers.batches import Batch
    from peers.shapes import Shape

_DLRM_FILE = Path(__file__).parents[2] / "src/holdfast/models/dlrm.py"


def make_model(shape: Shape, tables: nn.Module, seed: int = 1) -> nn.Module:
    """The DLRM of holdfast.models, the same for every system; MLP weights are a function of ``seed``."""
    spec = importlib.util.spec_from_file_location("holdfast_models_dlrm", _DLRM_FILE)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the model from {_DLRM_FILE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    model: nn.Module = module.DLRM(
        embeddings=tables,
        num_dense=shape.num_dense,
        embedding_dim=shape.embedding_dim,
        num_features=shape.num_tables,
        bottom=shape.bottom,
        top=shape.top,
    )
    return model


class Training:
    """A peer in training: network, dense optimizer, and the batches, which it goes round. ``model``, if given, is what
    is called: a wrapper around ``network``."""

    def __init__(
        self,
        network: nn.Module,
        tables: PeerTables,
        batches: list[Batch],
        *,
        bf16: bool,
        model: nn.Module | None = None,
    ) -> None:
        self.model = network if model is None else model
        self.tables = tables
        self.batches = batches
        self.prepared = [tables.prepare(batch) for batch in batches]
        self.bf16 = bf16
        dense = [*network.get_submodule("bottom").parameters(), *network.get_submodule("top").parameters()]
        self.dense_optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE, fused=True)
        self.num_steps = 0

    def step(self) -> Tensor:
        """One whole step; gives the loss."""
        number = self.num_steps % len(self.batches)
        batch = self.batches[number]
        autocast = torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()
        with autocast:
            logits = self.model(batch.dense, self.prepared[number])
        loss = binary_cross_entropy_with_logits(logits.float(), batch.labels)
        torch.autograd.backward(loss)
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)
        self.tables.apply_gradients()
        self.num_steps += 1
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Everything that a run needs to go on."""
        return {
            "model": self.model.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
            **self.tables.optimizer_state(),
        }


def time_steps(training: Training, *, steps: int, warmup: int) -> dict[str, Any]:
    """``step_ms`` per step, and the first (before any update) and last loss."""
    losses = [training.step().item() for _ in range(max(1, warmup))]
    step_ms: list[float] = []
    last: Tensor | None = None
    for _ in range(steps):
        begin = time.perf_counter()
        last = training.step()
        step_ms.append((time.perf_counter() - begin) * 1e3)
    return {"step_ms": step_ms, "first_loss": losses[0], "last_loss": losses[-1] if last is None else last.item()}


def time_embeddings(training: Training, *, steps: int, warmup: int) -> dict[str, Any]:
    """The tables alone, with a fixed gradient: forward, then backward and update."""
    tables = training.tables
    forward_ms, update_ms = [], []
    grad: Tensor | None = None
    for number in range(warmup + steps):
        sparse = training.prepared[number % len(training.prepared)]
        begin = time.perf_counter()
        pooled = tables(sparse)
        after_forward = time.perf_counter()
        if grad is None:
            grad = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
        after_grad = time.perf_counter()
        torch.autograd.backward(pooled, grad)
        tables.apply_gradients()
        end = time.perf_counter()
        if number >= warmup:
            forward_ms.append((after_forward - begin) * 1e3)
            update_ms.append((end - after_grad) * 1e3)
    return {"embedding_forward_ms": forward_ms, "embedding_update_ms": update_ms}


def time_checkpoints(training: Training, *, kind: str, every: int, steps: int, directory: Path) -> dict[str, Any]:
    """Training with a checkpoint every ``every`` steps, against the same number of steps without.

    ``steps`` is rounded up to a multiple of ``every``. A save starts before steps 1, every + 1, ...: each has ``every``
    steps to hide behind, and the time includes the wait for the last, as it would go on for ever in training.
    """
    num_saves = max(1, -(-steps // every))
    steps = num_saves * every
    checkpointer: Checkpointer = CHECKPOINTERS[kind](directory, training.state)
    checkpointer.save()  # once outside the measurement: buffers, directories
    checkpointer.wait()
    training.step()

    begin = time.perf_counter()
    for _ in range(steps):
        training.step()
    without_s = time.perf_counter() - begin

    stop_ms, step_ms = [], []
    begin = time.perf_counter()
    for number in range(steps):
        if number % every == 0:
            stop_begin = time.perf_counter()
            checkpointer.save()
            stop_ms.append((time.perf_counter() - stop_begin) * 1e3)
        step_begin = time.perf_counter()
        training.step()
        step_ms.append((time.perf_counter() - step_begin) * 1e3)
    wait_begin = time.perf_counter()
    checkpointer.wait()
    end = time.perf_counter()
    return {
        "kind": kind,
        "every": every,
        "steps": steps,
        "size_bytes": checkpointer.size_bytes,
        "stop_ms": stop_ms,
        "step_ms": step_ms,
        "last_wait_ms": (end - wait_begin) * 1e3,
        "ms_per_step_without": without_s / steps * 1e3,
        "ms_per_step_with": (end - begin) / steps * 1e3,
        "overhead_ms_per_step": (end - begin - without_s) / steps * 1e3,
    }
