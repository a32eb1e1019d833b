"""Calibration: the free parameters that make the simulator agree with what was measured, and how far they are known.

Each free parameter has a prior: its logarithm is normal, about a median, with a deviation that its source justifies.
The fit is the most probable point: least squares of the measured values' relative errors and of the parameters'
distances from their priors. The region is what the fit leaves open: parameters drawn about that point as its curvature
says (Laplace), each weighed by its true probability (importance sampling), so that what was not fitted is predicted
with a band. Nothing here knows the paper: targets and priors come from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from holdfast_lab.sim.library import Library
from holdfast_lab.sim.machine import Run

_STEP = 0.02  # of standardised parameters: schedules have kinks, and this steps over narrow ones
_WIDER = 1.05  # than the curvature says, so that what is drawn covers the region's tails
_FARTHEST_Z = 6.0
_NEARLY_FARTHEST_Z = 5.9
_MOST_STEPS = 25
_SMALL_GAIN = 0.02  # of the sum of squares

Vector = NDArray[np.float64]
Map = Callable[[Callable[[Vector], tuple[float, Vector]], Iterable[Vector]], Iterable[tuple[float, Vector]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A free parameter: the library's values under `keys`, all equal. sigma: of its natural logarithm."""

    name: str
    keys: tuple[str, ...]
    median: float
    sigma: float
    source: str

    def __post_init__(self) -> None:
        for name in ("median", "sigma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be more than 0")

    def value(self, z: float) -> float:
        return float(self.median * np.exp(self.sigma * z))

    def fitted(self, z: float) -> float:
        """As it is written down: four digits."""
        return float(f"{self.value(z):.4g}")

    def z_of(self, value: float) -> float:
        """What has that value."""
        return float(np.log(value / self.median) / self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Something else assumed. values: of the library. multiples: keys whose values are that times the one at `of`."""

    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    multiples: Mapping[str, float] = field(default_factory=dict)
    of: str | None = None

    def __post_init__(self) -> None:
        if bool(self.multiples) != (self.of is not None):
            raise ValueError("multiples and of mean something only together")

    def library(self, library: Library) -> Library:
        """Raises ConfigError."""
        values = dict(self.values)
        if self.of is not None:
            values |= {key: times * library.value(self.of) for key, times in self.multiples.items()}
        return library.changed(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What is asked of a run: seconds of a batch, or of some stages of it in sum, or joules of a batch. under: what is
    assumed otherwise than the library says."""

    system: str
    model: str
    stages: tuple[str, ...] = ()
    unit: Literal["s", "J"] = "s"
    under: Variant | None = None

    @property
    def run_key(self) -> tuple[str, str, str]:
        """What is simulated for it: quantities with the same share a run."""
        return ("" if self.under is None else self.under.title, self.system, self.model)

    @property
    def name(self) -> str:
        return f"{self.system} {self.model}" + (f": {' + '.join(self.stages)}" if self.stages else "")

    def of(self, run: Run) -> float:
        if self.unit == "J":
            return run.joules_per_batch
        return sum(run.stage_s[stage] for stage in self.stages) if self.stages else run.batch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A measured quantity. sigma: relative, of its reading and of what a model leaves out."""

    quantity: Quantity
    value: float
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """z: distances from the priors' medians, in their sigmas. cost: what was made least, the sum of all squares.
    slopes [targets, parameters]: of the targets' logarithms, over z. covariance: of z, from the curvature."""

    free: tuple[Free, ...]
    z: tuple[float, ...]
    cost: float
    library: Library
    slopes: Vector
    covariance: Vector

    def with_priors(self, more: Sequence[Free]) -> Fit:
        """With parameters that no target depends on: they stay what their priors say."""
        size, num_all = len(self.z), len(self.z) + len(more)
        covariance = np.eye(num_all)
        covariance[:size, :size] = self.covariance
        return replace(
            self,
            free=(*self.free, *more),
            z=(*self.z, *(0.0 for _ in more)),
            slopes=np.pad(self.slopes, ((0, 0), (0, len(more)))),
            covariance=covariance,
        )

    @property
    def values(self) -> Mapping[str, float]:
        return {each.name: each.fitted(z) for each, z in zip(self.free, self.z, strict=True)}

    @property
    def library_values(self) -> Mapping[str, float]:
        """By key of the library."""
        return _written(self.free, self.z)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Draws z [n, parameters] with weights [n] that sum to 1, and what each predicts, [n, quantities]."""

    z: Vector
    weights: Vector
    predicted: Vector

    @property
    def effective_draws(self) -> float:
        return float(1.0 / np.sum(self.weights**2))

    def quantiles(self, values: Vector, parts: Sequence[float]) -> tuple[float, ...]:
        """Of values [n], weighted."""
        order = np.argsort(values)
        places = np.searchsorted(np.cumsum(self.weights[order]), parts)
        return tuple(float(values[order[min(place, len(values) - 1)]]) for place in places)

    def probability(self, holds: NDArray[np.bool_]) -> float:
        """holds [n]: whether it does in each draw."""
        return float(self.weights[holds].sum())


def library_at(library: Library, free: Sequence[Free], z: Sequence[float] | Vector) -> Library:
    return library.changed({key: each.value(at) for each, at in zip(free, z, strict=True) for key in each.keys})


def z_in(library: Library, free: Sequence[Free]) -> tuple[float, ...]:
    """What the library has, no farther from the priors than a fit goes."""
    found = (each.z_of(library.value(each.keys[0])) for each in free)
    return tuple(float(np.clip(z, -_NEARLY_FARTHEST_Z, _NEARLY_FARTHEST_Z)) for z in found)


def predict(library: Library, quantities: Sequence[Quantity]) -> Vector:
    variants = {each.under.title: each.under for each in quantities if each.under is not None}
    libraries = {"": library} | {title: variant.library(library) for title, variant in variants.items()}
    runs = {key: libraries[key[0]].run(key[1], key[2]) for key in dict.fromkeys(each.run_key for each in quantities)}
    return np.array([each.of(runs[each.run_key]) for each in quantities])


def fit(library: Library, free: Sequence[Free], targets: Sequence[Target], start: Sequence[float] | None = None) -> Fit:
    """The most probable parameters. start: where to begin, in z."""
    first = np.zeros(len(free)) if start is None else np.array(start)
    quantities = [target.quantity for target in targets]
    found = least_squares(
        lambda z: _residuals(predict(library_at(library, free, z), quantities), targets, z),
        first,
        diff_step=_STEP,
        xtol=1e-4,
        ftol=1e-4,
        bounds=(-_FARTHEST_Z, _FARTHEST_Z),
    )
    return Fit(
        free=tuple(free),
        z=tuple(float(z) for z in found.x),
        cost=2.0 * float(found.cost),
        library=library.changed(_written(free, found.x)),
        slopes=found.jac[: len(targets)] * np.array([target.sigma for target in targets])[:, None],
        covariance=np.linalg.inv(found.jac.T @ found.jac),
    )


def slopes_at(library: Library, free: Sequence[Free], targets: Sequence[Target], z: Sequence[float]) -> Vector:
    """[targets, parameters]: of the targets' logarithms, over z."""
    quantities = [target.quantity for target in targets]

    def logarithms(at: Vector) -> Vector:
        return np.asarray(np.log(predict(library_at(library, free, at), quantities)))

    here = logarithms(np.array(z))
    steps = np.eye(len(free)) * _STEP
    return np.stack([(logarithms(np.array(z) + step) - here) / _STEP for step in steps], axis=1)


def refit(library: Library, free: Sequence[Free], targets: Sequence[Target], z: Sequence[float], slopes: Vector) -> Fit:
    """As `fit`, from a fit to other targets or under other assumptions that is not far away: with the slopes that were
    found there, which every step corrects by what it finds (Broyden). A tenth of the runs."""
    quantities = [target.quantity for target in targets]
    jacobian = np.concatenate([slopes / np.array([target.sigma for target in targets])[:, None], np.eye(len(free))])

    def residuals(at: Vector) -> Vector:
        return _residuals(predict(library_at(library, free, at), quantities), targets, at)

    here = np.array(z)
    errors = residuals(here)
    for _ in range(_MOST_STEPS):
        whole = -np.linalg.lstsq(jacobian, errors, rcond=None)[0]
        gained = 0.0
        for part in (1.0, 0.4, 0.15):
            step = part * whole
            after = residuals(here + step)
            jacobian += np.outer(after - errors - jacobian @ step, step) / (step @ step)
            gained = float(errors @ errors - after @ after)
            if gained > 0:
                here, errors = here + step, after
                break
        if gained < _SMALL_GAIN:
            break
    return Fit(
        free=tuple(free),
        z=tuple(float(each) for each in here),
        cost=float(errors @ errors),
        library=library.changed(_written(free, here)),
        slopes=jacobian[: len(targets)] * np.array([target.sigma for target in targets])[:, None],
        covariance=np.linalg.inv(jacobian.T @ jacobian),
    )


def explore(
    library: Library,
    found: Fit,
    targets: Sequence[Target],
    asked: Sequence[Quantity],
    *,
    draws: int,
    seed: int,
    map_draws: Map = map,
) -> Region:
    """The region of parameters that agrees with `targets`, and what it predicts of `asked`. map_draws: as `map`, for
    instance that of a pool of processes."""
    normal = np.random.default_rng(seed).standard_normal((draws, len(found.z)))
    z = np.array(found.z) + normal @ (np.linalg.cholesky(found.covariance) * _WIDER).T
    assessed = list(map_draws(_Assessment(library, found.free, tuple(targets), tuple(asked)), z))
    log_weights = np.array([log_probability for log_probability, _ in assessed]) + 0.5 * np.sum(normal**2, axis=1)
    weights = np.exp(log_weights - log_weights.max())
    return Region(z=z, weights=weights / weights.sum(), predicted=np.array([predicted for _, predicted in assessed]))


@dataclass(frozen=True, slots=True)
class _Assessment:
    """Of parameters z: the logarithm of their probability, but for a constant, and what is asked."""

    library: Library
    free: tuple[Free, ...]
    targets: tuple[Target, ...]
    asked: tuple[Quantity, ...]

    def __call__(self, z: Vector) -> tuple[float, Vector]:
        quantities = [*(target.quantity for target in self.targets), *self.asked]
        predicted = predict(library_at(self.library, self.free, z), quantities)
        residuals = _residuals(predicted[: len(self.targets)], self.targets, z)
        return -0.5 * float(residuals @ residuals), predicted[len(self.targets) :]


def _written(free: Sequence[Free], z: Sequence[float] | Vector) -> dict[str, float]:
    return {key: each.fitted(at) for each, at in zip(free, z, strict=True) for key in each.keys}


def _residuals(predicted: Vector, targets: Sequence[Target], z: Any) -> Vector:
    errors = [np.log(p / t.value) / t.sigma for p, t in zip(predicted, targets, strict=True)]
    return np.concatenate([errors, z])
