"""Random numbers by counter: a pure function of (key, counter), in any order, at any time, on any number of threads.

A number is ``mix64(key + counter * golden)``: SplitMix64's sequence, addressed at random. A key names a stream, such as
(seed, what is drawn, table); the streams of two keys begin 2**64 golden steps apart at random.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.data.hashing import mix64, mix64_int

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream_key(seed: int, *path: int) -> int:
    """The key of the stream that ``seed`` and the numbers of ``path`` name; in [0, 2**64)."""
    key = mix64_int(seed + _GOLDEN)
    for part in path:
        key = mix64_int(key + (part + 1) * _GOLDEN)
    return key


def random_bits(key: int, begin: int, count: int) -> NDArray[np.uint64]:
    """The stream's numbers ``[begin, begin + count)``, uint64 ``[count]``."""
    start = (key + begin * _GOLDEN) & _MASK
    states = np.arange(count, dtype=np.uint64)
    states *= np.uint64(_GOLDEN)
    states += np.uint64(start)
    return mix64(states)


def uniforms(key: int, begin: int, count: int) -> NDArray[np.float64]:
    """The same numbers as multiples of 2**-53 in [0, 1), float64 ``[count]``."""
    return np.asarray((random_bits(key, begin, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53)
