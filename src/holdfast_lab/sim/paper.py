"""TrainingCXL's evaluation, reproduced.

What the paper says, and what it leaves open, is data (library/paper.toml). The library's values are fitted to the bars
of all four models and to the stages of the timelines; no energy is fitted. How good that is for a model that was not
fitted is asked by leaving each out in turn (folds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast_lab.sim.calibration import Fit, Quantity, Region, Vector, explore, fit, predict, z_in
from holdfast_lab.sim.facts import HOST, Facts, batches_of, quantity_of, targets_of
from holdfast_lab.sim.folds import AS_DESCRIBED, Band, Structure, bands_of, structure_of, trials_of, weights_of
from holdfast_lab.sim.library import Library
from holdfast_lab.sim.machine import Run

_BEST = "cxl"
_BAND = (0.05, 0.95)
_ENERGY_SYSTEMS = ("dram", "pmem", "cxl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """paper, ours: milliseconds. low, high: 90 %."""

    name: str
    system: str
    model: str
    paper: float
    ours: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.ours / self.paper - 1.0

    @property
    def is_within(self) -> bool:
        return self.low <= self.paper <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute relative errors: of bars that were fitted, of bars whose model was left out, of these near memory,
    and the worst of the host's. farthest_z: of a free parameter from its prior."""

    fitted: float
    left_out: float
    left_out_near_memory: float
    worst_left_out_host: float
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
    """cells, stages: as fitted, with the band that the fit leaves open. left_out: with the model left out. weights:
    what each structure counts in the bands of a model that is left out. runs: by system and model, at the fit. draws:
    of the region; effective_draws: how many equal ones its weights are worth."""

    facts: Facts
    fit: Fit
    cells: tuple[Cell, ...]
    stages: tuple[Cell, ...]
    left_out: tuple[Cell, ...]
    weights: Mapping[str, Mapping[str, float]]
    ratios: tuple[Ratio, ...]
    energy: tuple[EnergyRatios, ...]
    errors: Mapping[str, Errors]
    intervals: Mapping[str, tuple[float, float]]
    runs: Mapping[tuple[str, str], Run]
    draws: int
    effective_draws: float

    @property
    def own_errors(self) -> Errors:
        return self.errors[AS_DESCRIBED.title]


def reproduce(
    library: Library,
    facts: Facts,
    *,
    draws: int = 160,
    seed: int = 0,
    processes: int = 2,
    on_part: Callable[[], None] = lambda: None,
) -> Reproduction:
    """Fits, explores, leaves each model out, and does so again under every alternative. The fit begins where the
    library is, which is not far: it ends where one from the priors does. on_part: called so often as
    `num_parts` says."""
    asked = [*batches_of(facts), *(quantity_of(fact) for fact in facts.stages), *_energies(facts)]
    targets = targets_of(facts, facts.models)
    with ProcessPoolExecutor(processes) as pool:
        found = fit(library, facts.free, targets, z_in(library, facts.free))
        on_part()
        every = (AS_DESCRIBED, *facts.alternatives)
        awaited = [pool.submit(structure_of, library, facts, each, found.z) for each in every]
        trials = pool.submit(trials_of, library, facts, found)
        with_powers = found.with_priors(facts.powers)
        region = explore(
            library, with_powers, targets, asked, draws=draws, seed=seed, map_draws=partial(pool.map, chunksize=10)
        )
        on_part()
        structures = []
        for each in awaited:
            structures.append(each.result())
            on_part()
    ours = predict(found.library, asked)
    energies = len(batches_of(facts)) + len(facts.stages)  # the first of them among what is asked
    return Reproduction(
        facts=facts,
        fit=with_powers,
        cells=_cells(facts, ours, region),
        stages=_stage_cells(facts, ours, region),
        left_out=_left_out(facts, structures, bands_of(facts, structures, trials.result(), seed=seed)),
        weights={model: weights_of(facts, structures, trials.result(), model) for model in facts.models},
        ratios=_ratios(facts, ours, region),
        energy=_energy_ratios(facts, ours[energies:], region.predicted[:, energies:], region),
        errors={each.alternative.title: _errors_of(facts, each) for each in structures},
        intervals=_intervals(with_powers, region),
        runs={
            (system, model): found.library.run(system, model)
            for system in ("dram", *facts.systems)
            for model in facts.models
        },
        draws=draws,
        effective_draws=region.effective_draws,
    )


def num_parts(facts: Facts) -> int:
    return 3 + len(facts.alternatives)


def mean_error(facts: Facts, library: Library, models: Sequence[str]) -> float:
    """Of all bars of these models."""
    bars = [each for each in batches_of(facts) if each.model in models]
    paper_s = np.array([facts.batch_ms[each.system][each.model] * 1e-3 for each in bars])
    return float(np.mean(np.abs(predict(library, bars) / paper_s - 1)))


