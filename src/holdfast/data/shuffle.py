"""The order of the samples in the endless stream: epoch after epoch, each shuffled anew, in bounded memory.

- An epoch permutes the source's blocks, lines the permuted blocks up, and cuts the line into groups of about
  ``window_samples`` samples (a group ends with the block that crosses the boundary). Within a group samples are
  permuted. So a reader holds one group at a time, and neighbours in a file end up apart in the stream.
- Everything is a function of (block sizes, window, seed, epoch, group). Random keys are the raw output of Philox4x64,
  which NumPy keeps stable (the methods of its Generator it does not), and a permutation is the stable argsort of such
  keys.
- ``window_samples=None``: no shuffle; blocks in their own order, in groups of about ``group_samples`` samples, which
  change nothing but how much is decoded at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCKS_STREAM = 0
_FIRST_GROUP_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """One group of one epoch and its place in the endless stream: positions ``[start, end)``."""

    epoch: int
    index: int
    start: int
    end: int
    blocks: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        return self.end - self.start


class SampleOrder:
    """Which sample lies at which position of the stream; see the module's text."""

    def __init__(
        self, block_sizes: NDArray[np.int64], *, seed: int, window_samples: int | None, group_samples: int = 16_384
    ) -> None:
        self._block_sizes = block_sizes
        self._seed = seed
        self._window_samples = window_samples
        self._group_samples = group_samples if window_samples is None else window_samples
        self.num_samples = int(block_sizes.sum())
        """Samples in one epoch."""

    def groups_from(self, position: int) -> Iterator[GroupSpan]:
        """The groups of the stream in order, endless, from the one that holds ``position``."""
        epoch, offset = divmod(position, self.num_samples)
        while True:
            yield from self._epoch_groups(epoch, offset)
            epoch, offset = epoch + 1, 0

    def permutation(self, span: GroupSpan) -> NDArray[np.intp] | None:
        """The order of the group's samples: indices into its blocks' samples laid end to end; None: as they lie."""
        if self._window_samples is None:
            return None
        return _permutation(self._seed, span.epoch, _FIRST_GROUP_STREAM + span.index, span.num_samples)

    def _epoch_groups(self, epoch: int, offset: int) -> Iterator[GroupSpan]:
        num_blocks = self._block_sizes.shape[0]
        if self._window_samples is None:
            blocks = np.arange(num_blocks)
        else:
            blocks = _permutation(self._seed, epoch, _BLOCKS_STREAM, num_blocks)
        ends = np.cumsum(self._block_sizes[blocks])
        starts = ends - self._block_sizes[blocks]
        windows = starts // self._group_samples
        firsts = np.flatnonzero(np.diff(windows, prepend=-1))
        lasts = np.append(firsts[1:], num_blocks)
        base = epoch * self.num_samples
        for index in range(int(np.searchsorted(starts[firsts], offset, side="right")) - 1, firsts.shape[0]):
            first, last = int(firsts[index]), int(lasts[index])
            yield GroupSpan(
                epoch=epoch,
                index=index,
                start=base + int(starts[first]),
                end=base + int(ends[last - 1]),
                blocks=tuple(blocks[first:last].tolist()),
            )


def _permutation(seed: int, epoch: int, stream: int, length: int) -> NDArray[np.intp]:
    """A permutation of ``range(length)`` that depends on its arguments alone."""
    # the counter's low word counts the draws; the stream sits two words above it, so no two streams meet
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, stream, 0], np.uint64))
    return np.argsort(bits.random_raw(length), kind="stable")
