"""The planted click model of the synthetic data: what a recommendation model is meant to find in it.

A sample's raw score is the sum of three parts, each of about the stated share of the variance:

- ids (55%): every id has an effect, drawn by hash; a bag's effect is the sum over its ids, divided by sqrt(lookups);
- dense (20%): a linear function of ``log1p(count)``;
- pairs (25%): every id also has a hidden trait; the bags' traits of feature pairs (0, 1), (2, 3)... are multiplied,
  which a dot product of embeddings can express and a sum cannot.

Effects and traits fade with the id's popularity rank as ``min(1, sqrt(100 / rank))``: rare ids, which no model sees
often enough to learn, matter little. The click probability is ``sigmoid(intercept + scale * score)``; the synthetic
source sets the two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.data.counter import stream_key, uniforms
from holdfast.data.hashing import mix64

_IDS_SHARE, _DENSE_SHARE, _PAIRS_SHARE = 0.55, 0.20, 0.25
_FULL_EFFECT_RANKS = 100.0
_MAX_PAIRS = 8
_DENSE_LOG_MEAN, _DENSE_LOG_STD = 2.0, 1.79
_EFFECT_STREAM, _DENSE_STREAM = 1, 2


class PlantedModel:
    """Raw scores of samples; a function of (seed, num_dense, num_features) and of what it is given."""

    def __init__(self, *, seed: int, num_dense: int, num_features: int) -> None:
        self._effect_keys = [np.uint64(stream_key(seed, _EFFECT_STREAM, number)) for number in range(num_features)]
        weights = 2.0 * uniforms(stream_key(seed, _DENSE_STREAM), 0, num_dense) - 1.0
        norm = float(np.sqrt(np.square(weights).sum()))
        self._dense_weights = weights * (np.sqrt(_DENSE_SHARE) / norm if norm else 0.0)
        self._num_pairs = min(num_features // 2, _MAX_PAIRS)

    def scores(
        self,
        ids: Sequence[NDArray[np.int64]],
        ranks: Sequence[NDArray[np.int64]],
        dense_logs: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Scores, float64 ``[n]``. ids and popularity ranks (from 1): per feature ``[n, L]``; dense_logs: ``[n,
        num_dense]``."""
        scores = np.zeros(dense_logs.shape[0])
        # column by column: the order of a matrix product's sums depends on the machine
        for column, weight in enumerate(self._dense_weights):
            scores += weight * ((dense_logs[:, column] - _DENSE_LOG_MEAN) / _DENSE_LOG_STD)
        id_weight = np.sqrt(_IDS_SHARE / max(1, len(ids)))
        pair_weight = np.sqrt(_PAIRS_SHARE / max(1, self._num_pairs))
        left_traits = scores
        for feature, (feature_ids, feature_ranks) in enumerate(zip(ids, ranks, strict=True)):
            effects, traits = self._bag_effects(feature, feature_ids, feature_ranks)
            scores += id_weight * effects
            if feature % 2 == 0:
                left_traits = traits
            elif feature // 2 < self._num_pairs:
                scores += pair_weight * (left_traits * traits)
        return scores

    def _bag_effects(
        self, feature: int, ids: NDArray[np.int64], ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Effect and trait of each sample's bag, float64 ``[n]``."""
        bits = mix64(ids.view(np.uint64) ^ self._effect_keys[feature])
        fade = np.sqrt(_FULL_EFFECT_RANKS / np.maximum(ranks, _FULL_EFFECT_RANKS))
        num_lookups = ids.shape[1]
        effects, traits = np.zeros(ids.shape[0]), np.zeros(ids.shape[0])
        effect_numbers, trait_numbers = _triangular(bits), _triangular(bits >> np.uint64(32))
        for lookup in range(num_lookups):
            effects += effect_numbers[:, lookup] * fade[:, lookup]
            traits += trait_numbers[:, lookup] * fade[:, lookup]
        return effects / np.sqrt(num_lookups), traits / np.sqrt(num_lookups)


def expected_auc(probabilities: NDArray[np.float64]) -> float:
    """The AUC that ranking samples by their true click ``probabilities`` (float64 ``[n]``) has in expectation."""
    clicks = np.sort(probabilities)
    rest = 1.0 - clicks
    rest_below = np.cumsum(rest) - rest
    # a sample makes no pair with itself
    num_pairs = clicks.sum() * rest.sum() - (clicks * rest).sum()
    return float((clicks * rest_below).sum() / num_pairs)


def _triangular(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Mean 0, variance 1: the sum of the two lowest 16-bit numbers in ``bits``."""
    low = (bits & np.uint64(0xFFFF)).astype(np.float64)
    high = ((bits >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float64)
    return np.asarray((low + high - 65535.0) * (np.sqrt(6.0) / 65536.0))
