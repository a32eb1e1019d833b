"""The endless stream of batches that training consumes.

    with Loader(source, batch_size=2048, seed=7) as loader:
        for batch in loader:                      # endless; batch.number is 1, 2, 3...
            ...

    with Loader(source, batch_size=2048, seed=7, transform=plan) as loader:
        for batch, planned in loader:             # planned = plan(batch), computed ahead in a worker thread
            ...

    with Loader(validation, batch_size=8192, seed=0) as loader:
        for batch in loader.once():               # one pass in file order; the last batch may be smaller
            ...

Iteration, also that of ``once``, gives the Batch; with a ``transform``, the pair ``(batch, transform(batch))``.

- Samples run epoch after epoch, each shuffled anew by (seed, epoch); batches are always full and may straddle epochs.
- Batch number k holds the stream's samples ``[(k - 1) * batch_size, k * batch_size)``, so it is a function of (source,
  seed, shuffle, window, lanes, batch_size, k), whatever the number of workers, the prefetch, the part that is taken of
  it, or where iteration began.
- A part decodes only the blocks that it has samples of. In one lane these are all blocks, unless blocks are tiny. A
  stream of L lanes (shuffle.py) is in another order, in which each of n parts has samples of 1/n of the blocks and a
  few more, best where n divides L. Lanes are cut from the batch size that the stream began with; its state keeps that.
- Without shuffle, and in ``once``, the order is the file's, and there are no lanes: where a block is longer than a
  batch, every part has samples of all blocks.
- ``seek(num_samples)`` goes to any position of the stream. When it is no multiple of the batch size, batches are cut
  from there, full, and ``batch.number`` is ``first_sample // batch_size + 1``; ``batch.first_sample`` is always exact.
- New data (``new_data``) follow those of before: positions and batch numbers count on, epochs begin anew. `origin` is
  where they begin, and part of the state, so that a later life need not say again that they are new.
- ``samples`` is the position after the last batch handed out; prefetched batches do not count.
- What looks forward (``look_ahead``) sees each batch when it is made, and those that are ready when one is handed out.
- No global random state (Python's, NumPy's, torch's) is read or changed.
- An exception in a worker surfaces, as it is, in ``next``: the transform's from the ``next`` that would have given its
  batch; a DataError from the one that would have given the first batch with a sample of the bad block's group
  (shuffle.py). A part that has no sample of that block gives its batches. Batches before the error come first, whatever
  the number of workers; asking again raises it again, until ``seek``.
- Threads start at the first ``next`` and end with ``close`` (or ``with``, or the loader's collection, or the
  interpreter's exit).
- One thread consumes. The transform runs in worker threads: with one worker in the batches' order, with more also at
  the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast, overload

from holdfast.data.batch import Batch
from holdfast.data.cut import StreamCut
from holdfast.data.lanes import Lanes
from holdfast.data.pipeline import Pipeline
from holdfast.data.shuffle import SampleOrder
from holdfast.data.source import Source
from holdfast.data.stream_state import LANE_BATCH, ORIGIN, check_stream, count, fingerprint_in, is_of_other_data
from holdfast.errors import ConfigError, StepError

Item = TypeVar("Item")
Transformed = TypeVar("Transformed")


class LooksAhead(Protocol):
    """What is told of batches before they are handed out: see holdfast.rows.look_ahead."""

    @property
    def in_order(self) -> bool:
        """Whether `plan` wants the batches one at a time, in their order."""

    def plan(self, batch: object) -> Any:
        """By a worker thread, of a batch that was made."""

    def turn(self, batches: Sequence[Any]) -> None:
        """By the thread that consumes: what `plan` gave of the batch that is handed out now, and of those after it."""


_MAX_WINDOW_SAMPLES = 131_072
_WINDOW_BYTES = 64 << 20
_MAX_UNSHUFFLED_GROUP_SAMPLES = 16_384
_UNSHUFFLED_GROUP_BYTES = 16 << 20
_MAX_WORKERS = 1024


def default_window_samples(source: Source) -> int:
    """How many samples are shuffled together unless said otherwise: 131,072, or what 64 MiB hold when that is fewer."""
    return _samples_within(source, _WINDOW_BYTES, _MAX_WINDOW_SAMPLES)


def _samples_within(source: Source, num_bytes: int, most: int) -> int:
    return max(1, min(most, num_bytes // max(1, source.sample_bytes)))


class Loader(Generic[Item]):
    """An endless iterator over the batches of ``source``; see the module's text.

    batch_size: samples per batch. seed: of the shuffle, in [0, 2**63). shuffle_window_samples: about how many samples
    are decoded and shuffled together (blocks from all over the files); None: ``default_window_samples``; the loader
    holds two to three such groups. workers: threads. prefetch: batches made ready beyond the one handed out (at least
    1). part: (i, n): of every batch the i-th of n even parts, in order of samples, as one of n trainers takes it;
    number and first_sample stay those of the batch. lanes: of the stream; where the number of parts divides it, each
    part decodes its share of the data. Another number is another order, so it is for good. The window is divided among
    the lanes, and each lane of a part holds two blocks at least. in_order: ``transform`` runs for one batch at a time,
    in their order, however many workers there are. new_data: a state that was saved of other data, with the same
    columns, is gone on with: these follow them, from their first sample on; without it that is refused. Raises
    ConfigError that names the argument.
    """

    @overload
    def __init__(
        self: Loader[Batch],
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        shuffle_window_samples: int | None = None,
        workers: int = 1,
        prefetch: int = 2,
        part: tuple[int, int] = (0, 1),
        lanes: int = 1,
        transform: None = None,
        in_order: bool = False,
        new_data: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[tuple[Batch, Transformed]],
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        shuffle_window_samples: int | None = None,
        workers: int = 1,
        prefetch: int = 2,
        part: tuple[int, int] = (0, 1),
        lanes: int = 1,
        transform: Callable[[Batch], Transformed],
        in_order: bool = False,
        new_data: bool = False,
    ) -> None: ...

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        shuffle_window_samples: int | None = None,
        workers: int = 1,
        prefetch: int = 2,
        part: tuple[int, int] = (0, 1),
        lanes: int = 1,
        transform: Callable[[Batch], object] | None = None,
        in_order: bool = False,
        new_data: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("workers", workers), ("prefetch", prefetch)):
            if value < 1:
                raise ConfigError(f"loader {name}: must be at least 1, not {value}")
        if workers > _MAX_WORKERS:
            raise ConfigError(f"loader workers: must be at most {_MAX_WORKERS}, not {workers}: each is a thread")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"loader seed: must lie in [0, 2**63), not {seed}")
        if shuffle_window_samples is not None and shuffle_window_samples < 1:
            raise ConfigError(f"loader shuffle_window_samples: must be at least 1, not {shuffle_window_samples}")
        if not 0 <= part[0] < part[1]:
            raise ConfigError(f"loader part: {part[0]} is none of {part[1]} parts")
        if source.num_samples < 1:
            raise ConfigError("loader source: it holds no samples")
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._workers = workers
        self._in_order = in_order
        self._prefetch = prefetch
        self._part = part
        self._window_samples = (shuffle_window_samples or default_window_samples(source)) if shuffle else None
        self._order = _order_of(source, seed, self._window_samples, Lanes(lanes, batch_size))
        # the overloads tie Item to the transform; inside, the two cases meet in one function
        self._hand_over = cast(Callable[[Batch], Item], _hand_over_with(transform))
        self._start = 0
        # (batches taken since _start, position after them): one assignment moves both on, so Ctrl-C cannot part them
        self._taken = (0, 0)
        self._fingerprint: Mapping[str, int | str] = {}  # in the words of a state that was loaded
        self._has_transform = transform is not None
        self._look: LooksAhead | None = None
        self._pipeline: Pipeline[tuple[Item, Any]] | None = None
        self._stop_pipeline: weakref.finalize[..., Loader[Item]] | None = None
        self._is_closed = False
        self._takes_new_data = new_data
        self._origin = 0
        # That of the data of before, until the first batch of these is handed out.
        self._former: dict[str, int | str] | None = None

    @property
    def source(self) -> Source:
        return self._source

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_samples

    @property
    def samples(self) -> int:
        """Samples of the stream consumed by the batches handed out: where the next batch begins."""
        return self._taken[1]

    @property
    def origin(self) -> int:
        """Where in the stream the first sample of these data is: 0, or after what was taken of others before."""
        return self._origin

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._is_closed:
            raise StepError("the loader is closed; make a new one")
        if self._pipeline is None:
            self._start_pipeline()
        assert self._pipeline is not None
        index = self._taken[0]
        delivery = self._pipeline.take(index)
        assert delivery is not None, "the training stream has no end"
        if self._look is not None:
            self._look.turn([planned for _, planned in (delivery.item, *self._ready_after(index))])
        self._former = None
        self._taken = (index + 1, self._origin + delivery.end)
        return delivery.item[0]

    def _ready_after(self, index: int) -> Iterator[tuple[Item, Any]]:
        assert self._pipeline is not None
        while (coming := self._pipeline.peek(index := index + 1)) is not None:
            yield coming.item

    def look_ahead(self, look: LooksAhead) -> None:
        """Has `look` told of the coming batches, from the next start of the threads on (the first ``next``, or the one
        after a ``seek``). Without effect where there is a transform: whoever plans in it announces, too."""
        if not self._has_transform:
            self._look = look

    def seek(self, num_samples: int) -> None:
        """Go on at position ``num_samples`` of the stream (any, also far beyond the first epoch). ConfigError if
        negative, or before the first sample of these data."""
        if num_samples < 0:
            raise ConfigError(f"loader seek: a position is not negative, but this one is {num_samples}")
        if self._former is not None:
            self._origin = num_samples
        if num_samples < self._origin:
            raise ConfigError(f"loader seek: these data begin at position {self._origin}, behind {num_samples}")
        self._halt()
        self._start = num_samples
        self._taken = (0, num_samples)

    def once(self) -> Iterator[Item]:
        """One pass over the source in its own order, without shuffle; the last batch may be smaller. For evaluation.

        Independent of the endless stream and its position; batch numbers begin at 1. Has its own threads, which end
        with the pass or when the iterator is closed or collected.
        """
        if self._is_closed:
            raise StepError("the loader is closed; make a new one")
        order = _order_of(self._source, self._seed, None, Lanes())
        pipeline, stop = self._make_pipeline(order, 0, order.num_samples, None, origin=0)
        try:
            pipeline.start()
            index = 0
            while (delivery := pipeline.take(index)) is not None:
                yield delivery.item[0]
                index += 1
        finally:
            stop()

    def state_dict(self) -> dict[str, int | str]:
        """The position and what it is a position in; plain ints and strings, so that JSON keeps it."""
        if self._former is not None:
            return dict(self._former)
        state: dict[str, int | str] = {"samples": self.samples, **self._identity()}
        if self._order.lanes.num_lanes > 1:
            state[LANE_BATCH] = self._order.lanes.batch_size
        if self._origin:
            state[ORIGIN] = self._origin
        return state

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where ``state`` was taken. ConfigError that names the field if it is of another stream (other data,
        columns, hash sizes, seed, shuffle or lanes). The batch size and the workers may differ: a position counts
        samples. With ``new_data`` these may be others, with the same columns, and begin where those ended."""
        self._fingerprint = fingerprint_in(state, self._source)
        identity = self._identity()
        is_of_others = self._takes_new_data and is_of_other_data(state, identity)
        self._former = dict(state) if is_of_others else None
        if is_of_others:
            self.seek(count(state, "samples"))
            return
        has_lanes = self._order.lanes.num_lanes > 1
        check_stream(state, identity, ("samples", LANE_BATCH) if has_lanes else ("samples",))
        samples = count(state, "samples")
        if has_lanes:
            lanes = Lanes(self._order.lanes.num_lanes, count(state, LANE_BATCH, least=1))
            self._order = _order_of(self._source, self._seed, self._window_samples, lanes)
        self._origin = count(state, ORIGIN) if ORIGIN in state else 0
        self.seek(samples)

    def close(self) -> None:
        """Stop the threads and wait for them. May be called again; afterwards the loader gives no more batches."""
        self._is_closed = True
        self._halt()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _identity(self) -> dict[str, int | str]:
        # 0 stands for no shuffle, where the seed means nothing
        identity: dict[str, int | str] = {"shuffle_window_samples": self._window_samples or 0}
        if self._window_samples is not None:
            identity["seed"] = self._seed
        if self._order.lanes.num_lanes > 1:
            identity["lanes"] = self._order.lanes.num_lanes
        told = self._fingerprint or self._source.fingerprint()
        return identity | {f"source.{key}": value for key, value in told.items()}

    def _start_pipeline(self) -> None:
        self._halt()  # one whose start was interrupted
        pipeline, self._stop_pipeline = self._make_pipeline(self._order, self._start, None, self._look, self._origin)
        pipeline.start()
        self._pipeline = pipeline

    def _make_pipeline(
        self, order: SampleOrder, start: int, end: int | None, look: LooksAhead | None, origin: int
    ) -> tuple[Pipeline[tuple[Item, Any]], weakref.finalize[..., Loader[Item]]]:
        """Not started: before there is a thread, the loader knows how to stop it."""
        part, of = self._part
        cut = StreamCut(start=start - origin, end=end, batch_size=self._batch_size, part=part, of=of)
        hand_over = _counting_from(origin, self._batch_size, _with_plan(self._hand_over, look))
        pipeline = Pipeline(
            *(self._source, order, cut, hand_over),
            num_workers=self._workers,
            prefetch=self._prefetch,
            in_order=self._in_order or (look is not None and look.in_order),
        )
        return pipeline, weakref.finalize(self, pipeline.stop)

    def _halt(self) -> None:
        if self._stop_pipeline is not None:
            self._stop_pipeline()
        self._stop_pipeline = None
        self._pipeline = None
        if self._look is not None:
            self._look.turn([])


