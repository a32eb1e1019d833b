"""What TrainingCXL says, and what it leaves open, as data: library/paper.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from holdfast.files.config import read_config
from holdfast_lab.sim.calibration import Free, Quantity, Target, Variant
from holdfast_lab.sim.library import PACKAGED

HOST = "pmem"
BAR_SIGMA, _STAGE_SIGMA = 0.03, 0.07  # of the logarithm, by reading; stages are short


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFact:
    system: str
    model: str
    stages: tuple[str, ...]
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """speedup: PMEM's time over CXL's, mean over models. The others are parts of 1."""

    speedup: float
    cxl_d_over_pcie: float
    cxl_over_cxl_b: float
    energy_saved_against_pmem: float
    rm2_energy_saved_against_dram: float
    rm4_energy_saved_against_pmem: float
    dram_takes_more_than_pmem: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Variant):
    """medians: of free parameters, by name, where they mean something else then."""

    medians: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the paper says: milliseconds by system and model, stages, ratios. And what it leaves open. energy_rules: by
    which modules take power are counted."""

    title: str
    batch_ms: dict[str, dict[str, float]]
    stated: Stated
    stages: tuple[StageFact, ...]
    free: tuple[Free, ...]
    powers: tuple[Free, ...]
    energy_rules: tuple[Variant, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(self.batch_ms)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.batch_ms[HOST])

    def copying_error(self, systems: Sequence[str]) -> float:
        """The honest null, which needs no simulator: each model takes what another takes, the one of the other three
        that turns out to be nearest. Mean, of these systems."""
        return fmean(
            min(
                fmean(abs(self.batch_ms[system][other] / self.batch_ms[system][model] - 1) for system in systems)
                for other in self.models
                if other != model
            )
            for model in self.models
        )

    @property
    def near_memory(self) -> tuple[str, ...]:
        return tuple(system for system in self.systems if system != HOST)


def read_facts(path: Path = PACKAGED / "paper.toml") -> Facts:
    """Raises ConfigError."""
    return read_config(Facts, path)


def batches_of(facts: Facts) -> list[Quantity]:
    return [Quantity(system=system, model=model) for system in facts.systems for model in facts.models]


def quantity_of(fact: StageFact) -> Quantity:
    return Quantity(system=fact.system, model=fact.model, stages=fact.stages)


def targets_of(facts: Facts, models: Sequence[str]) -> list[Target]:
    bars = [
        Target(quantity=each, value=facts.batch_ms[each.system][each.model] * 1e-3, sigma=BAR_SIGMA)
        for each in batches_of(facts)
        if each.model in models
    ]
    stages = [
        Target(quantity=quantity_of(fact), value=fact.ms * 1e-3, sigma=_STAGE_SIGMA)
        for fact in facts.stages
        if fact.model in models
    ]
    return [*bars, *stages]
