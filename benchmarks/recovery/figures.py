"""What the measured times say: a line over the log's size, flat over the tables'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEAST_R_SQUARED = 0.95
MOST_SPREAD = 1.5  # the slowest table over the fastest, with one log


@dataclass(frozen=True, slots=True)
class Point:
    """table_bytes, log_bytes: of rows; of the log that recovery had to read. seconds: to open, one for each round."""

    table_bytes: int
    log_bytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + bytes / bytes_per_s, by least squares over the points' medians."""

    fixed_s: float
    bytes_per_s: float
    r_squared: float


def line_through(points: Sequence[Point]) -> Line:
    fit = stats.linregress([point.log_bytes for point in points], [point.median for point in points])
    return Line(float(fit.intercept), 1 / float(fit.slope), float(fit.rvalue) ** 2)


def spread(points: Sequence[Point]) -> float:
    medians = [point.median for point in points]
    return max(medians) / min(medians)
