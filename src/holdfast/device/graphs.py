"""CUDA graphs of a training step's parts, so that exact resume holds.

Invariants
- Whether a batch's gradients come from a replay depends on its size alone, never on what this process did before: the
  first whole batch is warmed up on whatever the static inputs hold, recorded, and then replayed like all others.
- Warming up changes nothing that lasts: it computes gradients, which are dropped; the model's buffers (running means)
  and the random number generators are put back. Parameters and optimizer state change in `RecordedUpdate` alone, only
  by the step that is asked for.
- Parts are replayed in the order in which they were recorded (bottom, gradients, update), on one stream at a time:
  they share one memory pool, and each may reuse what the one before it is done with.
- A recorded update bakes in the hyperparameters that are Python numbers. Before every replay they are compared with the
  ones that were recorded.

Everything but `CudaRecorder` runs on any device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError

_WRITTEN_FIRST = 2
_WARM_UPS = 3  # libraries load and choose lazily, some of them only at a second call


class Recorder(Protocol):
    """Makes replays of work on a device. A recording does not do the work; a replay does, on the current stream."""

    def warm_up(self, work: Callable[[], None]) -> None: ...
    def record(self, work: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """Replays by torch.cuda.CUDAGraph. All of a recorder's graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (loader, write-behind) go on allocating and asking for events meanwhile.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Where recorded work reads a whole batch: dense ``[B, num_dense]``, labels ``[B]``, pooled ``[B, W]``, float32."""

    dense: Tensor
    labels: Tensor
    pooled: Tensor


class RecordedGradients:
    """Forward and backward of whole batches, in two replays, so that the first may run before pooled vectors are there.

    bottom: dense -> x. rest: x, pooled, labels -> loss. parameters: whose gradients are computed. named_buffers: the
    model's. Raises ConfigError for a model that replaces a buffer, which a replay would not see.
    """

    def __init__(
        self,
        bottom: Callable[[Tensor], Tensor],
        rest: Callable[[Tensor, Tensor, Tensor], Tensor],
        parameters: Sequence[Tensor],
        inputs: StaticInputs,
        recorder: Recorder,
        named_buffers: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    ) -> None:
        self._named_buffers = named_buffers
        self._bottom = bottom
        self._rest = rest
        self._parameters = parameters
        self._inputs = inputs
        self._recorder = recorder
        self._pooled = inputs.pooled.detach().requires_grad_()
        self._replays: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._x: Tensor | None = None
        self._loss: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    def run_bottom(self) -> None:
        """The part that needs `inputs.dense` alone."""
        self._recorded()[0]()

    def run_rest(self) -> tuple[Tensor, Tensor]:
        """After `run_bottom`: the loss, a 0-d tensor, and the gradient of pooled; parameters have their gradients.

        The gradients are overwritten by the next call."""
        self._recorded()[1]()
        # A smaller batch in between has put gradients of its own in their places.
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        assert self._loss is not None and self._pooled.grad is not None
        return self._loss.clone(), self._pooled.grad

    def _recorded(self) -> tuple[Callable[[], None], Callable[[], None]]:
        if self._replays is None:
            device = self._inputs.dense.device
            buffers = dict(self._named_buffers())
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                for _ in range(_WARM_UPS):
                    self._recorder.warm_up(self._work_bottom)
                    self._recorder.warm_up(self._work_rest)
            for name, buffer in self._named_buffers():
                if buffer is not buffers.get(name):
                    raise ConfigError(
                        f"device.graphs: the model's forward replaces its buffer {name.removeprefix('model.')}, which "
                        "a replay does not see: write into it (copy_, add_), or set device.graphs = false"
                    )
                buffer.copy_(before[name])
            self._replays = self._recorder.record(self._work_bottom), self._recorder.record(self._work_rest)
        return self._replays

    def _work_bottom(self) -> None:
        self._x = self._bottom(self._inputs.dense)

    def _work_rest(self) -> None:
        assert self._x is not None
        for tensor in (*self._parameters, self._pooled):
            tensor.grad = None  # so that backward writes gradients, and adds to none
        loss = self._rest(self._x, self._pooled, self._inputs.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        # No graph of autograd may outlive the recording: it would tie parameters to the recording's stream.
        self._x = None
        self._loss = loss.detach()
        self._gradients = [parameter.grad for parameter in self._parameters]


class RecordedUpdate:
    """An optimizer's step by replay, from gradients that are always in the same places.

    The first two steps of a process are done as written: the first creates state, and the second is the first that
    reads it, with kernels that are loaded when they are first called, which a recording forbids. From then on a step is
    replayed whose hyperparameters (lr and the like) are those of the step before; where they have just changed it is
    done as written, and where they stand still again it is recorded anew. Both run the same kernels, so there is no
    difference in the bits. A learning rate that is a tensor on the device is read by the replay itself.

    What cannot be recorded is done as written, too: optimizers that keep numbers on the host (Adagrad's step, unless
    it is ``fused``), that have hooks, or that are not torch.optim's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, recorder: Recorder) -> None:
        self._optimizer = optimizer
        self._device = device
        self._recorder = recorder
        self._state: object = None
        self._hyperparameters: list[object] = []
        self._to_write = 0  # steps, before one is recorded
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        """The step, from gradients where `RecordedGradients.run_rest` leaves them."""
        hyperparameters = self._now()
        if self._optimizer.state is not self._state:
            self._replay, self._to_write = None, _WRITTEN_FIRST
        elif not _same(hyperparameters, self._hyperparameters):
            self._replay, self._to_write = None, max(self._to_write, 1)
        self._state, self._hyperparameters = self._optimizer.state, hyperparameters
        if self._replay is None:
            if self._to_write > 0 or not self._recordable():
                self._to_write -= 1
                self.run_as_written()
                return
            self._replay = self._recorder.record(self._work)
        self._replay()

    def _work(self) -> None:
        self._optimizer.step()

    def run_as_written(self) -> None:
        """The step, from gradients wherever they are."""
        if self._device.type == "cuda":
            set_capturable(self._optimizer, True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            self._optimizer.step()

    def _recordable(self) -> bool:
        kept = [value for state in self._optimizer.state.values() for value in state.values()]
        tensors = [value for value in (*kept, *self._hyperparameters) if isinstance(value, Tensor)]
        return (
            type(self._optimizer).__module__.startswith("torch.optim.")
            and not self._optimizer._optimizer_step_pre_hooks
            and not self._optimizer._optimizer_step_post_hooks
            and all(value is None or isinstance(value, Tensor) for value in kept)
            and all(tensor.device.type == self._device.type for tensor in tensors)
        )

    def _now(self) -> list[object]:
        return [value for group in self._optimizer.param_groups for name, value in group.items() if name != "params"]


def set_capturable(optimizer: torch.optim.Optimizer, wanted: bool) -> None:
    """Sets the flag of that name where an optimizer has it: with it, steps are counted on the device, and only so can
    they be recorded; the CPU knows no such thing. It is saved with the optimizer, so a loaded one may have either."""
    for group in optimizer.param_groups:
        if group.get("capturable", wanted) == wanted:
            continue
        group["capturable"] = wanted
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(parameter.device if wanted else "cpu")


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Tensors are the same where they are one object: what they hold is read by the device."""
    return len(left) == len(right) and all(
        a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
        for a, b in zip(left, right, strict=True)
    )
