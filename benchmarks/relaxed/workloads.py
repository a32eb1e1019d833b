"""What is trained: data, model, where it is killed and where it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.data import CriteoTsvConfig, SyntheticConfig
from holdfast.run.network import ModelConfig
from holdfast.run.optimizers import OptimizerConfig
from holdfast.run.sections import DataConfig, EmbeddingConfig, PoolConfig, RunConfig, ValidationConfig
from holdfast.train.options import TrainConfig

LAGS = (0, 1, 10, 100, 300, 1000)
EVALUATED_AFTER = (0, 1, 10, 30, 100, 300, 1000)
"""Steps since the recovery; where training ends is one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A kill at the end of `step`, where the dense state lags `lag` steps behind the rows."""

    step: int
    lag: int

    @property
    def dense_step(self) -> int:
        return self.step - self.lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """config: of a seed. world: seeds of one world have the same data, and differ in initial values and order alone.
    lags: by the step where it is killed."""

    name: str
    title: str
    config: Callable[[int], RunConfig]
    world: Callable[[int], int]
    lags: dict[int, tuple[int, ...]]
    last_step: int

    @property
    def crashes(self) -> list[Crash]:
        return [Crash(step=step, lag=lag) for step, lags in self.lags.items() for lag in lags]

    def evaluated_from(self, crash_step: int) -> list[int]:
        """Steps that are evaluated of a run that goes on after `crash_step`."""
        between = (crash_step + after for after in EVALUATED_AFTER)
        return [*(step for step in between if step < self.last_step), self.last_step]

    @property
    def evaluated(self) -> list[int]:
        """Steps that are evaluated of the run that is never cut: those of every other, and where exact recovery would
        begin again."""
        of_others = {step for crash_step in self.lags for step in self.evaluated_from(crash_step)}
        return sorted(of_others | {crash.dense_step for crash in self.crashes})


def workloads(criteo: Path, *, quick: bool) -> list[Workload]:
    """All of them; quick: a few steps of each. criteo: the folder of criteo_8k."""
    criteo_steps, steps = (60, 60) if quick else (1800, 3000)
    lags = (0, 1, 10) if quick else LAGS
    early, late = steps // 3, steps // 3 * 2
    return [
        Workload(
            name="synthetic",
            title="synthetic, Adam",
            config=lambda seed: _synthetic(seed, steps, OptimizerConfig(name="adam", lr=0.002)),
            world=_world,
            lags={early: (lags[-3], lags[-1]), late: lags},
            last_step=steps,
        ),
        Workload(
            name="synthetic-sgd",
            title="synthetic, SGD",
            config=lambda seed: _synthetic(seed, steps, OptimizerConfig(name="sgd", lr=0.05)),
            world=_world,
            lags={late: lags},
            last_step=steps,
        ),
        Workload(
            name="criteo_8k",
            title="criteo_8k, Adam",
            config=lambda seed: _criteo(seed, criteo_steps, criteo),
            world=lambda _: 0,
            lags={criteo_steps // 3 * 2: lags},
            last_step=criteo_steps,
        ),
    ]


def _world(seed: int) -> int:
    return seed // 2


def _synthetic(seed: int, steps: int, optimizer: OptimizerConfig) -> RunConfig:
    """Planted clicks: one epoch, and 50,000 samples held out. (A dense interval changes no bits, only time.)"""
    batch_size = 128
    planted = SyntheticConfig(
        num_samples=steps * batch_size,
        rows=(1000,) * 8,
        num_dense=8,
        model_seed=_world(seed),
        sample_seed=_world(seed),
    )
    return RunConfig(
        data=DataConfig(synthetic=planted),
        validation=ValidationConfig(num_samples=50_000),
        embedding=EmbeddingConfig(dim=8, optimizer="rowwise_adagrad", lr=0.05),
        model=ModelConfig(bottom=(32, 8), top=(32, 1)),
        optimizer=optimizer,
        pool=PoolConfig(seed=seed, medium="memory", dense_interval=100),
        train=TrainConfig(batch_size=batch_size, steps=steps, seed=seed),
    )


def _criteo(seed: int, steps: int, folder: Path) -> RunConfig:
    """One epoch of the 7,200 rows in batches of four: a second one overfits so few rows."""
    return RunConfig(
        data=DataConfig(criteo=CriteoTsvConfig(paths=(folder / "train.tsv",), num_embeddings=2000)),
        validation=ValidationConfig(paths=(folder / "valid.tsv", folder / "test.tsv")),
        embedding=EmbeddingConfig(dim=8, init_bound=0.01, optimizer="rowwise_adagrad", lr=0.02),
        model=ModelConfig(bottom=(32, 8), top=(32, 1)),
        optimizer=OptimizerConfig(name="adam", lr=0.0005),
        pool=PoolConfig(seed=seed, medium="memory", dense_interval=100),
        train=TrainConfig(batch_size=4, steps=steps, seed=seed),
    )
