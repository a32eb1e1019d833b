"""The threads behind the loader: they decode blocks, cut batches, run the transform, and keep a few batches ready.

- What a batch holds is fixed by the order alone; threads only decide when it is made.
- One lock guards all shared fields; decoding, cutting and the transform run outside of it.
- At most ``prefetch`` batches beyond the one handed out are made or being made, and of each lane that the cut needs at
  most one group of samples (see shuffle.py) beyond those the coming batch needs is held decoded. That bounds memory.
- A block is decoded for all open groups that need it and have not claimed it.
- An exception belongs to the batch that needed the work: earlier batches are handed out first, then it surfaces in the
  consumer.
- A batch stays until its successor is asked for, so a consumer interrupted while it takes one may ask again.
- Where it is asked for, the transform runs for one batch at a time, in their order; all else is made beside it.
- Threads never refer to the loader, so that a forgotten loader can be collected and stops them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Generic, TypeVar

from holdfast.data.batch import Batch
from holdfast.data.block import SampleBlock, assemble, no_samples
from holdfast.data.cut import StreamCut
from holdfast.data.groups import Group, survey
from holdfast.data.shuffle import GroupSpan, SampleOrder
from holdfast.data.source import Source
from holdfast.errors import DataError, StepError

Item = TypeVar("Item")
_LOOK_SECONDS = 1.0  # for threads that died before they could say why


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Item]):
    """One item for the consumer, and the stream's position after it."""

    item: Item
    end: int


@dataclass(slots=True)
class _Lane:
    """A lane of the stream: the groups that are open, and those to come."""

    spans: Iterator[GroupSpan]
    groups: deque[Group] = field(default_factory=deque)


