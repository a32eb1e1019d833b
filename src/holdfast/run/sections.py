"""The sections of a run's TOML file, but for the dense part (network.py, optimizers.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.data import CriteoTsvConfig, Feature, ParquetConfig, SyntheticConfig, criteo_shape
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError
from holdfast.files.config import OWN_KEYS, UNRECORDED, OwnKeys
from holdfast.files.config_text import nearest
from holdfast.group.options import GroupConfig
from holdfast.pools.dial import MediumDial
from holdfast.pools.log_medium import LogMedium
from holdfast.pools.optim import SGD, Adagrad, Adam, RowOptimizerSpec, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.pools.victim_cache import VictimCache
from holdfast.run.network import BuiltModelConfig, ModelConfig
from holdfast.run.optimizers import OptimizerConfig, SchedulerConfig, TorchOptimizerConfig, given_options
from holdfast.train.options import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteoShapeConfig:
    """Generated clicks in the shape of Criteo Kaggle: 13 dense columns, 26 tables of its cardinalities times `scale`.

    num_samples: samples in an epoch. scale: of the tables' rows. signal: standard deviation of the planted logit; more
    is easier to predict. model_seed: which model is planted. sample_seed: which samples are drawn.
    """

    num_samples: int
    scale: float = 1.0
    signal: float = 1.65
    model_seed: int = 0
    sample_seed: int = 0

    def synthetic(self) -> SyntheticConfig:
        shape = criteo_shape(
            num_samples=self.num_samples, scale=self.scale, model_seed=self.model_seed, sample_seed=self.sample_seed
        )
        return replace(shape, signal=self.signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where training data comes from: exactly one of these.

    source: of your own: "package.module:function", which returns a `holdfast.data.Source`. options: beside source,
    whatever keyword arguments the function has.
    """

    criteo_shape: CriteoShapeConfig | None = None
    synthetic: SyntheticConfig | None = None
    criteo: CriteoTsvConfig | None = None
    parquet: ParquetConfig | None = None
    source: str | None = field(default=None, metadata=UNRECORDED)
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)

    def __post_init__(self) -> None:
        kinds = ("criteo_shape", "synthetic", "criteo", "parquet", "source")
        if self.source is None and self.options:
            unknown = next(iter(self.options))
            raise OwnKeys.of(self.options, "data").error(unknown, f"unknown key; {nearest(unknown, kinds)}")
        if len(self.given) != 1:
            found = "none of them is there" if not self.given else f"there are {' and '.join(self.given)}"
            raise ConfigError(
                "data: exactly one of [data.criteo_shape], [data.synthetic], [data.criteo], [data.parquet] and "
                f"data.source is needed; {found}"
            )

    @property
    def given(self) -> list[str]:
        kinds = ("criteo_shape", "synthetic", "criteo", "parquet", "source")
        return [kind for kind in kinds if getattr(self, kind) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """What AUC and log-loss are measured on, read like the training data.

    paths: other files, where the training data are files. num_samples: where they are generated, how many; they are
    the ones after the training samples. source: another function than that of data.source. options: keyword arguments
    of the function, in place of those that [data] has, or beside them; where source is another, instead of them.
    """

    paths: tuple[Path, ...] = ()
    num_samples: int = 0
    source: str | None = field(default=None, metadata=UNRECORDED)
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """The tables: one for every categorical feature of the data, all alike, and the optimizer of their rows.

    dim: weights of a row. dtype: of the weights; optimizer state is float32. pooling: of a bag's rows. optimizer:
    FBGEMM's definitions, see holdfast.pools.optim. lr, weight_decay: of the rows' optimizer. eps, betas: where it has
    them; None: its default. init_bound: rows start uniform in ±init_bound; None: 1/sqrt(rows of the table). ttl_steps,
    max_keys, stay, admit_after, admit_probability: of the tables of features with keys, see
    holdfast.EmbeddingBagConfig.
    """

    dim: int
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    pooling: Literal["sum", "mean"] = "sum"
    init_bound: float | None = None
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"] = "rowwise_adagrad"
    lr: float = 0.01
    eps: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0
    ttl_steps: int | None = field(default=None, metadata=UNRECORDED)
    max_keys: int | None = field(default=None, metadata=UNRECORDED)
    stay: Literal["lru", "lfu"] | None = field(default=None, metadata=UNRECORDED)
    admit_after: int | None = field(default=None, metadata=UNRECORDED)
    admit_probability: float | None = field(default=None, metadata=UNRECORDED)

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"embedding.dim = {self.dim}; it must be at least 1")
        self.spec()

    def spec(self) -> RowOptimizerSpec:
        kinds: dict[str, type[RowOptimizerSpec]] = {
            "sgd": SGD,
            "rowwise_adagrad": RowWiseAdagrad,
            "adagrad": Adagrad,
            "adam": Adam,
            "rowwise_adam": RowWiseAdam,
        }
        return _with_hyperparameters("embedding", self.optimizer, kinds[self.optimizer], self)

    def tables(self, features: Sequence[Feature]) -> list[EmbeddingBagConfig]:
        low = None if self.init_bound is None else -self.init_bound
        names = ("ttl_steps", "max_keys", "stay", "admit_after", "admit_probability")
        policy: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name, value in policy.items():
            if value is not None and not any(feature.keys for feature in features):
                raise ConfigError(f"embedding.{name} = {value}: none of the data's features has keys")
        return [
            EmbeddingBagConfig(
                num_embeddings=None if feature.keys else feature.num_embeddings,
                capacity=feature.num_embeddings if feature.keys else None,
                embedding_dim=self.dim,
                name=feature.name,
                feature_names=[feature.name],
                data_type=self.dtype,
                pooling=self.pooling,
                weight_init_min=low,
                weight_init_max=self.init_bound,
                **(policy if feature.keys else {}),
            )
            for feature in features
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The pool, as holdfast.Pool takes it.

    seed: of the rows' initial values. medium: how a new pool keeps its rows: "memory" in place, "block" in a log store,
    "auto" in place on DAX and tmpfs and in a log store elsewhere. scratchpad_bytes: DRAM for rows of a log store; None:
    a quarter of the memory that the process may use, as for holdfast.Pool. scratchpad_nodes: NUMA nodes on which these
    rows lie; none: on any. dense_interval: steps from one dense state
    to the next; 1 loses at most the step in flight. log_bytes: size of a new pool's log; None: the undo log grows to
    what the batches need, a row log has an eighth of the bytes of the tables that its process owns, 1 GiB at least (16
    times the tables' bytes where these are fewer), and 16 GiB or twice the scratchpad at most; where the scratchpad
    holds all rows four times the tables' bytes, 4 GiB at most. row_checksums: keep a checksum of every row of a new
    pool in place; a log store always does. synchronous: make nothing durable beside training, for comparison. dial: for
    measurements, a declared medium that the real one is made as slow as. log: a medium of its own for a row log.
    victims: memory for rows that leave the scratchpad.
    """

    seed: int = 0
    medium: Literal["auto", "memory", "block"] = "auto"
    scratchpad_bytes: int | None = None
    scratchpad_nodes: tuple[int, ...] = field(default=(), metadata=UNRECORDED)
    dense_interval: int = 1
    log_bytes: int | None = None
    row_checksums: bool = False
    synchronous: bool = field(default=False, metadata=UNRECORDED)
    dial: MediumDial | None = field(default=None, metadata=UNRECORDED)
    log: LogMedium | None = field(default=None, metadata=UNRECORDED)
    victims: VictimCache | None = field(default=None, metadata=UNRECORDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run, as one TOML file."""

    data: DataConfig
    validation: ValidationConfig | None = None
    embedding: EmbeddingConfig
    model: ModelConfig | BuiltModelConfig
    optimizer: OptimizerConfig | TorchOptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig | None = field(default=None, metadata=UNRECORDED)
    pool: PoolConfig = field(default_factory=PoolConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, ModelConfig) and self.model.bottom and self.model.bottom[-1] != self.embedding.dim:
            raise ConfigError(
                f"model.bottom = {list(self.model.bottom)}; its last size must be embedding.dim = "
                f"{self.embedding.dim}, because its output interacts with the embeddings as one more vector"
            )
        if self.validation is not None and self.data.source is None and self.validation.source is None:
            for unknown in self.validation.options:
                names = ("paths", "num_samples", "source")
                keys = OwnKeys.of(self.validation.options, "validation")
                raise keys.error(unknown, f"unknown key; {nearest(unknown, names)}")
        if self.scheduler is not None:
            self.scheduler.try_out(self.optimizer)


def _with_hyperparameters(
    section: str, name: str, kind: type[RowOptimizerSpec], config: EmbeddingConfig
) -> RowOptimizerSpec:
    allowed = [option for option in ("eps", "betas") if option in kind.__dataclass_fields__]
    return kind(lr=config.lr, weight_decay=config.weight_decay, **given_options(section, name, allowed, config))
