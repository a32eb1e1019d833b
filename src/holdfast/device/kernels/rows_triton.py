"""What Triton's kernels on rows share: addresses, the sums over a row's elements, the search for a position's row.

Invariants
- An address is int64 from its first multiplication on: arrays have more than 2^31 elements.
- Where the order of additions matters they are written out; tl.sum and its like have the order of the compiler.
"""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_pointers(array, row, columns, width):
    """Where elements `columns` ``[1, block]`` of rows ``[rows]`` of an array ``[…, width]`` are: ``[rows, block]``."""
    return array + (row.to(tl.int64) * width)[:, None] + columns


@triton.jit
def segment_at(starts, num_segments, num_halvings, position):
    """The last segment that begins at or before each position. starts: ascending, [num_segments + 1], from 0 on.

    num_halvings: of a search among num_segments: ceil(log2) or more.
    """
    low = tl.zeros_like(position)
    high = low + num_segments
    for _ in range(num_halvings):
        middle = low + (high - low) // 2
        is_before = tl.load(starts + middle) <= position
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _add_halves(lanes):
    """[rows, lanes] to [rows, lanes / 2]: lane i + lane (i + half)."""
    pairs = tl.reshape(lanes, (lanes.shape[0], 2, lanes.shape[1] // 2))
    lower, upper = tl.split(tl.permute(pairs, (0, 2, 1)))
    return lower + upper


@triton.jit
def fold_lanes(lanes):
    """[rows, lanes] to [rows, 1], lanes being a power of two up to 16."""
    for _ in tl.static_range(4):
        if lanes.shape[1] > 1:
            lanes = _add_halves(lanes)
    return lanes
