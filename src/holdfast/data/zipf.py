"""Zipf's law by inversion: one uniform number per draw, whatever the table's size, and the same rank for the same
number.

Rank ``r`` of ``num_ranks`` has probability proportional to ``r ** -exponent``. The first ranks are drawn from their
exact cumulative sums. For a rank beyond, ``r ** -exponent`` is replaced by the integral of ``x ** -exponent`` over ``[r
- 1/2, r + 1/2]``, which inverts in closed form; its relative error is ``exponent * (exponent + 1) / (24 * r**2)``,
below 2e-6 beyond rank 256 for exponents up to 1.2, far below what any number of samples in reach could tell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_HEAD_RANKS = 256
_NUM_GUIDES = 8192


class ZipfLaw:
    """``num_ranks`` >= 1 ranks from 1; ``exponent`` >= 0 (0: uniform)."""

    def __init__(self, *, num_ranks: int, exponent: float) -> None:
        self.num_ranks = num_ranks
        self.exponent = exponent
        self._num_head = min(num_ranks, _HEAD_RANKS)
        head_masses = np.arange(1, self._num_head + 1, dtype=np.float64) ** -exponent
        self._head_cumulative = np.cumsum(head_masses)
        self._head_mass = float(self._head_cumulative[-1])
        self._tail_begin = self._antiderivative(np.array([self._num_head + 0.5]))[0]
        self._tail_mass = 0.0
        if num_ranks > self._num_head:
            self._tail_mass = float(self._antiderivative(np.array([num_ranks + 0.5]))[0] - self._tail_begin)
        # a guide table: the rank at the begin of each of many equal slices of the mass, and whether a slice holds more
        # than
        # one boundary between ranks; a binary search of random numbers costs several times as much
        slice_begins = np.arange(_NUM_GUIDES + 1) * ((self._head_mass + self._tail_mass) / _NUM_GUIDES)
        guides = np.searchsorted(self._head_cumulative, slice_begins, side="right")
        self._guides = guides[:-1]
        self._slice_is_wide = np.diff(guides) > 1
        self._rank_ends = np.append(self._head_cumulative, np.inf)

    def ranks(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """The ranks, int64 in [1, num_ranks], of uniform numbers in [0, 1); same shape; rises with the number."""
        masses = uniforms.ravel() * (self._head_mass + self._tail_mass)
        slices = (uniforms.ravel() * _NUM_GUIDES).astype(np.intp)
        ranks = self._guides[slices] + 1
        ranks += masses >= self._rank_ends[ranks - 1]
        in_wide = np.flatnonzero(self._slice_is_wide[slices])
        if in_wide.size:
            ranks[in_wide] = np.searchsorted(self._head_cumulative, masses[in_wide], side="right") + 1
        in_tail = np.flatnonzero(ranks > self._num_head)
        if in_tail.size:
            tail = self._inverse(masses[in_tail] - self._head_mass + self._tail_begin)
            # at the two ends rounding may step over by one
            ranks[in_tail] = np.clip(np.rint(tail), min(self._num_head + 1, self.num_ranks), self.num_ranks)
        return ranks.reshape(uniforms.shape)

    def probability(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """The law's probability of each rank, float64."""
        masses = ranks.astype(np.float64) ** -self.exponent
        return np.asarray(masses / (self._head_mass + self._tail_mass))

    def _antiderivative(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """The integral of ``x ** -exponent`` from 1; by expm1, so that exponents near 1 lose no digits."""
        power = 1.0 - self.exponent
        if power == 0.0:
            return np.log(points)
        return np.asarray(np.expm1(power * np.log(points)) / power)

    def _inverse(self, integrals: NDArray[np.float64]) -> NDArray[np.float64]:
        power = 1.0 - self.exponent
        if power == 0.0:
            return np.exp(integrals)
        return np.asarray(np.exp(np.log1p(power * integrals) / power))
