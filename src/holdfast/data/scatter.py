"""A fixed permutation of ``range(size)`` that needs no table: which row of an embedding table a popularity rank means.

It permutes the next power of two by multiplications with odd numbers and shifts, both bijections there, and applies
itself again to what falls outside of ``range(size)`` until it falls inside (cycle walking), which keeps it a bijection.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.data.counter import stream_key

_NUM_ROUNDS = 3


class Scatter:
    """The permutation that (size, key) names. size: 1 to 2**62."""

    def __init__(self, *, size: int, key: int) -> None:
        self._size = size
        num_bits = max(1, (size - 1).bit_length())
        self._mask = np.uint64((1 << num_bits) - 1)
        self._shift = np.uint64((num_bits + 1) // 2)
        self._multipliers = [np.uint64(stream_key(key, 2 * number) | 1) for number in range(_NUM_ROUNDS)]
        self._addends = [np.uint64(stream_key(key, 2 * number + 1)) for number in range(_NUM_ROUNDS)]

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each index in ``[0, size)`` goes; int64 of the same shape."""
        if self._size == 1:
            return np.zeros_like(indices)
        flat = self._permute(indices.ravel().view(np.uint64))
        outside = np.flatnonzero(flat >= np.uint64(self._size))
        while outside.size:
            again = self._permute(flat[outside])
            flat[outside] = again
            outside = outside[again >= np.uint64(self._size)]
        return flat.view(np.int64).reshape(indices.shape)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for multiplier, addend in zip(self._multipliers, self._addends, strict=True):
            numbers = numbers * multiplier
            numbers += addend
            numbers &= self._mask
            numbers ^= numbers >> self._shift
        return numbers
