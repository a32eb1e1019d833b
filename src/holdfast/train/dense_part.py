"""DensePart: forward, backward and update of a model's dense part, on a device.

Invariants
- How a batch is computed depends on its size and on the options, never on what this process did before: whole batches
  are compiled and replayed where that is asked for, smaller ones (the last of an epoch) run as written. So a resumed
  run computes every batch the way the uninterrupted one did.
- Nothing here waits for the device, but the first whole batch where graphs are recorded.
- On the CPU without options the bits are those of the model's own forward and of autograd's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.device.compiling import compiled
from holdfast.device.graphs import (
    CudaRecorder,
    RecordedGradients,
    RecordedUpdate,
    Recorder,
    StaticInputs,
    set_capturable,
)
from holdfast.errors import ConfigError
from holdfast.models.dlrm import DLRM
from holdfast.rows.row_access import LookedUp


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptions:
    """bf16: autocast of the MLPs. compile: by torch.compile, in its default mode. graphs: by CUDA graphs."""

    bf16: bool = False
    compile: bool = False
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class Bottom:
    """A batch whose bottom MLP is on its way. output: None where it is in a replay's memory."""

    batch_size: int
    output: Tensor | None


class OnePart(nn.Module):
    """A model that is computed in one piece, ``model(dense, features)``, in the shape of a DLRM: the bottom part passes
    the dense features on."""

    def __init__(self, model: nn.Module, *, num_dense: int, pooled_width: int) -> None:
        super().__init__()
        self.model = model
        self.bottom = nn.Identity()
        self.num_dense = num_dense
        self.pooled_width = pooled_width

    def from_bottom(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Logits ``[B]`` from the dense features and the pooled embeddings."""
        return self.model(x, LookedUp(pooled))  # type: ignore[no-any-return]


def in_parts(model: nn.Module, *, num_dense: int, pooled_width: int) -> DLRM | OnePart:
    """A DLRM as it is, any other model in one part. A class that is derived from DLRM may compute something else."""
    return model if type(model) is DLRM else OnePart(model, num_dense=num_dense, pooled_width=pooled_width)


class DensePart:
    """A model's dense part on `device`, and its optimizer; both are moved there.

    batch_size, weight: of whole batches, or of the parts that this trainer has of them; see `train`. recorder: makes
    the replays of `graphs`; by default CUDA's. scheduler: of learning rates; steps after the optimizer.

    Raises ConfigError for graphs on a device that has none, and for compile where autotuning is on.
    """

    def __init__(
        self,
        model: DLRM | OnePart,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        options: DenseOptions,
        *,
        batch_size: int,
        weight: float = 1.0,
        recorder: Recorder | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        if options.graphs and recorder is None and device.type != "cuda":
            raise ConfigError(
                f"device.graphs: CUDA graphs need a CUDA device, and this run's is {device}; set device.graphs = false"
            )
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self.device = device
        self._options = options
        self._batch_size = batch_size
        self._weight = weight
        self._loss = nn.BCEWithLogitsLoss()
        self._move()
        # What whole batches run; a smaller one always runs model.bottom and self._rest.
        self._whole_bottom: Callable[[Tensor], Tensor] = self.model.bottom
        self._whole_rest: Callable[[Tensor, Tensor, Tensor], Tensor] = self._rest
        if options.compile:
            self._whole_bottom, self._whole_rest = compiled(model.bottom), compiled(self._rest)
        self.inputs: StaticInputs | None = None
        """Where graphs read a whole batch. A caller that writes it there, and gives these very tensors to
        `forward_bottom` and `train`, saves the copies."""
        if options.graphs:
            self.inputs = self._make_inputs()
            recorder = CudaRecorder(device) if recorder is None else recorder
            self._gradients = RecordedGradients(
                self._run_bottom,
                self._run_whole_rest,
                list(model.parameters()),
                self.inputs,
                recorder,
                model.named_buffers,
            )
            self._update = RecordedUpdate(optimizer, device, recorder)

    description = ""
    """What stands in for it, in words; here nothing does."""

    @property
    def is_beside(self) -> bool:
        """Whether it computes while the processor does something else."""
        return self.device.type != "cpu"

    def wait_for_gradients(self) -> None:
        """Of the pooled vectors, where nobody else waits for them."""

    def wait(self) -> None:
        """For the end of the last step's computation, where nobody else waits for it."""

    def forward_bottom(self, dense: Tensor) -> Bottom:
        """The bottom MLP of a batch, which waits for no pooled vectors; `train` takes what it returns.

        dense: float32 ``[B, num_dense]``, B at most `batch_size`; on the device, or pinned.
        """
        size = dense.shape[0]
        if self.inputs is not None and size == self._batch_size:
            _put(dense, self.inputs.dense)
            self._gradients.run_bottom()
            return Bottom(size, None)
        return Bottom(size, self._run_bottom(dense.to(self.device, non_blocking=True)))

    def train(
        self,
        dense: Tensor | Bottom,
        labels: Tensor,
        pooled: Tensor,
        *,
        before_step: Callable[[Tensor], None] | None = None,
        weight: float = 1.0,
    ) -> Tensor:
        """One step: forward, loss (BCEWithLogits, mean), backward, the optimizer's step and the scheduler's.

        dense: float32 ``[B, num_dense]``, or what `forward_bottom` made of it. labels: float32 ``[B]``. pooled: float32
        ``[B, W]``, feature by feature. All on the device, or, dense and labels, pinned.
        The gradient of `pooled` is set as its `.grad` where it is a leaf (with graphs, in memory that the next call
        overwrites); where it is not, it goes back through autograd.
        before_step: called with the loss when all gradients are there and nothing is updated: to change gradients (in
        place), or to raise. weight: of the loss, where this is a part of a batch; of whole ones as they were declared.
        Returns the loss, a 0-d tensor on the device, without waiting for it.
        """
        bottom = dense if isinstance(dense, Bottom) else self.forward_bottom(dense)
        if bottom.output is None:
            loss, gradient = self._replay(labels, pooled)
        else:
            loss, gradient = self._compute(bottom.output, labels.to(self.device, non_blocking=True), pooled, weight)
        if pooled.is_leaf:
            pooled.grad = gradient
        else:
            pooled.backward(gradient)  # type: ignore[no-untyped-call]
        if before_step is not None:
            before_step(loss)
        if self.inputs is None:
            if self.device.type == "cpu":
                set_capturable(self.optimizer, False)  # a state that was saved on a GPU may say otherwise
            self.optimizer.step()
        elif bottom.output is None:
            self._update.run()
        else:
            self._update.run_as_written()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def _replay(self, labels: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        assert self.inputs is not None
        _put(labels, self.inputs.labels)
        _put(pooled, self.inputs.pooled)
        return self._gradients.run_rest()

    def _compute(self, x: Tensor, labels: Tensor, pooled: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        leaf = pooled.detach().requires_grad_()
        loss = _weighted(self._run_rest(x, leaf, labels), weight)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # A model may do without its rows in a step.
        return loss.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def _run_bottom(self, dense: Tensor) -> Tensor:
        bottom = self._whole_bottom if dense.shape[0] == self._batch_size else self.model.bottom
        with self._autocast():
            return bottom(dense)

    def _run_rest(self, x: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        rest = self._whole_rest if x.shape[0] == self._batch_size else self._rest
        return rest(x, pooled, labels)

    def _run_whole_rest(self, x: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        return _weighted(self._run_rest(x, pooled, labels), self._weight)

    def _rest(self, x: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            logits = self.model.from_bottom(x, pooled)
        loss: Tensor = self._loss(logits.float(), labels)
        return loss

    def _autocast(self) -> AbstractContextManager[None]:
        # No weight is used twice in a forward, and a cached cast would outlive the recording of a graph.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._options.bf16, cache_enabled=False)

    def _move(self) -> None:
        if all(parameter.device == self.device for parameter in self.model.parameters()):
            return
        self.model.to(self.device)
        # Brings the state where its parameters are: a parameter keeps its identity when a module is moved.
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _make_inputs(self) -> StaticInputs:
        size, model = self._batch_size, self.model
        shapes = (size, model.num_dense), (size,), (size, model.pooled_width)
        dense, labels, pooled = (torch.zeros(shape, device=self.device) for shape in shapes)
        return StaticInputs(dense, labels, pooled)


def _weighted(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1.0 else loss * weight


def _put(source: Tensor, place: Tensor) -> None:
    if source is not place:
        place.copy_(source.detach(), non_blocking=True)
