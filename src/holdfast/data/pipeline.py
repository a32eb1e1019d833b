"""The threads behind the loader: they decode blocks, cut batches, run the transform, and keep a few batches ready.

- What a batch holds is fixed by the order alone; threads only decide when it is made.
- One lock guards all shared fields; decoding, cutting and the transform run outside of it.
- At most ``prefetch`` batches beyond the one handed out are made or being made, and at most one group of samples (see
  shuffle.py) beyond those the coming batch needs is held decoded. That bounds memory.
- An exception belongs to the batch that needed the work: earlier batches are handed out first, then it surfaces in the
  consumer.
- A batch stays until its successor is asked for, so a consumer interrupted while it takes one may ask again.
- Threads never refer to the loader, so that a forgotten loader can be collected and stops them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.data.batch import Batch
from holdfast.data.block import Rows, SampleBlock, SamplePool, assemble, pool_blocks
from holdfast.data.shuffle import GroupSpan, SampleOrder
from holdfast.data.source import Source
from holdfast.errors import StepError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Item]):
    """One item for the consumer, and the stream's position after it."""

    item: Item
    end: int


@dataclass(slots=True)
class _Group:
    """A group on its way from blocks to shuffled samples. Blocks are claimed in order; ``num_done`` counts also the
    failed.

    Of several blocks that fail, the first in the stream is told, whichever thread came first: so a failed group is
    ready only when every claimed block is done.
    """

    span: GroupSpan
    blocks: list[SampleBlock | None]
    num_claimed: int = 0
    num_done: int = 0
    errors: dict[int, BaseException] = field(default_factory=dict)
    samples: SamplePool | None = None
    permutation: NDArray[np.intp] | None = None

    @property
    def is_ready(self) -> bool:
        return self.samples is not None or (bool(self.errors) and self.num_done == self.num_claimed)

    @property
    def error(self) -> BaseException | None:
        return self.errors[min(self.errors)] if self.errors else None

    @property
    def has_unclaimed_block(self) -> bool:
        return not self.errors and self.num_claimed < len(self.span.blocks)

    def piece(self, begin: int, end: int) -> tuple[SamplePool, Rows]:
        """The samples at the stream's positions ``[begin, end)``, cut to this group."""
        assert self.samples is not None
        first, last = max(begin, self.span.start) - self.span.start, min(end, self.span.end) - self.span.start
        if self.permutation is None:
            return self.samples, slice(first, last)
        return self.samples, self.permutation[first:last]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCut:
    """Which part of the stream becomes batches: from ``start`` to ``end`` (None: endless), ``batch_size`` at a time;
    and which of `of` even parts of each batch is made."""

    start: int
    end: int | None
    batch_size: int
    part: int = 0
    of: int = 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Positions of the ``index``-th batch from ``start`` (from 0); empty when past the end."""
        begin = self.start + index * self.batch_size
        end = begin + self.batch_size
        return (begin, end) if self.end is None else (min(begin, self.end), min(end, self.end))

    def part_of(self, begin: int, end: int) -> tuple[int, int]:
        """Positions of the part that is made of the batch at ``[begin, end)``."""
        size = end - begin
        return begin + self.part * size // self.of, begin + (self.part + 1) * size // self.of


@dataclass(slots=True)
class _Shared(Generic[Item]):
    """What the lock guards."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    open_groups: deque[_Group] = field(default_factory=deque)
    ready: dict[int, Delivery[Item] | BaseException] = field(default_factory=dict)
    num_claimed: int = 0  # batches that a worker has made or is making
    num_wanted: int = 0  # index of the batch that the consumer holds or waits for
    is_stopped: bool = False
    fatal: BaseException | None = None


