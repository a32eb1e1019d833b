"""What a cache of rows misses, simulated over a stream of ids.

A batch is looked up at once: its misses are its different rows that were not there before it. Ids are those of the
made-up data (Zipf's law; the stream of `SyntheticSource`, without the permutation that says which row a rank means),
drawn as a profile's counts say, or those of a run, replayed.

- *static*: the rows that are asked for most, over all tables, and never another.
- *lru*: a batch's rows all come in, and those go that were unused for longest.
- *look_forward*: ScratchPipe's scratchpad (Kwon and Rhu, ISCA 2022). Of the stages plan, collect, exchange, insert and
  train, each works for another batch, so no row may go that one of the three batches between plan and train needs, nor
  one of the two that will have collected from the tables before the row is back there. Beyond that it forgets as lru
  does. Training never misses; what is counted are the rows that have to be fetched.

Approximations, all of them tested against a plain simulation:
- Of a group of tables alike, one is drawn; the others behave like it.
- Of more than 2^18 rows, one in k is followed, evenly spaced over the ranks, in a cache of 1/k of the size. (SHARDS,
  Waldspurger et al., FAST 2015, samples rows as well, at random.) How many misses are followed decides the noise: some
  per cent where few draws touch many rows.
- The stream has about one and a half million draws, and two batches at least (where a batch has millions of ids, that
  takes seconds). It does not warm the cache up: rows were last used as long ago as in steady state, which for
  independent draws is exponentially distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.counter import stream_key, uniforms
from holdfast.data.zipf import ZipfLaw
from holdfast.errors import ConfigError
from holdfast_lab.sim.model import Model
from holdfast_lab.sim.replay import Replay, ReplayedModel
from holdfast_lab.sim.system import Cache

_SEED = 0
_IDS_STREAM, _AGES_STREAM, _OFFSETS_STREAM = 1, 6, 7  # the first is that of data/synthetic.py
_MOST_ROWS = 1 << 18
_MOST_DRAWS = 1_500_000
_FEWEST_BATCHES, _MOST_BATCHES = 2, 1000
_RAREST = 1e-300  # a rate of rows that a profile has never seen
_BATCHES_BEFORE = 3  # in collect, exchange and insert while one is planned
_BATCHES_AHEAD = 2  # that collect before a row that left now is written back


def missed_rows_per_batch(cache: Cache, model: Model) -> float:
    """Rows that a batch finds missing, in the mean; with look_forward those that have to be fetched for it.

    Raises ConfigError where the cache's share is none, or its scratchpad too small for the batches in the pipeline.
    """
    if not 0.0 <= cache.share <= 1.0:
        raise ConfigError(f"cache.share = {cache.share}; it is a part of all rows, from 0 to 1")
    if isinstance(model, ReplayedModel):
        return _missed_in_replay(cache, model.replay)
    tables = tuple(
        _Tables(
            count=group.count,
            rows=max(1, round(group.rows)),
            draws=max(1, round(model.batch_size * group.lookups)),
            hottest=group.hottest,
        )
        for group in model.tables
    )
    return _missed_rows(cache.policy, cache.share, model.zipf_exponent, tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """`count` tables alike; draws: of a table and batch."""

    count: int
    rows: int
    draws: int
    hottest: tuple[tuple[float, float], ...] = ()


class _LadderLaw:
    """Ranks from 1, hottest first, of which those between two rungs are alike; as ZipfLaw."""

    def __init__(self, hottest: Sequence[tuple[float, float]]) -> None:
        self._ends, self._shares = np.array([(0.0, 0.0), *hottest]).T

    def ranks(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        places = np.interp(uniforms, self._shares, self._ends)
        return np.asarray(1 + np.minimum(places, self._ends[-1] - 1), np.int64)

    def probability(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        rates: NDArray[np.float64] = np.diff(self._shares) / np.diff(self._ends)
        return rates[np.searchsorted(self._ends, ranks) - 1]


@lru_cache(maxsize=256)
def _missed_rows(
    policy: Literal["static", "lru", "look_forward"], share: float, exponent: float, tables: tuple[_Tables, ...]
) -> float:
    ahead = _BATCHES_AHEAD if policy == "look_forward" else 0
    sample = _Sample(tables, exponent)
    draws = sum(group.draws for group in tables)
    counted = min(_MOST_BATCHES, max(_FEWEST_BATCHES, _MOST_DRAWS // draws))
    settling = _BATCHES_BEFORE + ahead if ahead else 0  # until the window has gone over every row that is there
    batches = sample.batches(settling + counted + ahead)
    capacity = round(share * sample.num_rows)
    if policy == "static":
        missed = _missed_of_hottest(sample.rates, capacity, batches)
    else:
        recency = _Recency(sample.last_used_first(), capacity, batches)
        if ahead:
            _check_scratchpad(batches, capacity, sample.num_rows)
        missed = [recency.step(number, ahead) for number in range(settling + counted)]
    return sample.one_in * float(np.mean(missed[settling:]))


def _missed_in_replay(cache: Cache, replay: Replay) -> float:
    ids = replay.rows_of_batches()
    batches = [_in_order_of_last_use(rows) for rows in ids]
    capacity = round(cache.share * replay.num_rows)
    settling = len(batches) // 2
    if cache.policy == "static":
        asked = np.bincount(np.concatenate(ids[:settling]), minlength=replay.num_rows)
        return float(np.mean(_missed_of_hottest(asked, capacity, batches[settling:])))
    ahead = _BATCHES_AHEAD if cache.policy == "look_forward" else 0
    if ahead:
        _check_scratchpad(batches, capacity, replay.num_rows)
    recency = _Recency(np.arange(replay.num_rows), capacity, batches, is_empty=True)
    missed = [recency.step(number, ahead) for number in range(len(batches) - ahead)]
    return float(np.mean(missed[settling:]))


def _missed_of_hottest(
    asked: NDArray[np.float64] | NDArray[np.int64], capacity: int, batches: Sequence[NDArray[np.int64]]
) -> list[int]:
    """Of each batch, where the rows that are asked for most are in the cache. asked: how often, of each row."""
    kept = np.zeros(asked.size, np.bool_)
    kept[np.argsort(-asked, kind="stable")[:capacity]] = True
    return [int(np.count_nonzero(~kept[rows])) for rows in batches]


class _Sample:
    """The rows that are followed, numbered over all tables, each of which stands for `one_in`.

    rates: float64 [num_rows], draws of a row in a batch, as a rate of Poisson's that misses it as often.
    """

    def __init__(self, tables: Sequence[_Tables], exponent: float) -> None:
        all_rows = sum(group.count * group.rows for group in tables)
        self.one_in = float(max(*(group.count for group in tables), 1, -(-all_rows // _MOST_ROWS)))
        self._tables = tables
        self._laws = [
            _LadderLaw(group.hottest) if group.hottest else ZipfLaw(num_ranks=group.rows, exponent=exponent)
            for group in tables
        ]
        self._steps = [self.one_in / group.count for group in tables]
        self._offsets = uniforms(stream_key(_SEED, _OFFSETS_STREAM), 0, len(tables))
        self._kept = [self._kept_ranks(number) for number in range(len(tables))]
        self._firsts = np.concatenate([[0], np.cumsum([kept.size for kept in self._kept])])
        self.num_rows = int(self._firsts[-1])
        self.rates = np.concatenate([self._rates(number) for number in range(len(tables))])

    def batches(self, count: int) -> list[NDArray[np.int64]]:
        """The different rows of each of so many batches, int64, in the order of their last use."""
        drawn = [self._drawn(number, count) for number in range(len(self._tables))]
        batch = np.concatenate([of_table for of_table, _ in drawn])
        rows = np.concatenate([of_table for _, of_table in drawn])
        rows = rows[np.argsort(batch, kind="stable")]
        ends = np.cumsum(np.bincount(batch, minlength=count))
        return [_in_order_of_last_use(part) for part in np.split(rows, ends[:-1])]

    def last_used_first(self) -> NDArray[np.int64]:
        """All rows by how long ago they were last used, before the first batch."""
        numbers = uniforms(stream_key(_SEED, _AGES_STREAM), 0, self.num_rows)
        ages: NDArray[np.float64] = -np.log1p(-numbers) / np.maximum(self.rates, _RAREST)
        return np.asarray(np.argsort(ages, kind="stable"), np.int64)

    def _kept_ranks(self, number: int) -> NDArray[np.int64]:
        """From 0, ascending: one in `step`, from a random offset on."""
        rows, step = self._tables[number].rows, self._steps[number]
        if step == 1.0:
            return np.arange(rows)
        kept = np.floor((np.arange(int(rows / step) + 1) + self._offsets[number]) * step).astype(np.int64)
        return np.asarray(kept[kept < rows], np.int64)

    def _rates(self, number: int) -> NDArray[np.float64]:
        probabilities = self._laws[number].probability(self._kept[number] + 1)
        return np.asarray(self._tables[number].draws * -np.log1p(-np.minimum(probabilities, 1 - 1e-12)))

    def _drawn(self, number: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Batch and row of every draw of one table that hits a row which is followed."""
        draws, kept, step = self._tables[number].draws, self._kept[number], self._steps[number]
        key = stream_key(_SEED, _IDS_STREAM, number)
        ranks = self._laws[number].ranks(uniforms(key, 0, count * draws)) - 1
        batch = np.arange(count * draws) // draws
        if step == 1.0:
            return batch, self._firsts[number] + ranks
        if kept.size == 0:
            return batch[:0], ranks[:0]
        place = np.ceil(ranks / step - self._offsets[number]).astype(np.int64)
        place = np.clip(place, 0, kept.size - 1)
        is_followed = kept[place] == ranks
        return batch[is_followed], self._firsts[number] + place[is_followed]


