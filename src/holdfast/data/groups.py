"""A group of samples (shuffle.py) on its way from blocks to batches.

- Of a group's blocks only those are decoded, and held, that have a sample which the reader's part of the stream needs.
- Of several blocks that fail, the first in the group is told, whichever thread came first: so a failed group is ready
  only when every block before that one is done.
- A group knows no lock: whoever changes it holds one, but for `survey` and `gathered`, which only read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.data.block import Rows, SampleBlock, SamplePool, cut_block, no_samples, pool_blocks
from holdfast.data.cut import StreamCut
from holdfast.data.shuffle import GroupSpan, Piece, SampleOrder


@dataclass(frozen=True, slots=True)
class Survey:
    """What a reader needs of a group.

    pieces: those that are decoded. mine: which of the group's positions are the reader's, ascending, from 0; None: all.
    rows: for each of these its sample, as a row of the pieces' samples laid end to end; None: as they lie.
    """

    pieces: tuple[Piece, ...]
    mine: NDArray[np.intp] | None
    rows: NDArray[np.intp] | None


def survey(order: SampleOrder, span: GroupSpan, cut: StreamCut) -> Survey:
    """What the cut needs of a group; a function of its arguments alone."""
    taken = cut.takes(order.positions(span))
    permutation = order.permutation(span)
    if taken.all():
        return Survey(span.pieces, None, permutation)
    mine = np.flatnonzero(taken)
    places = mine if permutation is None else permutation[mine]
    lengths = np.array([piece.num_samples for piece in span.pieces])
    ends = np.cumsum(lengths)
    piece_of = np.searchsorted(ends, places, side="right")
    is_needed = np.bincount(piece_of, minlength=lengths.shape[0]) > 0
    left_out_before = np.cumsum(np.where(is_needed, 0, lengths))
    pieces = tuple(piece for piece, needed in zip(span.pieces, is_needed.tolist(), strict=True) if needed)
    return Survey(pieces, mine, places - left_out_before[piece_of])


@dataclass(slots=True)
class Group:
    """A group and how far it is."""

    span: GroupSpan
    errors: dict[int, BaseException] = field(default_factory=dict)
    samples: SamplePool | None = None
    _needed: Survey | None = None
    _numbers: dict[int, int] = field(default_factory=dict)  # of the pieces, by block
    _is_claimed: list[bool] = field(default_factory=list)
    _first_unclaimed: int = 0  # or before it
    _decoded: list[SampleBlock | None] = field(default_factory=list)
    _num_claimed: int = 0
    _num_done: int = 0  # also the failed

    @property
    def is_ready(self) -> bool:
        if self.samples is not None:
            return True
        return bool(self.errors) and self.unclaimed_block() is None and self._num_done == self._num_claimed

    @property
    def error(self) -> BaseException | None:
        return self.errors[min(self.errors)] if self.errors else None

    def need(self, needed: Survey, *, num_features: int, num_dense: int) -> None:
        """Takes note of what `survey` found."""
        self._needed = needed
        self._numbers = {piece.block: number for number, piece in enumerate(needed.pieces)}
        self._is_claimed = [False] * len(needed.pieces)
        self._decoded = [None] * len(needed.pieces)
        if not needed.pieces:
            self.samples = no_samples(num_features, num_dense)

    def unclaimed_block(self) -> int | None:
        """The first block that is to be decoded and that nobody decodes. Once one failed, only those before it are."""
        if self._needed is None:
            return None
        while self._first_unclaimed < len(self._is_claimed) and self._is_claimed[self._first_unclaimed]:
            self._first_unclaimed += 1
        if self._first_unclaimed >= self._num_wanted:
            return None
        return self._needed.pieces[self._first_unclaimed].block

    def claim(self, block: int) -> int | None:
        """The number of the block's piece, where it is to be decoded and nobody does; from now on somebody does."""
        number = self._numbers.get(block)
        if number is None or number >= self._num_wanted or self._is_claimed[number]:
            return None
        self._is_claimed[number] = True
        self._num_claimed += 1
        return number

    def take(self, number: int, decoded: SampleBlock | BaseException) -> bool:
        """Takes what became of the block of a claimed piece. Whether all that is needed is there now."""
        assert self._needed is not None
        self._num_done += 1
        if isinstance(decoded, BaseException):
            self.errors[number] = decoded
        else:
            piece = self._needed.pieces[number]
            self._decoded[number] = cut_block(decoded, piece.begin, piece.end)
        return not self.errors and self._num_done == len(self._decoded)

    def gathered(self) -> SamplePool:
        """All that was decoded, one after the other."""
        return pool_blocks([block for block in self._decoded if block is not None])

    def finish(self, samples: SamplePool) -> None:
        """Takes what `gathered` gave; the blocks are let go."""
        self._decoded = []
        self.samples = samples

    def piece(self, begin: int, end: int) -> tuple[SamplePool, Rows]:
        """The samples at the lane's positions ``[begin, end)``, consecutive in the stream and all of them the reader's,
        cut to this group."""
        assert self.samples is not None and self._needed is not None
        rows = self._needed.rows
        first, last = max(begin, self.span.start) - self.span.start, min(end, self.span.end) - self.span.start
        if self._needed.mine is not None:
            first, last = np.searchsorted(self._needed.mine, (first, last)).tolist()
        return self.samples, slice(first, last) if rows is None else rows[first:last]

    @property
    def _num_wanted(self) -> int:
        """How many pieces are to be decoded, the first of them."""
        return min(self.errors, default=len(self._is_claimed))
