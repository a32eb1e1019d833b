"""TrainingCXL's evaluation, reproduced: fitted to a part of its figures, asked for the rest.

What the paper says, and what it leaves open, is data (library/paper.toml). Two of its four models and its timelines'
stages are fitted; the other two, the ratios between systems and all of the energy are predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from holdfast_lab.sim.calibration import Fit, Quantity, Region, Target, Vector, explore, fit, predict
from holdfast_lab.sim.facts import Alternative, Facts, StageFact
from holdfast_lab.sim.library import Library
from holdfast_lab.sim.machine import Run

FITTED_MODELS = ("rm1", "rm4")
_BAR_SIGMA, _STAGE_SIGMA = 0.03, 0.07  # of reading; stages are short
_HOST, _BEST = "pmem", "cxl"
_BAND = (0.05, 0.95)
_ENERGY_SYSTEMS = ("dram", "pmem", "cxl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """paper, ours: milliseconds; low, high: the region's 90 %."""

    name: str
    system: str
    model: str
    is_fitted: bool
    paper: float
    ours: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.ours / self.paper - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute relative errors: of the fitted models, of the predicted ones, of these near the memory, and the
    worst of the host's predicted ones. farthest_z: of a free parameter from its prior."""

    fitted: float
    predicted: float
    predicted_near_memory: float
    worst_predicted_host: float
    worst_stage: float
    farthest_z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A figure that the paper states, ours, and the region's 90 %."""

    name: str
    paper: float
    ours: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyRatios:
    """By one rule of counting modules. dram_order: by model, DRAM's energy over PMEM's, and the probability that it is
    on the paper's side of 1."""

    rule: str
    saved: tuple[Ratio, ...]
    dram_order: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """runs: by system and model, at the fit. draws: of the region; effective_draws: how many equal ones its weights are
    worth."""

    facts: Facts
    fit: Fit
    fit_of_all: Fit
    cells: tuple[Cell, ...]
    stages: tuple[Cell, ...]
    errors: Errors
    errors_of_all: Errors
    ratios: tuple[Ratio, ...]
    ratios_of_all: Mapping[str, float]
    energy: tuple[EnergyRatios, ...]
    alternatives: Mapping[str, Errors]
    intervals: Mapping[str, tuple[float, float]]
    runs: Mapping[tuple[str, str], Run]
    draws: int
    effective_draws: float


def reproduce(
    library: Library,
    facts: Facts,
    *,
    draws: int = 160,
    seed: int = 0,
    processes: int = 2,
    on_part: Callable[[], None] = lambda: None,
) -> Reproduction:
    """Fits, explores, and refits under every alternative. on_part: called so often as `num_parts` says."""
    asked = [*_batches(facts), *(_quantity(fact) for fact in facts.stages), *_energies(facts)]
    targets, every = targets_of(facts, FITTED_MODELS), targets_of(facts, facts.models)
    with ProcessPoolExecutor(processes) as pool:
        found = fit(library, facts.free, targets)
        on_part()
        of_all = pool.submit(fit, library, facts.free, every, found.z)
        others = {each.title: pool.submit(_errors_under, library, facts, each) for each in facts.alternatives}
        found = found.with_priors(facts.powers)
        region = explore(
            library, found, targets, asked, draws=draws, seed=seed, map_draws=partial(pool.map, chunksize=10)
        )
        on_part()
        alternatives = {}
        for title, errors in others.items():
            alternatives[title] = errors.result()
            on_part()
        fit_of_all = of_all.result()
    ours = predict(found.library, asked)
    energies = len(_batches(facts)) + len(facts.stages)  # the first of them among what is asked
    return Reproduction(
        facts=facts,
        fit=found,
        fit_of_all=fit_of_all,
        cells=_cells(facts, ours, region),
        stages=_stage_cells(facts, ours, region),
        errors=errors_of(facts, found),
        errors_of_all=errors_of(facts, fit_of_all),
        ratios=_ratios(facts, ours, region),
        ratios_of_all=time_ratios(facts, fit_of_all.library),
        energy=_energy_ratios(facts, ours[energies:], region.predicted[:, energies:], region),
        alternatives=alternatives,
        intervals=_intervals(found, region),
        runs={
            (system, model): found.library.run(system, model)
            for system in ("dram", *facts.systems)
            for model in facts.models
        },
        draws=draws,
        effective_draws=region.effective_draws,
    )


