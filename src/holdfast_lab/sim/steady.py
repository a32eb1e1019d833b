"""Steady state: the batches of a schedule from which on it repeats itself.

Invariants
- A schedule is steady where all that happens over some batches happened likewise over as many before, only earlier.
  That much has to agree for as many more batches as are under way at once: then all that the future depends on agrees,
  and because nothing is drawn at random, it goes on so for ever. A period may be longer than one batch.
- The last batches never count: those that would run beside them and take devices from them are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from holdfast_lab.sim.machine import Span

_ROUNDING = 1e-10  # of the time that has passed


def steady_batches(spans: Sequence[Span]) -> range | None:
    """The last period: the fewest batches after which everything comes again. None where there is none yet, as in a
    single batch."""
    times_s = _times_by_batch(spans)
    rounding_s = _ROUNDING * float(times_s.max())
    beside = _num_beside(times_s, rounding_s)
    last = len(times_s) - 1 - beside
    for period in range(1, len(times_s)):
        first = last - period - beside + 1
        if first < period:
            return None
        later_s = times_s[first : last + 1] - times_s[first - period : last + 1 - period]
        if np.ptp(later_s) <= rounding_s:
            return range(last - period + 1, last + 1)
    return None


def _times_by_batch(spans: Sequence[Span]) -> NDArray[np.float64]:
    """[batches, 3 x stages]: when each stage was ready, began and ended."""
    ordered = sorted(spans, key=lambda span: (span.batch, span.stage))
    num_batches = ordered[-1].batch + 1
    return np.array([(s.ready_s, s.begin_s, s.end_s) for s in ordered]).reshape(num_batches, -1)


def _num_beside(times_s: NDArray[np.float64], rounding_s: float) -> int:
    """How many later batches were under way, or waited for a device, before one had ended: of all batches the most."""
    is_before_end = times_s.min(axis=1)[None, :] < times_s.max(axis=1)[:, None] - rounding_s
    return int(np.triu(is_before_end, 1).sum(axis=1).max())