@dataclass(slots=True)
class _Shared(Generic[Item]):
    """What the lock guards."""

    # Held itself: a Condition takes it in Python, where Ctrl-C can come between that and the block that gives it back.
    lock: threading.RLock = field(default_factory=threading.RLock)
    condition: threading.Condition = field(init=False)
    lanes: dict[int, _Lane] = field(default_factory=dict)  # those that a batch of the cut had samples of
    open_groups: list[Group] = field(default_factory=list)  # of all lanes
    unsurveyed: deque[Group] = field(default_factory=deque)
    awaited: dict[int, list[Group]] | None = None  # what the next batch to be claimed needs, by lane
    ready: dict[int, Delivery[Item] | BaseException] = field(default_factory=dict)
    num_claimed: int = 0  # batches that a worker has made or is making
    num_handed_over: int = 0  # batches whose transform is over; where these run in order
    num_wanted: int = 0  # index of the batch that the consumer holds or waits for
    is_stopped: bool = False
    fatal: BaseException | None = None

    def __post_init__(self) -> None:
        self.condition = threading.Condition(self.lock)


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
        in_order: bool = False,
    ) -> None:
        self._in_order = in_order
        self._source = source
        self._keys = [feature.name for feature in source.features]
        self._order = order
        self._cut = cut
        self._hand_over = hand_over
        self._prefetch = prefetch
        self._num_workers = num_workers
        self._shared: _Shared[Item] = _Shared()
        # Daemons, because the interpreter joins other threads before it runs the loader's exit hook, which stops these.
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-loader-{number}", daemon=True)
            for number in range(num_workers)
        ]

    def start(self) -> None:
        """Begins; `stop` is right from here on, also where this is interrupted."""
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
        with shared.lock:
            if index != shared.num_wanted:
                shared.num_wanted = index
                for done in [number for number in shared.ready if number < index]:
                    del shared.ready[done]
                shared.condition.notify_all()
            while index not in shared.ready and shared.fatal is None:
                if shared.is_stopped:
                    raise StepError("the loader was closed while a batch was awaited")
                if not any(thread.is_alive() for thread in self._threads):
                    raise DataError("the loader's threads ended without a word: memory ran out, or this process forked")
                shared.condition.wait(_LOOK_SECONDS)
            result = shared.ready.get(index, shared.fatal)
        if isinstance(result, BaseException):
            raise result
        return result

    def peek(self, index: int) -> Delivery[Item] | None:
        """Batch ``index`` of the cut, if it is made; None else, and where making it raised."""
        with self._shared.lock:
            result = self._shared.ready.get(index)
        return None if isinstance(result, BaseException) else result

    def stop(self) -> None:
        """Let every thread finish the piece of work in its hands, and wait for them. May be called again."""
        with self._shared.lock:
            self._shared.is_stopped = True
            self._shared.condition.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                # or the last job's groups stay in memory while this thread waits
                del job
        except BaseException as error:
            # only a bug in this module comes here; without this the consumer would wait for ever
            with self._shared.lock:
                self._shared.fatal = error
                self._shared.condition.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """Waits for something to do: a batch whose samples are there, else a group or a block; None when stopped."""
        shared = self._shared
        with shared.lock:
            while not shared.is_stopped:
                job = self._claim_batch() or self._claim_survey() or self._claim_block()
                if job is not None:
                    return job
                shared.condition.wait()
        return None

    def _claim_batch(self) -> Callable[[], None] | None:
        shared = self._shared
        begin, end = self._cut.bounds(shared.num_claimed)
        if begin == end or shared.num_claimed > shared.num_wanted + self._prefetch:
            return None
        if shared.awaited is None:
            shared.awaited = self._groups_for(*self._cut.part_of(begin, end))
        if not all(group.is_ready for group in chain.from_iterable(shared.awaited.values())):
            return None
        groups, shared.awaited = shared.awaited, None
        index = shared.num_claimed
        shared.num_claimed += 1
        self._let_go(*self._cut.part_of(begin, end))
        return partial(self._make_batch, index, begin, end, groups)

    def _groups_for(self, begin: int, end: int) -> dict[int, list[Group]]:
        """By lane, the groups that the stream's positions ``[begin, end)`` need. Opens them, and in each of these lanes
        one beyond, for its blocks to be decoded ahead."""
        shared, lanes = self._shared, self._order.lanes
        found = {}
        for lane, lane_end in lanes.ends(begin, end).items():
            if lane not in shared.lanes:
                shared.lanes[lane] = _Lane(self._order.groups_from(lanes.position(lane, begin), lane))
            of_lane = shared.lanes[lane]
            stream_end = None if self._cut.end is None else lanes.position(lane, self._cut.end)
            while not of_lane.groups or of_lane.groups[-1].span.start < lane_end:
                if stream_end is not None and of_lane.groups and of_lane.groups[-1].span.end >= stream_end:
                    break
                of_lane.groups.append(Group(next(of_lane.spans)))
                shared.unsurveyed.append(of_lane.groups[-1])
            found[lane] = [group for group in of_lane.groups if group.span.start < lane_end]
        # in the order in which batches need them: every lane's first one, every lane's second one...
        in_turn = zip_longest(*(lane.groups for lane in shared.lanes.values()))
        shared.open_groups = [group for groups in in_turn for group in groups if group is not None]
        return found

    def _let_go(self, begin: int, end: int) -> None:
        """Of the groups that the stream's positions ``[begin, end)`` need, those that nothing needs after."""
        shared = self._shared
        lane_ends = self._order.lanes.ends(begin, end)
        for lane, lane_end in lane_ends.items():
            groups = shared.lanes[lane].groups
            while groups and groups[0].span.end <= lane_end:
                groups.popleft()
        shared.open_groups = [
            group for group in shared.open_groups if group.span.end > lane_ends.get(group.span.lane, 0)
        ]

    def _claim_survey(self) -> Callable[[], None] | None:
        return partial(self._survey, self._shared.unsurveyed.popleft()) if self._shared.unsurveyed else None

    def _claim_block(self) -> Callable[[], None] | None:
        for group in self._shared.open_groups:
            block = group.unclaimed_block()
            if block is not None:
                claims = [(other, other.claim(block)) for other in self._shared.open_groups]
                takers = [(taker, number) for taker, number in claims if number is not None]
                return partial(self._decode, block, takers)
        return None

    def _survey(self, group: Group) -> None:
        needed = survey(self._order, group.span, self._cut)
        with self._shared.lock:
            group.need(needed, num_features=len(self._keys), num_dense=self._source.num_dense)
            self._shared.condition.notify_all()

    def _decode(self, block: int, takers: Sequence[tuple[Group, int]]) -> None:
        decoded: SampleBlock | BaseException
        try:
            decoded = self._source.read_block(block)
        except BaseException as error:
            decoded = error
        else:
            assert decoded.num_samples == self._order.block_sizes[block], "a block is as long as its source says"
        with self._shared.lock:
            complete = [group for group, number in takers if group.take(number, decoded)]
            if isinstance(decoded, BaseException):
                self._shared.condition.notify_all()
        del decoded
        for group in complete:
            samples = group.gathered()
            with self._shared.lock:
                group.finish(samples)
                self._shared.condition.notify_all()

    def _make_batch(self, index: int, begin: int, end: int, groups: Mapping[int, Sequence[Group]]) -> None:
        result: Delivery[Item] | BaseException
        try:
            failed = next(
                (group.error for group in chain.from_iterable(groups.values()) if group.error is not None), None
            )
            if failed is not None:
                result = failed
            else:
                pieces = [
                    group.piece(run.begin, run.end)
                    for run in self._order.lanes.runs(*self._cut.part_of(begin, end))
                    for group in groups[run.lane]
                    if group.span.start < run.end and group.span.end > run.begin
                ] or [(no_samples(len(self._keys), self._source.num_dense), slice(0, 0))]
                number = begin // self._cut.batch_size + 1
                batch = assemble(self._keys, pieces, number=number, first_sample=begin)
                self._await_turn(index)
                result = Delivery(self._hand_over(batch), end)
        except BaseException as error:
            result = error
        self._await_turn(index)
        with self._shared.lock:
            self._shared.num_handed_over = index + 1
            self._shared.ready[index] = result
            self._shared.condition.notify_all()

    def _await_turn(self, index: int) -> None:
        """Waits until the transforms of all batches before this one are over, where they run in order."""
        shared = self._shared
        with shared.lock:
            while self._in_order and shared.num_handed_over < index and not shared.is_stopped:
                shared.condition.wait()
