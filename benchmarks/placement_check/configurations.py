"""The configurations whose steps are predicted and measured: the benchmark's workloads on small tables."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.data import SyntheticConfig
from holdfast.run.network import ModelConfig
from holdfast.run.optimizers import OptimizerConfig
from holdfast.run.sections import DataConfig, EmbeddingConfig, PoolConfig, RunConfig
from holdfast.train.options import TrainConfig
from larger.runner import Run
from larger.systems import EPSILON, LEARNING_RATE
from larger.workload import Workload, make_workload

_MAX_WARMUP_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A workload and the pool that it trains on. uniform_share: of its ids, drawn evenly; scratchpad_share: of all
    rows' bytes; batches: distinct ones, so many that they do not come again before the end. window,
    capture_ahead: as in TrainConfig."""

    name: str
    in_memory: bool
    shape: str
    uniform_share: float = 0.0
    scratchpad_share: float = 0.1
    log_bytes: int = 128 << 20
    steps: int
    batches: int
    window: int = 8
    capture_ahead: bool = False

    @property
    def workload(self) -> Workload:
        return make_workload(self.shape, quick=True, uniform_share=self.uniform_share)

    @property
    def scratchpad_bytes(self) -> int:
        return round(self.scratchpad_share * self.workload.table_bytes)

    def run(self) -> Run:
        """As the benchmark trains it."""
        return Run(
            system="dram" if self.in_memory else "look_forward",
            workload=self.workload,
            num_batches=self.batches,
            steps=self.steps,
            warmup=20,
            log_bytes=self.log_bytes,
            max_warmup_s=_MAX_WARMUP_S,
            scratchpad_bytes=self.scratchpad_bytes,
            window=self.window,
            capture_ahead=self.capture_ahead,
        )

    def run_config(self) -> RunConfig:
        """The same, as a user would write it down; the ids come from the benchmark's own source."""
        shape = self.workload.shape
        rows = (shape.num_embeddings,) * shape.num_tables
        on_disk = PoolConfig(medium="block", log_bytes=self.log_bytes, scratchpad_bytes=self.scratchpad_bytes)
        return RunConfig(
            data=DataConfig(synthetic=SyntheticConfig(num_samples=1, rows=rows, lookups=shape.lookups_per_bag)),
            embedding=EmbeddingConfig(dim=shape.embedding_dim, lr=LEARNING_RATE, eps=EPSILON),
            model=ModelConfig(bottom=shape.bottom, top=shape.top),
            optimizer=OptimizerConfig(lr=LEARNING_RATE),
            pool=PoolConfig(medium="memory") if self.in_memory else on_disk,
            train=TrainConfig(
                batch_size=shape.batch_size, shuffle=False, window=self.window, capture_ahead=self.capture_ahead
            ),
        )


CONFIGURATIONS = (
    Configuration(name="in place, kaggle", in_memory=True, shape="kaggle", steps=120, batches=200),
    Configuration(name="in place, rm1 (80 ids a bag)", in_memory=True, shape="rm1", steps=120, batches=150),
    Configuration(
        name="in place, rm3 (20 ids a bag, wide network)", in_memory=True, shape="rm3", steps=80, batches=120
    ),
    Configuration(name="log store, kaggle", in_memory=False, shape="kaggle", steps=160, batches=900),
    Configuration(
        name="log store, kaggle, scratchpad of 4%",
        in_memory=False,
        shape="kaggle",
        scratchpad_share=0.04,
        steps=160,
        batches=700,
    ),
    Configuration(
        name="log store, kaggle, a fifth of the ids uniform",
        in_memory=False,
        shape="kaggle",
        uniform_share=0.2,
        steps=100,
        batches=400,
    ),
    Configuration(
        name="log store, wide rows, a third of the ids uniform",
        in_memory=False,
        shape="wide",
        uniform_share=0.33,
        steps=100,
        batches=400,
    ),
    Configuration(name="log store, rm1 (80 ids a bag)", in_memory=False, shape="rm1", steps=80, batches=250),
    Configuration(
        name="log store, uniform ids",
        in_memory=False,
        shape="kaggle",
        uniform_share=1.0,
        log_bytes=64 << 20,
        steps=40,
        batches=150,
    ),
)
