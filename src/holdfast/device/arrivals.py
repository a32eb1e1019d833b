"""Values on their way from the device to the host.

Invariants
- A copy sees its tensor as it was when the copy was asked for: the copy runs after everything that was begun before,
  and what changes the tensor later is begun after it, or the tensor is a snapshot of its own.
- What arrives is read after `wait` alone.
"""

from __future__ import annotations

from torch import Tensor

from holdfast.device.queues import Mark, Queue, current_queue, host_empty


class Arriving:
    """A tensor's copy on the host, from where `wait` returns; on the processor the tensor itself."""

    def __init__(self, tensor: Tensor, queue: Queue) -> None:
        """`tensor`: contiguous, and not written to any more. queue: where the copy is made, after what was begun in the
        current one."""
        self._from = tensor  # kept until it has arrived
        self._to = tensor
        self._mark: Mark | None = None
        if tensor.device.type != "cpu":
            self._to = host_empty(tensor.shape, tensor.dtype, tensor.device)
            queue.follow(current_queue(tensor.device).mark())
            with queue:
                self._to.copy_(tensor, non_blocking=True)
                self._mark = queue.mark()

    @property
    def address(self) -> int:
        """Of the copy, in bytes."""
        return self._to.data_ptr()

    def wait(self) -> Tensor:
        if self._mark is not None:
            self._mark.wait()
        return self._to


class ArrivingLoss:
    """A loss on its way: a number that the host learns without making the device wait.

    In a queue of its own: where rows are on their way back, a copy has to wait for them, and with it what comes next.
    """

    def __init__(self, loss: Tensor, queue: Queue) -> None:
        """loss: of one element, as it is now. queue: where the copy is made."""
        self._arriving = Arriving(loss.detach().reshape(()).clone(), queue)

    def value(self) -> float:
        return float(self._arriving.wait())
