"""What TrainingCXL says, and what it leaves open, as data: library/paper.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from holdfast.files.config import read_config
from holdfast_lab.sim.calibration import Free, Variant
from holdfast_lab.sim.library import PACKAGED

_COPIED = {"rm2": "rm1", "rm3": "rm4"}  # what no model at all would predict


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
        return tuple(next(iter(self.batch_ms.values())))

    @property
    def copying_error(self) -> float:
        """Of what no model at all predicts: each model that is not fitted takes what its neighbour takes."""
        return fmean(
            abs(row[source] / row[model] - 1) for row in self.batch_ms.values() for model, source in _COPIED.items()
        )


def read_facts(path: Path = PACKAGED / "paper.toml") -> Facts:
    """Raises ConfigError."""
    return read_config(Facts, path)
