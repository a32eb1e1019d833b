"""How well a model is predicted that was not fitted: each is left out once, and its bars are predicted with a band.

A band holds what a prediction could be wrong by, of three kinds: parameters that the fit leaves open; what is assumed
beside them, of which every alternative is fitted as well and counts by its evidence (Laplace); and what all of them
leave out, the discrepancy. That is estimated without the model that is left out: of the other three, two are fitted and
the third is predicted, in every way, and what these predictions are wrong by beyond what their parameters leave open is
its scale (maximum likelihood), of the host's system and of those near memory separately. Three models say little of a
scale: so the discrepancy has Student's distribution with as many degrees of freedom. What is predicted are bars as they
were read, so a band holds the reading's own deviation, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from holdfast_lab.sim.calibration import Fit, Quantity, Target, Vector, predict, refit, slopes_at
from holdfast_lab.sim.facts import BAR_SIGMA, HOST, Alternative, Facts, targets_of
from holdfast_lab.sim.library import Library

AS_DESCRIBED = Alternative(title="as described")
_ROUNDS = 3
_ENOUGH_GAIN = 0.5  # of the sum of squares, for another round
_DRAWS = 20_000
_BAND = (0.05, 0.95)
_SCALES = np.geomspace(0.005, 1.0, 107)  # that a discrepancy may have, by steps of a twentieth


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A model left out. milliseconds, spread [systems]: of its bars, and the deviation of their logarithms that the
    parameters leave. errors [fitted bars]: of what was fitted, logarithms, with the systems' names. penalty: the sum of
    the parameters' squares; log_volume: of the region."""

    model: str
    z: tuple[float, ...]
    milliseconds: tuple[float, ...]
    spread: tuple[float, ...]
    errors: tuple[float, ...]
    error_systems: tuple[str, ...]
    penalty: float
    log_volume: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model predicted from two others; the fourth, `unused`, was not seen. errors, spread [systems]: of logarithms,
    what they are wrong by and the deviation that the parameters leave."""

    predicted: str
    unused: str
    errors: Vector
    spread: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """One set of assumptions, fitted to all models, and to all but one in turn."""

    alternative: Alternative
    fit: Fit
    folds: tuple[Fold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    low: float
    high: float


def structure_of(library: Library, facts: Facts, alternative: Alternative, z: Sequence[float]) -> Structure:
    """z: of a fit to all models under assumptions that are not far away."""
    free = [replace(each, median=alternative.medians.get(each.name, each.median)) for each in facts.free]
    targets = targets_of(facts, facts.models)
    changed = alternative.library(library)
    found = refit(changed, free, targets, z, slopes_at(changed, free, targets, z))
    for _ in range(_ROUNDS - 1):
        nearer = refit(changed, free, targets, found.z, slopes_at(changed, free, targets, found.z))
        gained, found = found.cost - nearer.cost, nearer
        if gained < _ENOUGH_GAIN:
            break
    folds = tuple(_fold(changed, facts, found, targets, model) for model in facts.models)
    return Structure(alternative=alternative, fit=found, folds=folds)


def trials_of(library: Library, facts: Facts, found: Fit) -> tuple[Trial, ...]:
    """Every two models fitted. found: the fit to all."""
    targets = targets_of(facts, facts.models)
    trials = []
    for pair in combinations(facts.models, 2):
        fitted = _without(library, found, targets, pair)
        for predicted, unused in (pair, pair[::-1]):
            errors = _log_errors(facts, fitted.library, predicted)
            spread = _spread(facts, found, fitted, targets, predicted)
            trials.append(Trial(predicted=predicted, unused=unused, errors=errors, spread=spread))
    return tuple(trials)


def bands_of(
    facts: Facts, structures: Sequence[Structure], trials: Sequence[Trial], *, seed: int
) -> dict[tuple[str, str], Band]:
    """By system and model, milliseconds: where 90 % of the predictions of bars lie whose model is left out."""
    random = np.random.default_rng(seed)
    bands = {}
    for number, model in enumerate(facts.models):
        scales = _discrepancies(facts, trials, model)
        folds = [structure.folds[number] for structure in structures]
        weights = _weights(folds, scales)
        chosen = random.choice(len(folds), size=_DRAWS, p=weights)
        for place, system in enumerate(facts.systems):
            centres = np.log([fold.milliseconds[place] for fold in folds])[chosen]
            spreads = np.array([fold.spread[place] for fold in folds])[chosen]
            left_out = scales[system] * random.standard_t(len(facts.models) - 1, size=_DRAWS)
            spreads = np.hypot(spreads, BAR_SIGMA)
            drawn = np.exp(centres + spreads * random.standard_normal(_DRAWS) + left_out)
            low, high = np.quantile(drawn, _BAND)
            bands[system, model] = Band(low=float(low), high=float(high))
    return bands


def weights_of(facts: Facts, structures: Sequence[Structure], trials: Sequence[Trial], model: str) -> dict[str, float]:
    """What each structure counts in the bands of a model that is left out, 1 in all."""
    folds = [structure.folds[facts.models.index(model)] for structure in structures]
    weights = _weights(folds, _discrepancies(facts, trials, model))
    return {structure.alternative.title: float(w) for structure, w in zip(structures, weights, strict=True)}


def _fold(library: Library, facts: Facts, found: Fit, targets: Sequence[Target], model: str) -> Fold:
    fitted = _without(library, found, targets, [model])
    bars = [Quantity(system=system, model=model) for system in facts.systems]
    spread = _spread(facts, found, fitted, targets, model)
    trained = [each for each in facts.models if each != model]
    errors = np.concatenate([_log_errors(facts, fitted.library, each) for each in trained])
    return Fold(
        model=model,
        z=fitted.z,
        milliseconds=tuple(float(each) for each in predict(fitted.library, bars) * 1e3),
        spread=tuple(float(each) for each in spread),
        errors=tuple(float(each) for each in errors),
        error_systems=facts.systems * len(trained),
        penalty=float(np.sum(np.square(fitted.z))),
        log_volume=0.5 * float(np.linalg.slogdet(fitted.covariance)[1]),
    )


def _without(library: Library, found: Fit, targets: Sequence[Target], models: Sequence[str]) -> Fit:
    kept = [number for number, target in enumerate(targets) if target.quantity.model not in models]
    return refit(library, found.free, [targets[number] for number in kept], found.z, found.slopes[kept])


def _spread(facts: Facts, found: Fit, fitted: Fit, targets: Sequence[Target], model: str) -> Vector:
    """[systems]: of a model's bars, by the slopes of the fit to all and what another leaves open."""
    bars = [Quantity(system=system, model=model) for system in facts.systems]
    slopes = found.slopes[[number for number, target in enumerate(targets) if target.quantity in bars]]
    return np.asarray(np.sqrt(np.einsum("ij,jk,ik->i", slopes, fitted.covariance, slopes)))


