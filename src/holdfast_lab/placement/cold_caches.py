"""Caches as other work leaves them: what is timed alone and again and again finds there what it left, which a verb
between network and network never does."""

from __future__ import annotations

import numpy as np

_BYTES = 64 << 20  # more than a core's share of the last cache


class OtherWork:
    """One thread's, so that the teams of others go to sleep meanwhile, as they do beside another team's work."""

    def __init__(self) -> None:
        self._data = np.zeros(_BYTES // 8, np.int64)

    def fill_caches(self) -> None:
        self._data += 1
