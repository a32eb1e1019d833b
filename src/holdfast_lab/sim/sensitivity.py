"""What a speedup depends on: one thing at a time, everything else as it was fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import DoesNotFit
from holdfast_lab.sim.library import Library


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """speedups: of a system over `baseline`, the mean over models, at each of `x`. now: the library's x."""

    name: str
    x_name: str
    baseline: str
    x: tuple[float, ...]
    speedups: tuple[float, ...]
    now: float

    @property
    def span(self) -> float:
        return max(self.speedups) - min(self.speedups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is varied: `keys` of the library are set to each of `x`, or to that times their values where is_factor."""

    name: str
    x_name: str
    keys: tuple[str, ...]
    x: tuple[float, ...]
    is_factor: bool = False
    baseline: str = "pmem"
    system: str = "cxl"


STUDIES = (
    Study(
        name="batch size",
        x_name="samples",
        keys=tuple(f"models.{model}.batch_size" for model in ("rm1", "rm2", "rm3", "rm4")),
        x=(32, 64, 128, 256, 512, 1024, 2048, 4096),
    ),
    Study(
        name="what the host reaches of its memory",
        x_name="of the fitted bandwidth",
        keys=("devices.pmem-host.read_bandwidth_bytes_per_s", "devices.pmem-host.write_bandwidth_bytes_per_s"),
        x=(0.25, 0.5, 1, 2, 4, 8, 16),
        is_factor=True,
    ),
    Study(
        name="read after write",
        x_name="times as slow",
        keys=("devices.pmem-module.raw_penalty",),
        x=(1, 2, 4, 8, 16),
        baseline="cxl-b",
    ),
    Study(
        name="modules near memory",
        x_name="modules a table",
        keys=("devices.pmem-module.modules",),
        x=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2),
    ),
    Study(
        name="host's software of a stage",
        x_name="of the fitted time",
        keys=("devices.host-cpu.start_s", "devices.pcie.start_s"),
        x=(0.03, 0.1, 0.3, 1, 3),
        is_factor=True,
    ),
    Study(
        name="CXL link",
        x_name="bytes/s",
        keys=("devices.cxl.bandwidth_bytes_per_s",),
        x=(4e9, 8e9, 16e9, 32e9, 64e9, 128e9),
    ),
)
BASELINES = (
    "pmem", "pmem-pipelined", "pmem-cached", "dram", "dram-pooled", "scratchpipe", "hbm", "hbm-spread", "hbm-sharded",
)  # fmt: skip


def speedup(library: Library, models: Sequence[str], baseline: str, system: str = "cxl") -> float:
    """The mean of `baseline`'s time over `system`'s."""
    return float(np.mean([library.run(baseline, each).batch_s / library.run(system, each).batch_s for each in models]))


def curve(library: Library, models: Sequence[str], study: Study, x: Sequence[float] | None = None) -> Curve:
    """x: others than the study's."""
    points = study.x if x is None else x
    here = [library.value(key) for key in study.keys]
    speedups = []
    for point in points:
        values = {key: point * value if study.is_factor else point for key, value in zip(study.keys, here, strict=True)}
        speedups.append(speedup(library.changed(values), models, study.baseline, study.system))
    return Curve(
        name=study.name,
        x_name=study.x_name,
        baseline=study.baseline,
        x=tuple(points),
        speedups=tuple(speedups),
        now=1.0 if study.is_factor else here[0],
    )


def against_baselines(library: Library, models: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:
    """By baseline and model: its time over that of TrainingCXL's system; None where the rows do not fit."""
    return {baseline: {model: _time_over_cxl(library, baseline, model) for model in models} for baseline in BASELINES}


def _time_over_cxl(library: Library, baseline: str, model: str) -> float | None:
    try:
        return library.run(baseline, model).batch_s / library.run("cxl", model).batch_s
    except DoesNotFit:
        return None