def worst_stage_error(facts: Facts, library: Library) -> float:
    seconds = predict(library, [quantity_of(fact) for fact in facts.stages])
    return max(abs(float(s) * 1e3 / fact.ms - 1) for s, fact in zip(seconds, facts.stages, strict=True))


def _energies(facts: Facts) -> list[Quantity]:
    return [
        Quantity(system=system, model=model, unit="J", under=rule)
        for rule in facts.energy_rules
        for system in _ENERGY_SYSTEMS
        for model in facts.models
    ]


def _errors_of(facts: Facts, structure: Structure) -> Errors:
    left_out = {
        (system, fold.model): abs(ms / facts.batch_ms[system][fold.model] - 1)
        for fold in structure.folds
        for system, ms in zip(facts.systems, fold.milliseconds, strict=True)
    }
    library = structure.fit.library
    return Errors(
        fitted=mean_error(facts, library, facts.models),
        left_out=_mean(left_out.values()),
        left_out_near_memory=_mean(error for (system, _), error in left_out.items() if system != HOST),
        worst_left_out_host=max(error for (system, _), error in left_out.items() if system == HOST),
        worst_stage=worst_stage_error(facts, library),
        farthest_z=max(structure.fit.z, key=abs),
    )


def _left_out(facts: Facts, structures: Sequence[Structure], bands: Mapping[tuple[str, str], Band]) -> tuple[Cell, ...]:
    """As described; the bands are over all structures."""
    ours = {
        (system, fold.model): ms
        for fold in structures[0].folds
        for system, ms in zip(facts.systems, fold.milliseconds, strict=True)
    }
    return tuple(
        Cell(
            name=each.name,
            system=each.system,
            model=each.model,
            paper=facts.batch_ms[each.system][each.model],
            ours=ours[each.system, each.model],
            low=bands[each.system, each.model].low,
            high=bands[each.system, each.model].high,
        )
        for each in batches_of(facts)
    )


def _cells(facts: Facts, ours: Vector, region: Region) -> tuple[Cell, ...]:
    return tuple(
        _cell(each, i, facts.batch_ms[each.system][each.model], ours, region)
        for i, each in enumerate(batches_of(facts))
    )


def _stage_cells(facts: Facts, ours: Vector, region: Region) -> tuple[Cell, ...]:
    return tuple(
        _cell(quantity_of(fact), i, fact.ms, ours, region)
        for i, fact in enumerate(facts.stages, len(batches_of(facts)))
    )


def _cell(asked: Quantity, i: int, paper_ms: float, ours: Vector, region: Region) -> Cell:
    """i: the quantity's place among all that were asked."""
    return Cell(
        name=asked.name,
        system=asked.system,
        model=asked.model,
        paper=paper_ms,
        ours=ours[i] * 1e3,
        **_band(region, region.predicted[:, i] * 1e3),
    )


def time_ratios(facts: Facts, library: Library) -> dict[str, float]:
    """Ratios between systems, means over the models."""
    return {
        name: float(values[0]) for name, values in _ratios_of(facts, predict(library, batches_of(facts))[None]).items()
    }


def _ratios_of(facts: Facts, seconds: Vector) -> dict[str, Vector]:
    """Each ratio [n], of seconds [n, systems x models]."""
    of = _by_system(facts.systems, facts, seconds)
    speedups = of[HOST] / of[_BEST]
    return {
        "PMEM / CXL, arithmetic mean": speedups.mean(axis=1),
        "PMEM / CXL, geometric mean": np.exp(np.log(speedups).mean(axis=1)),
        "CXL-D / PCIe": (of["cxl-d"] / of["pcie"]).mean(axis=1),
        "CXL / CXL-B": (of[_BEST] / of["cxl-b"]).mean(axis=1),
    }


def _ratios(facts: Facts, ours: Vector, region: Region) -> tuple[Ratio, ...]:
    count = len(batches_of(facts))
    bars = np.array([[facts.batch_ms[each.system][each.model] for each in batches_of(facts)]])
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
            model: (float(here["dram"][0, i] / here[HOST][0, i]), _probability_of_order(facts, i, there, region))
            for i, model in enumerate(facts.models)
        }
        found.append(EnergyRatios(rule=rule.title, saved=tuple(saved), dram_order=order))
    return tuple(found)


def _savings(facts: Facts, of: Mapping[str, Vector]) -> dict[str, Vector]:
    """of: joules [n, models] by system."""
    against_host = 1 - of[_BEST] / of[HOST]
    at = facts.models.index
    return {
        "saved against PMEM, mean": against_host.mean(axis=1),
        "saved against PMEM, RM4": against_host[:, at("rm4")],
        "saved against DRAM, RM2": (1 - of[_BEST] / of["dram"])[:, at("rm2")],
    }


def _probability_of_order(facts: Facts, number: int, of: Mapping[str, Vector], region: Region) -> float:
    takes_more = of["dram"][:, number] > of[HOST][:, number]
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