class _Recency:
    """A cache that forgets what was unused for longest. A log holds the uses, oldest first; one that is not the last of
    its row is stale."""

    def __init__(
        self,
        last_used_first: NDArray[np.int64],
        capacity: int,
        batches: Sequence[NDArray[np.int64]],
        *,
        is_empty: bool = False,
    ) -> None:
        """last_used_first: all rows, of which as many as there is room for are there, unless it begins empty."""
        self._capacity = capacity
        self._batches = batches
        there = last_used_first[: 0 if is_empty else capacity][::-1]
        self._log = np.empty(capacity + 2 * sum(rows.size for rows in batches), np.int64)
        self._last_use = np.full(last_used_first.size, -1)  # a place in the log; -1: not in the cache
        self._head = self._tail = self._num_rows = 0
        self._use(there)
        self._num_rows = there.size

    def step(self, number: int, ahead: int) -> int:
        """Takes the batch in, and gives how many of its rows were not there. With `ahead`, what that many batches
        later will need, and is there, counts as used now."""
        rows = self._batches[number]
        missed = int(np.count_nonzero(self._last_use[rows] < 0))
        if ahead:
            coming = self._batches[number + ahead]
            self._use(coming[self._last_use[coming] >= 0])
        self._use(rows)
        self._num_rows += missed
        self._forget(self._num_rows - self._capacity)
        return missed

    def _use(self, rows: NDArray[np.int64]) -> None:
        places = np.arange(self._tail, self._tail + rows.size)
        self._log[places] = rows
        self._last_use[rows] = places
        self._tail += rows.size

    def _forget(self, count: int) -> None:
        while count > 0:
            places = np.arange(self._head, min(self._tail, self._head + max(64, 2 * count)))
            rows = self._log[places]
            gone = np.flatnonzero(self._last_use[rows] == places)[:count]
            self._last_use[rows[gone]] = -1
            self._head = int(places[gone[-1]] if gone.size == count else places[-1]) + 1
            self._num_rows -= gone.size
            count -= gone.size


def _in_order_of_last_use(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each row once."""
    different, from_the_end = np.unique(rows[::-1], return_index=True)
    return different[np.argsort(-from_the_end, kind="stable")]


def _check_scratchpad(batches: Sequence[NDArray[np.int64]], capacity: int, num_rows: int) -> None:
    """Raises ConfigError where the rows of a window of batches do not fit."""
    width = _BATCHES_BEFORE + 1 + _BATCHES_AHEAD
    needed = max(
        np.unique(np.concatenate(batches[first : first + width])).size
        for first in range(max(1, min(len(batches) - width, 16)))
    )
    if needed > capacity:
        raise ConfigError(
            f"cache.share = {capacity / num_rows:.3g}: a scratchpad that looks forward holds the rows of {width} "
            f"batches, here {needed / num_rows:.3g} of all rows; make it at least that, or train smaller batches"
        )