class Pipeline(Generic[Item]):
    """Makes the batches of one cut of the stream; ``take(0)``, ``take(1)``... in order, from one consumer thread."""

    def __init__(
        self,
        source: Source,
        order: SampleOrder,
        cut: StreamCut,
        hand_over: Callable[[Batch], Item],
        *,
        num_workers: int,
        prefetch: int,
    ) -> None:
        self._source = source
        self._keys = [feature.name for feature in source.features]
        self._order = order
        self._cut = cut
        self._hand_over = hand_over
        self._prefetch = prefetch
        self._num_workers = num_workers
        self._spans = order.groups_from(cut.start)
        self._shared: _Shared[Item] = _Shared()
        # Daemons, because the interpreter joins other threads before it runs the loader's exit hook, which stops these.
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-loader-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, index: int) -> Delivery[Item] | None:
        """Batch ``index`` of the cut, waiting for it; None past the end. Raises what its making raised.

        Gives up the batches before it; the same index may be taken again.
        """
        begin, end = self._cut.bounds(index)
        if begin == end:
            return None
        shared = self._shared
        with shared.condition:
            if index != shared.num_wanted:
                shared.num_wanted = index
                for done in [number for number in shared.ready if number < index]:
                    del shared.ready[done]
                shared.condition.notify_all()
            while index not in shared.ready and shared.fatal is None:
                if shared.is_stopped:
                    raise StepError("the loader was closed while a batch was awaited")
                shared.condition.wait()
            result = shared.ready.get(index, shared.fatal)
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        """Let every thread finish the piece of work in its hands, and wait for them. May be called again."""
        with self._shared.condition:
            self._shared.is_stopped = True
            self._shared.condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                # or the last job's groups stay in memory while this thread waits
                del job
        except BaseException as error:
            # only a bug in this module comes here; without this the consumer would wait for ever
            with self._shared.condition:
                self._shared.fatal = error
                self._shared.condition.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """Waits for something to do: a batch whose samples are there, else a block; None when stopped."""
        shared = self._shared
        with shared.condition:
            while not shared.is_stopped:
                job = self._claim_batch() or self._claim_block()
                if job is not None:
                    return job
                shared.condition.wait()
        return None

    def _claim_batch(self) -> Callable[[], None] | None:
        shared = self._shared
        begin, end = self._cut.bounds(shared.num_claimed)
        if begin == end or shared.num_claimed > shared.num_wanted + self._prefetch:
            return None
        self._open_groups_for(end)
        groups = [group for group in shared.open_groups if group.span.start < end]
        if not all(group.is_ready for group in groups):
            return None
        index = shared.num_claimed
        shared.num_claimed += 1
        while shared.open_groups and shared.open_groups[0].span.end <= end:
            shared.open_groups.popleft()
        return partial(self._make_batch, index, begin, end, groups)

    def _open_groups_for(self, end: int) -> None:
        """Open the groups that positions up to ``end`` need, and one beyond for its blocks to be decoded ahead."""
        shared = self._shared
        stream_end = self._cut.end
        while not shared.open_groups or shared.open_groups[-1].span.start < end:
            if stream_end is not None and shared.open_groups and shared.open_groups[-1].span.end >= stream_end:
                return
            span = next(self._spans)
            shared.open_groups.append(_Group(span, [None] * len(span.blocks)))

    def _claim_block(self) -> Callable[[], None] | None:
        for group in self._shared.open_groups:
            if group.has_unclaimed_block:
                slot = group.num_claimed
                group.num_claimed += 1
                return partial(self._decode, group, slot)
        return None

    def _decode(self, group: _Group, slot: int) -> None:
        try:
            group.blocks[slot] = self._source.read_block(group.span.blocks[slot])
        except BaseException as error:
            with self._shared.condition:
                group.errors[slot] = error
        with self._shared.condition:
            group.num_done += 1
            if group.errors:
                self._shared.condition.notify_all()
                return
            if group.num_done < len(group.span.blocks):
                return
        samples = pool_blocks([block for block in group.blocks if block is not None])
        assert samples.num_samples == group.span.num_samples, "a block is as long as its source says"
        permutation = self._order.permutation(group.span)
        with self._shared.condition:
            group.blocks = []
            group.permutation = permutation
            group.samples = samples
            self._shared.condition.notify_all()

    def _make_batch(self, index: int, begin: int, end: int, groups: list[_Group]) -> None:
        result: Delivery[Item] | BaseException
        try:
            failed = next((group.error for group in groups if group.error is not None), None)
            if failed is not None:
                result = failed
            else:
                first, last = self._cut.part_of(begin, end)
                pieces = [
                    group.piece(first, last)
                    for group in groups
                    if group.span.start < max(last, first + 1) and group.span.end > first
                ]
                number = begin // self._cut.batch_size + 1
                batch = assemble(self._keys, pieces, number=number, first_sample=begin)
                result = Delivery(self._hand_over(batch), end)
        except BaseException as error:
            result = error
        with self._shared.condition:
            self._shared.ready[index] = result
            self._shared.condition.notify_all()
