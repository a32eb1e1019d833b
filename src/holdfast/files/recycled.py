"""Memory of megabytes that is used again.

A page that nobody had before takes longer to get than to fill, by as much as ten times where a host has to give it to a
guest. Who moves gigabytes through memory, a few megabytes at a time, is to move them through the same few.

Invariants
- A piece is an array's, and that of all views of it, for as long as one of them lives: whoever uses it knows nothing of
  its being used again.
- Finalizers take no lock: they run in whatever thread drops the last view, and may do so inside `recycled`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict, deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGE_BYTES = 2 << 20
_KEPT = 6  # of each size, free ones
_MOST_BYTES = 64 << 20  # of a piece that is kept

_free: defaultdict[int, deque[mmap.mmap]] = defaultdict(lambda: deque(maxlen=_KEPT))


def recycled(num_bytes: int) -> NDArray[np.uint8]:
    """An array of so many bytes that begins a page; what is in it is anything."""
    size = max(1, -(-num_bytes // _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES
    try:
        mapped = _free[size].pop()
    except IndexError:
        mapped = huge_pages(size)
    piece = (ctypes.c_uint8 * size).from_buffer(mapped)
    if size <= _MOST_BYTES:
        weakref.finalize(piece, _free[size].append, mapped).atexit = False
    return np.frombuffer(memoryview(piece), np.uint8, num_bytes)


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of one's own, in huge pages where the system has them; shared memory would be in small ones. Raises
    MemoryError."""
    try:
        mapped = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # which would be taken for one of a file
        raise MemoryError(f"{num_bytes:,} bytes") from error
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
