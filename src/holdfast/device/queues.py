"""Queues of work on a device, and marks in them: CUDA's streams and events.

Invariants
- Work that is begun in a queue runs in the order in which it is begun; between queues only marks put it in order.
- On the processor whatever is begun is done: a queue is no more than a place to say so, and its marks hold no wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A moment in a queue's work."""

    def wait(self) -> None:
        """Waits, in this thread, until the queue has come here."""

    def is_reached(self) -> bool:
        """Whether it has; then, too, what was done before is there for this thread."""

    def seconds_since(self, earlier: Mark) -> float:
        """The time between two marks that were reached; both timed, and of one device."""


class Queue(Protocol):
    """Work of one device, in order. Context manager: what torch is asked for inside is begun in this queue."""

    def mark(self, *, timed: bool = False) -> Mark: ...
    def follow(self, mark: Mark) -> None:
        """What is begun here from now on runs after `mark`, of any queue of the device."""

    def keep(self, tensor: torch.Tensor) -> None:
        """`tensor`, made in another queue, is used in this one: its memory is not given away before that is done."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def new_queue(device: torch.device) -> Queue:
    """A queue beside the one that torch's work goes to by default."""
    if device.type != "cuda":
        return _Now()
    return _Stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def current_queue(device: torch.device) -> Queue:
    """Where torch's work goes now."""
    return _Stream(torch.cuda.current_stream(device)) if device.type == "cuda" else _Now()


@dataclass(frozen=True, slots=True)
class Work:
    """Something that a queue did, from one mark to another, both timed. queue: the name under which it is shown."""

    name: str
    queue: str
    began: Mark
    ended: Mark


class Clock:
    """Tells when work ran, in seconds of ``time.perf_counter``. Waits for the device once, when it is made.

    A device tells milliseconds between marks as a float32: of an hour it knows them to a quarter. So what it counts
    from moves along, some seconds behind the work that is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        mark = current_queue(device).mark(timed=True)
        mark.wait()
        self._base = self._next_base = (mark, time.perf_counter())

    def span(self, work: Work) -> tuple[float, float]:
        """When it began and when it ended. work: done."""
        base, seconds = self._base
        began = work.began.seconds_since(base)
        span = seconds + began, seconds + work.ended.seconds_since(base)
        if self._next_base is self._base:
            if began > _SECONDS_BEHIND:
                self._next_base = work.began, span[0]
        elif began > 2 * _SECONDS_BEHIND:
            self._base = self._next_base
        return span


_SECONDS_BEHIND = 4.0


class Sending:
    """A host's tensor on its way to a device. Page-locked memory makes it go beside what the device is doing; other is
    copied into such first."""

    def __init__(self, tensor: torch.Tensor, device: torch.device, queue: Queue) -> None:
        self._there = tensor
        self._mark: Mark | None = None
        if device.type != "cpu":
            pinned = tensor if tensor.is_pinned() else _page_locked(tensor)
            with queue:
                self._there = pinned.to(device, non_blocking=True)
                self._mark = queue.mark()

    def take(self) -> torch.Tensor:
        """The tensor on the device: what is begun after this in the current queue finds it there."""
        if self._mark is not None:
            now = current_queue(self._there.device)
            now.follow(self._mark)
            now.keep(self._there)
        return self._there


def sent(tensor: torch.Tensor, device: torch.device, queue: Queue) -> torch.Tensor:
    """`Sending`, and taken at once."""
    return Sending(tensor, device, queue).take()


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the host, page-locked where `device` wants that: copies then run beside computation.

    torch keeps page-locked memory that was freed, and gives it out again once the copies that used it are done.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda", device="cpu")


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. By NumPy, in this thread: torch would have its whole team of threads copy half a megabyte, and each of
    them is waited for."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    copy.view(-1).view(torch.uint8).numpy()[...] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return copy


class _Stream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._entered: list[torch.cuda.StreamContext] = []

    def mark(self, *, timed: bool = False) -> Mark:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Event(event)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        self._stream.wait_event(mark.event)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def __enter__(self) -> Self:
        context = torch.cuda.stream(self._stream)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class _Now:
    def mark(self, *, timed: bool = False) -> Mark:
        return _Moment()

    def follow(self, mark: Mark) -> None:
        pass

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Moment:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        pass

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Moment)
        return self.at - earlier.at