def num_parts(facts: Facts) -> int:
    return 2 + len(facts.alternatives)


def _batches(facts: Facts) -> list[Quantity]:
    return [Quantity(system=system, model=model) for system in facts.systems for model in facts.models]


def _quantity(fact: StageFact) -> Quantity:
    return Quantity(system=fact.system, model=fact.model, stages=fact.stages)


def _energies(facts: Facts) -> list[Quantity]:
    return [
        Quantity(system=system, model=model, unit="J", under=rule)
        for rule in facts.energy_rules
        for system in _ENERGY_SYSTEMS
        for model in facts.models
    ]


def targets_of(facts: Facts, models: Sequence[str]) -> list[Target]:
    bars = [
        Target(quantity=each, value=facts.batch_ms[each.system][each.model] * 1e-3, sigma=_BAR_SIGMA)
        for each in _batches(facts)
        if each.model in models
    ]
    stages = [
        Target(quantity=_quantity(fact), value=fact.ms * 1e-3, sigma=_STAGE_SIGMA)
        for fact in facts.stages
        if fact.model in models
    ]
    return [*bars, *stages]


def _errors_under(library: Library, facts: Facts, alternative: Alternative) -> Errors:
    """Of the same fit, with something else assumed."""
    free = [replace(each, median=alternative.medians.get(each.name, each.median)) for each in facts.free]
    return errors_of(facts, fit(alternative.library(library), free, targets_of(facts, FITTED_MODELS)))


def errors_of(facts: Facts, found: Fit) -> Errors:
    batches = _batches(facts)
    predicted = predict(found.library, batches)
    of_cell = {
        (each.system, each.model): abs(seconds * 1e3 / facts.batch_ms[each.system][each.model] - 1)
        for each, seconds in zip(batches, predicted, strict=True)
    }
    unseen = {cell: error for cell, error in of_cell.items() if cell[1] not in FITTED_MODELS}
    stages = predict(found.library, [_quantity(fact) for fact in facts.stages])
    num_free = len(facts.free)
    return Errors(
        fitted=_mean(error for cell, error in of_cell.items() if cell not in unseen),
        predicted=_mean(unseen.values()),
        predicted_near_memory=_mean(error for cell, error in unseen.items() if cell[0] != _HOST),
        worst_predicted_host=max(error for cell, error in unseen.items() if cell[0] == _HOST),
        worst_stage=max(abs(s * 1e3 / fact.ms - 1) for s, fact in zip(stages, facts.stages, strict=True)),
        farthest_z=max(found.z[:num_free], key=abs),
    )


def _cells(facts: Facts, ours: Vector, region: Region) -> tuple[Cell, ...]:
    return tuple(
        _cell(each, i, facts.batch_ms[each.system][each.model], ours, region, is_fitted=each.model in FITTED_MODELS)
        for i, each in enumerate(_batches(facts))
    )


def _stage_cells(facts: Facts, ours: Vector, region: Region) -> tuple[Cell, ...]:
    return tuple(
        _cell(_quantity(fact), i, fact.ms, ours, region, is_fitted=True)
        for i, fact in enumerate(facts.stages, len(_batches(facts)))
    )


def _cell(asked: Quantity, i: int, paper_ms: float, ours: Vector, region: Region, *, is_fitted: bool) -> Cell:
    """i: the quantity's place among all that were asked."""
    return Cell(
        name=asked.name,
        system=asked.system,
        model=asked.model,
        is_fitted=is_fitted,
        paper=paper_ms,
        ours=ours[i] * 1e3,
        **_band(region, region.predicted[:, i] * 1e3),
    )


def time_ratios(facts: Facts, library: Library) -> dict[str, float]:
    """Ratios between systems, means over the models."""
    return {
        name: float(values[0]) for name, values in _ratios_of(facts, predict(library, _batches(facts))[None]).items()
    }


