"""From the values of a categorical column to ids of an embedding table. Part of what a pool's rows mean, so it never
changes.

- The **key** of a text is the XXH64 of its bytes with the seed 0, as int64 (core/base/text_hash.h).
- A category that is hashed is an int64 **value**: an integer column's own value; a hexadecimal field's number (bits 0
  to 63); the 64-bit FNV-1a of a text's bytes.
- ``mix64`` is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection on 64 bits.
- The id of a value is ``1 + mix64(value) % (num_embeddings - 1)``; id 0 stands for the missing value alone. A table of
  one row has only id 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast import _core

MISSING_ID = 0
"""Id of a missing value in a hashed feature; no value that is present gets it (where the table has two rows or
more)."""

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = np.uint64(0x100000001B3)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, element by element: uint64 to uint64, any shape, a new array."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix64_int(value: int) -> int:
    """``mix64`` of one Python integer (its low 64 bits)."""
    return int(mix64(np.array([value & 0xFFFFFFFFFFFFFFFF], np.uint64))[0])


def hash_values(
    values: NDArray[np.int64], num_embeddings: int, missing: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Ids in ``[0, num_embeddings)`` of int64 values of any shape; MISSING_ID where ``missing`` is set."""
    if num_embeddings <= 1:
        return np.zeros_like(values)
    hashed = mix64(values.view(np.uint64))
    # the remainder by division and multiplication: NumPy divides by a scalar four times as fast as it takes remainders
    buckets = np.uint64(num_embeddings - 1)
    hashed -= (hashed // buckets) * buckets
    hashed += np.uint64(1)
    ids = hashed.view(np.int64)
    if missing is not None:
        ids[missing] = MISSING_ID
    return ids


def text_values(data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """64-bit FNV-1a of ``data[starts[i] : starts[i] + lengths[i]]`` as int64 bits; the shape of ``starts`` (and
    ``lengths``)."""
    hashes = np.full(starts.size, _FNV_OFFSET, np.uint64)
    flat_starts, flat_lengths = starts.ravel(), lengths.ravel()
    active = np.flatnonzero(flat_lengths > 0)
    position = 0
    while active.size:
        hashes[active] = (hashes[active] ^ data[flat_starts[active] + position]) * _FNV_PRIME
        position += 1
        active = active[flat_lengths[active] > position]
    return hashes.view(np.int64).reshape(starts.shape)


def key_values(data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys of the texts ``data[starts[i] : starts[i] + lengths[i]]``; the shape of ``starts`` (and ``lengths``)."""
    keys = np.empty(starts.shape, np.int64)
    _core.text_keys(data, np.ascontiguousarray(starts).ravel(), np.ascontiguousarray(lengths).ravel(), keys.reshape(-1))
    return keys
