"""The order of the samples in the endless stream: epoch after epoch, each shuffled anew, in bounded memory.

- In one lane, an epoch permutes the source's blocks, lines the permuted blocks up, and cuts the line into groups of
  about ``window_samples`` samples (a group ends with the block that crosses the boundary). Within a group samples are
  permuted. So a reader holds one group at a time, and neighbours in a file end up apart in the stream.
- Everything is a function of (block sizes, window, seed, epoch, lanes, lane, group). Random keys are the raw output of
  Philox4x64, which NumPy keeps stable (the methods of its Generator it does not), and a permutation is the stable
  argsort of such keys.
- Where the stream has L lanes (lanes.py), an epoch's line of blocks is cut into L segments, each as long as the epoch
  has positions of the lane, and each lane has groups of its own, of about ``window_samples / L`` samples. So whoever
  needs some of the lanes needs their share of the epoch's blocks, and those in which the segments end. (Were groups cut
  first and shared out then, it would be those of each group, which may have but four.) A batch has its samples from L
  groups of a block or more each, as it has from one group of as many blocks.
- Odd lanes take their segment's blocks from the far end. So two lanes need a block that they share at about the same
  time, and whoever reads both can decode it once.
- ``window_samples=None``: no shuffle; blocks in their own order, in groups of about ``group_samples`` samples, which
  change nothing but how much is decoded at once. The order is the file's, so there are no lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.data.lanes import Lanes

_BLOCKS_STREAM = 0
_FIRST_GROUP_STREAM = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples ``[begin, end)`` of a block, of which there is at least one."""

    block: int
    begin: int
    end: int

    @property
    def num_samples(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """One group of one lane in one epoch, and its place in the endless lane: the lane's positions ``[start, end)``."""

    epoch: int
    lane: int
    index: int
    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def num_samples(self) -> int:
        return self.end - self.start


class SampleOrder:
    """Which sample lies at which position of the stream; see the module's text."""

    def __init__(
        self,
        block_sizes: NDArray[np.int64],
        *,
        seed: int,
        window_samples: int | None,
        group_samples: int = 16_384,
        lanes: Lanes | None = None,
    ) -> None:
        self.block_sizes = block_sizes
        self.lanes = Lanes() if window_samples is None or lanes is None else lanes
        self._seed = seed
        self._is_shuffled = window_samples is not None
        self._group_samples = (
            group_samples if window_samples is None else max(1, window_samples // self.lanes.num_lanes)
        )
        self.num_samples = int(block_sizes.sum())
        """Samples in one epoch."""

    def groups_from(self, position: int, lane: int = 0) -> Iterator[GroupSpan]:
        """The groups of a lane in order, endless, from the one that holds the lane's ``position``."""
        epoch = int(self.lanes.stream_positions(lane, position, position + 1)[0]) // self.num_samples
        while True:
            yield from self._epoch_groups(epoch, lane, position)
            epoch += 1

    def positions(self, span: GroupSpan) -> NDArray[np.int64]:
        """Where the group's samples are in the stream, in order."""
        return self.lanes.stream_positions(span.lane, span.start, span.end)

    def permutation(self, span: GroupSpan) -> NDArray[np.intp] | None:
        """The order of the group's samples: indices into its pieces' samples laid end to end; None: as they lie."""
        if not self._is_shuffled:
            return None
        return _permutation(self._seed, span.epoch, _FIRST_GROUP_STREAM + span.index, span.num_samples, span.lane)

    def _epoch_groups(self, epoch: int, lane: int, position: int) -> Iterator[GroupSpan]:
        """The epoch's groups of a lane but those that end at or before the lane's ``position``."""
        base, pieces = self._segment(epoch, lane)
        ends = np.cumsum(pieces[2] - pieces[1])
        starts = ends - (pieces[2] - pieces[1])
        firsts = np.flatnonzero(np.diff(starts // self._group_samples, prepend=-1))
        lasts = np.append(firsts, starts.shape[0])[1:]
        done = int(np.searchsorted(starts[firsts], position - base, side="right")) - 1
        for index in range(max(0, done), firsts.shape[0]):
            first, last = int(firsts[index]), int(lasts[index])
            yield GroupSpan(
                epoch=epoch,
                lane=lane,
                index=index,
                start=base + int(starts[first]),
                end=base + int(ends[last - 1]),
                pieces=tuple(map(Piece, *pieces[:, first:last].tolist())),
            )

    def _segment(self, epoch: int, lane: int) -> tuple[int, NDArray[np.int64]]:
        """The lane's position with which an epoch begins, and its pieces of the epoch's line, in the lane's order:
        int64 ``[3, num_pieces]``, blocks and where in each a piece begins and ends."""
        num_blocks = self.block_sizes.shape[0]
        blocks = (
            _permutation(self._seed, epoch, _BLOCKS_STREAM, num_blocks) if self._is_shuffled else np.arange(num_blocks)
        )
        ends = np.cumsum(self.block_sizes[blocks])
        starts = ends - self.block_sizes[blocks]
        bounds = [self.lanes.position(each, epoch * self.num_samples) for each in range(lane + 1)]
        lengths = [
            self.lanes.position(each, (epoch + 1) * self.num_samples) - bound for each, bound in enumerate(bounds)
        ]
        begin, end = sum(lengths[:-1]), sum(lengths)
        within = slice(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(starts, end, side="left")))
        if begin == end:
            within = slice(0, 0)
        pieces = np.stack(
            [blocks[within], np.maximum(begin - starts[within], 0), np.minimum(ends[within], end) - starts[within]]
        )
        return bounds[lane], pieces[:, ::-1] if lane % 2 else pieces


def _permutation(seed: int, epoch: int, stream: int, length: int, lane: int = 0) -> NDArray[np.intp]:
    """A permutation of ``range(length)`` that depends on its arguments alone."""
    # the counter's low word counts the draws; stream and lane sit two words above it, so no two streams meet
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, stream, lane], np.uint64))
    return np.argsort(bits.random_raw(length), kind="stable")