def _log_errors(facts: Facts, library: Library, model: str) -> Vector:
    """[systems]"""
    seconds = predict(library, [Quantity(system=system, model=model) for system in facts.systems])
    bars_ms = [facts.batch_ms[system][model] for system in facts.systems]
    return np.asarray(np.log(seconds * 1e3 / bars_ms))


def _discrepancies(facts: Facts, trials: Sequence[Trial], left_out: str) -> dict[str, float]:
    """Of each system, a deviation of logarithms, from predictions that never saw the model that is left out."""
    blind = [trial for trial in trials if trial.unused == left_out]
    errors, spreads = (np.array([getattr(trial, name) for trial in blind]) for name in ("errors", "spread"))
    is_host = np.array([system == HOST for system in facts.systems])
    of_host, near = (_discrepancy(errors[:, those], spreads[:, those]) for those in (is_host, ~is_host))
    return {system: of_host if system == HOST else near for system in facts.systems}


def _discrepancy(errors: Vector, spreads: Vector) -> float:
    """The most likely deviation, beside `spreads` and that of reading, of errors that are normal."""
    variances = _SCALES[:, None, None] ** 2 + spreads**2 + BAR_SIGMA**2
    misfits = np.sum(errors**2 / variances + np.log(variances), axis=(1, 2))
    return float(_SCALES[np.argmin(misfits)])


def _weights(folds: Sequence[Fold], scales: Mapping[str, float]) -> Vector:
    """By evidence: how well what is fitted agrees, how far from the priors, and how much room the fit leaves."""
    logs = []
    for fold in folds:
        deviations = np.hypot([scales[system] for system in fold.error_systems], BAR_SIGMA)
        misfit = float(np.sum((np.array(fold.errors) / deviations) ** 2))
        logs.append(fold.log_volume - 0.5 * (misfit + fold.penalty))
    weights = np.exp(np.array(logs) - max(logs))
    return np.asarray(weights / weights.sum())