def _ratios_of(facts: Facts, seconds: Vector) -> dict[str, Vector]:
    """Each ratio [n], of seconds [n, systems x models]."""
    of = _by_system(facts.systems, facts, seconds)
    speedups = of[_HOST] / of[_BEST]
    return {
        "PMEM / CXL, arithmetic mean": speedups.mean(axis=1),
        "PMEM / CXL, geometric mean": np.exp(np.log(speedups).mean(axis=1)),
        "CXL-D / PCIe": (of["cxl-d"] / of["pcie"]).mean(axis=1),
        "CXL / CXL-B": (of[_BEST] / of["cxl-b"]).mean(axis=1),
    }


def _ratios(facts: Facts, ours: Vector, region: Region) -> tuple[Ratio, ...]:
    count = len(_batches(facts))
    bars = np.array([[facts.batch_ms[each.system][each.model] for each in _batches(facts)]])
    stated = {
        **{name: float(values[0]) for name, values in _ratios_of(facts, bars).items()},
        "PMEM / CXL, arithmetic mean": facts.stated.speedup,
        "CXL-D / PCIe": facts.stated.cxl_d_over_pcie,
        "CXL / CXL-B": facts.stated.cxl_over_cxl_b,
    }
    here, drawn = _ratios_of(facts, ours[None, :count]), _ratios_of(facts, region.predicted[:, :count])
    return tuple(
        Ratio(name=name, paper=stated[name], ours=float(here[name][0]), **_band(region, drawn[name])) for name in stated
    )


def _by_system(systems: Sequence[str], facts: Facts, values: Vector) -> dict[str, Vector]:
    """Values [n, models] by system, of [n, systems x models]."""
    count = len(facts.models)
    return {system: values[:, i * count : (i + 1) * count] for i, system in enumerate(systems)}


def _energy_ratios(facts: Facts, ours: Vector, drawn: Vector, region: Region) -> tuple[EnergyRatios, ...]:
    """ours [quantities], drawn [n, quantities]: joules, by rule, system and model."""
    stated = facts.stated
    paper = {
        "saved against PMEM, mean": stated.energy_saved_against_pmem,
        "saved against PMEM, RM4": stated.rm4_energy_saved_against_pmem,
        "saved against DRAM, RM2": stated.rm2_energy_saved_against_dram,
    }
    found = []
    size = len(_ENERGY_SYSTEMS) * len(facts.models)
    for number, rule in enumerate(facts.energy_rules):
        of_rule = slice(number * size, (number + 1) * size)
        here, there = (
            _by_system(_ENERGY_SYSTEMS, facts, joules) for joules in (ours[None, of_rule], drawn[:, of_rule])
        )
        at_fit, in_region = _savings(facts, here), _savings(facts, there)
        saved = [
            Ratio(name=name, paper=value, ours=float(at_fit[name][0]), **_band(region, in_region[name]))
            for name, value in paper.items()
        ]
        order = {
            model: (float(here["dram"][0, i] / here[_HOST][0, i]), _probability_of_order(facts, i, there, region))
            for i, model in enumerate(facts.models)
        }
        found.append(EnergyRatios(rule=rule.title, saved=tuple(saved), dram_order=order))
    return tuple(found)


def _savings(facts: Facts, of: Mapping[str, Vector]) -> dict[str, Vector]:
    """of: joules [n, models] by system."""
    against_host = 1 - of[_BEST] / of[_HOST]
    at = facts.models.index
    return {
        "saved against PMEM, mean": against_host.mean(axis=1),
        "saved against PMEM, RM4": against_host[:, at("rm4")],
        "saved against DRAM, RM2": (1 - of[_BEST] / of["dram"])[:, at("rm2")],
    }


def _probability_of_order(facts: Facts, number: int, of: Mapping[str, Vector], region: Region) -> float:
    takes_more = of["dram"][:, number] > of[_HOST][:, number]
    return region.probability(takes_more == facts.stated.dram_takes_more_than_pmem[facts.models[number]])


def _intervals(found: Fit, region: Region) -> dict[str, tuple[float, float]]:
    """Of each free parameter: the region's 90 %."""
    intervals = {}
    for i, each in enumerate(found.free):
        low, high = region.quantiles(region.z[:, i], _BAND)
        intervals[each.name] = (each.value(low), each.value(high))
    return intervals


def _band(region: Region, values: Vector) -> dict[str, float]:
    return dict(zip(("low", "high"), region.quantiles(values, _BAND), strict=True))


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