def _order_of(source: Source, seed: int, window_samples: int | None, lanes: Lanes) -> SampleOrder:
    group_samples = _samples_within(source, _UNSHUFFLED_GROUP_BYTES, _MAX_UNSHUFFLED_GROUP_SAMPLES)
    return SampleOrder(
        source.block_sizes, seed=seed, window_samples=window_samples, group_samples=group_samples, lanes=lanes
    )


def _hand_over_with(transform: Callable[[Batch], object] | None) -> Callable[[Batch], object]:
    """What turns a batch into the item of iteration. Refers to the transform alone, never to the loader."""
    if transform is None:
        return lambda batch: batch
    return lambda batch: (batch, transform(batch))


def _with_plan(hand_over: Callable[[Batch], Item], look: LooksAhead | None) -> Callable[[Batch], tuple[Item, Any]]:
    """The item, and what is known of it beforehand. Refers to these alone, never to the loader."""
    if look is None:
        return lambda batch: (hand_over(batch), ())
    return lambda batch: (hand_over(batch), look.plan(batch))


def _counting_from(
    origin: int, batch_size: int, hand_over: Callable[[Batch], tuple[Item, Any]]
) -> Callable[[Batch], tuple[Item, Any]]:
    """The same for batches whose positions are counted from the first sample of these data."""
    if origin == 0:
        return hand_over

    def moved(batch: Batch) -> tuple[Item, Any]:
        first = origin + batch.first_sample
        return hand_over(replace(batch, first_sample=first, number=first // batch_size + 1))

    return moved
