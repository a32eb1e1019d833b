"""A run as its TOML file describes it: configuration, and what builds source, pool, model and Trainer from it.

Once a pool is there, its run's configuration lies in it (`extra["config"]` of the dense state). On resume every field
is compared with it: what may change is listed in CHANGEABLE; any other change is refused, by name. A hyperparameter of
an optimizer that the file changed since then is applied from the next step on; one that it did not change keeps
whatever value it has come to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import nn

from holdfast.data import (
    CriteoTsvConfig,
    CriteoTsvSource,
    Feature,
    ParquetConfig,
    ParquetSource,
    Source,
    SyntheticConfig,
    SyntheticSource,
    criteo_shape,
)
from holdfast.device.faults import open_device
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, StateError
from holdfast.files.config import differences, to_plain
from holdfast.group.group import Group
from holdfast.group.layout import TableShards, measure_load
from holdfast.group.options import GroupConfig, GroupOptions
from holdfast.group.shared_pool import SharedPool
from holdfast.models.dlrm import DLRM
from holdfast.pools.directory import RecoveryMode, is_of_group
from holdfast.pools.optim import SGD, Adagrad, Adam, RowOptimizerSpec, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.pool import Pool
from holdfast.pools.read_only import ReadOnlyPool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.state import state_tree
from holdfast.state.loading import load_all
from holdfast.state.provenance import warn_of_changes
from holdfast.state.reproducibility import prepare_device, resolve_vector_functions
from holdfast.train.metrics import Evaluation
from holdfast.train.trainer import TrainConfig, Trainer, evaluate_model

_CONFIG = "extra['config']"  # where Checkpoint keeps it
_DEVICE_SETTINGS = "device_settings"  # there, too, in pools from before a state had a record of its provenance

# Fields that may differ from those that the pool was made with, and the sections all of whose fields may.
CHANGEABLE = (
    "data.criteo.paths",  # the loader compares what is in the files, wherever they lie
    "data.parquet.paths",
    "validation",
    "embedding.lr",
    "embedding.eps",
    "embedding.betas",
    "embedding.weight_decay",
    "optimizer.lr",
    "optimizer.momentum",
    "optimizer.eps",
    "optimizer.betas",
    "optimizer.weight_decay",
    "pool.dense_interval",
    "pool.log_bytes",
    "pool.medium",  # Pool compares it with how its rows are kept
    "pool.row_checksums",  # likewise
    "pool.scratchpad_bytes",
    "group.timeout",
    "device",  # the pool does not care; the bits of the steps to come do
    _DEVICE_SETTINGS,
    "train.steps",
    "train.epochs",
    "train.workers",
    "train.prefetch",
    "train.window",
    "train.eval_every",
    "train.eval_batch_size",
    "train.bf16",
    "train.max_grad_norm",
    "train.capture_ahead",
)


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
    """Where training data comes from: exactly one of these."""

    criteo_shape: CriteoShapeConfig | None = None
    synthetic: SyntheticConfig | None = None
    criteo: CriteoTsvConfig | None = None
    parquet: ParquetConfig | None = None

    def __post_init__(self) -> None:
        if len(self.given) != 1:
            found = "none of them is there" if not self.given else f"there are {' and '.join(self.given)}"
            raise ConfigError(
                "data: exactly one of [data.criteo_shape], [data.synthetic], [data.criteo], [data.parquet] is needed; "
                + found
            )

    @property
    def given(self) -> list[str]:
        kinds = ("criteo_shape", "synthetic", "criteo", "parquet")
        return [kind for kind in kinds if getattr(self, kind) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """What AUC and log-loss are measured on, read like the training data.

    paths: other files, where the training data are files. num_samples: where they are generated, how many; they are
    the ones after the training samples.
    """

    paths: tuple[Path, ...] = ()
    num_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """The tables: one for every categorical feature of the data, all alike, and the optimizer of their rows.

    dim: weights of a row. dtype: of the weights; optimizer state is float32. pooling: of a bag's rows. optimizer:
    FBGEMM's definitions, see holdfast.pools.optim. lr, weight_decay: of the rows' optimizer. eps, betas: where it has
    them; None: its default. init_bound: rows start uniform in ±init_bound; None: 1/sqrt(rows of the table).
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
        return [
            EmbeddingBagConfig(
                num_embeddings=feature.num_embeddings,
                embedding_dim=self.dim,
                name=feature.name,
                feature_names=[feature.name],
                data_type=self.dtype,
                pooling=self.pooling,
                weight_init_min=low,
                weight_init_max=self.init_bound,
            )
            for feature in features
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DLRM.

    bottom, top: sizes of the MLPs' layers, without their input; bottom ends in embedding.dim, top in 1. interaction: of
    the embeddings and the bottom MLP's output: their dot products, or all of them side by side.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: Literal["dot", "concat"] = "dot"

    def __post_init__(self) -> None:
        for name in ("bottom", "top"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise ConfigError(f"model.{name} = {list(sizes)}; it must be one or more sizes, each at least 1")
        if self.top[-1] != 1:
            raise ConfigError(f"model.top = {list(self.top)}; its last size must be 1, the logit")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of the dense part.

    name: of torch.optim. lr, weight_decay: as there. momentum: of sgd alone. eps, betas: where it has them; None: its
    default.
    """

    name: Literal["sgd", "adagrad", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.make([nn.Parameter(torch.zeros(1))])

    def make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
        }
        allowed = {"sgd": ("momentum",), "adagrad": ("eps",)}.get(self.name, ("eps", "betas"))
        options = _given_options("optimizer", self.name, allowed, self)
        try:
            return kinds[self.name](parameters, lr=self.lr, weight_decay=self.weight_decay, **options)
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The pool, as holdfast.Pool takes it.

    seed: of the rows' initial values. medium: how a new pool keeps its rows: "memory" in place, "block" in a log store,
    "auto" in place on DAX and tmpfs and in a log store elsewhere. scratchpad_bytes: DRAM for rows of a log store; None:
    a quarter of the memory that there is. dense_interval: steps from one dense state to the next; 1 loses at most the
    step in flight. log_bytes: size of a new pool's log; None: the undo log grows to what the batches need, a row log
    has 1 GiB. row_checksums: keep a checksum of every row of a new pool in place; a log store always does.
    """

    seed: int = 0
    medium: Literal["auto", "memory", "block"] = "auto"
    scratchpad_bytes: int | None = None
    dense_interval: int = 1
    log_bytes: int | None = None
    row_checksums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run, as one TOML file."""

    data: DataConfig
    validation: ValidationConfig | None = None
    embedding: EmbeddingConfig
    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        if self.model.bottom[-1] != self.embedding.dim:
            raise ConfigError(
                f"model.bottom = {list(self.model.bottom)}; its last size must be embedding.dim = "
                f"{self.embedding.dim}, because its output interacts with the embeddings as one more vector"
            )


def open_source(data: DataConfig) -> Source:
    """The training data. Raises DataError, ConfigError."""
    if data.criteo is not None:
        return CriteoTsvSource(data.criteo)
    if data.parquet is not None:
        return ParquetSource(data.parquet)
    return SyntheticSource(_synthetic(data))


def open_validation(config: RunConfig) -> Source | None:
    """The validation data, or None where the configuration names none."""
    validation, data = config.validation, config.data
    if validation is None:
        return None
    files = data.criteo or data.parquet
    if files is not None:
        if not validation.paths or validation.num_samples:
            raise ConfigError(f"validation: where [data.{data.given[0]}] reads files, it is `paths` that is needed")
        if data.criteo is not None:
            return CriteoTsvSource(replace(data.criteo, paths=validation.paths))
        assert data.parquet is not None
        return ParquetSource(replace(data.parquet, paths=validation.paths))
    if validation.paths or validation.num_samples < 1:
        raise ConfigError(f"validation: where [data.{data.given[0]}] generates, it is `num_samples` that is needed")
    training = _synthetic(data)
    after = training.first_sample + training.num_samples
    return SyntheticSource(replace(training, first_sample=after, num_samples=validation.num_samples))


def _synthetic(data: DataConfig) -> SyntheticConfig:
    if data.criteo_shape is not None:
        return data.criteo_shape.synthetic()
    assert data.synthetic is not None
    return data.synthetic


def make_dlrm(config: RunConfig, source: Source, embeddings: nn.Module) -> DLRM:
    """The run's network over `embeddings`."""
    return DLRM(
        embeddings=embeddings,
        num_dense=source.num_dense,
        embedding_dim=config.embedding.dim,
        num_features=len(source.features),
        bottom=config.model.bottom,
        top=config.model.top,
        interaction=config.model.interaction,
    )


def build_model(config: RunConfig, source: Source, rows: nn.Module) -> tuple[DLRM, torch.optim.Optimizer]:
    """The dense part and its optimizer. Its initial values are drawn from torch's generator."""
    if source.num_dense < 1:
        raise ConfigError("model: a DLRM needs at least one dense column in the data")
    model = make_dlrm(config, source, rows)
    return model, config.optimizer.make(list(model.parameters()))


def open_trainer(
    config: RunConfig,
    directory: Path,
    *,
    recovery: RecoveryMode = "exact",
    trust_after_reboot: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    ranks: Group | None = None,
    source: Source | None = None,
) -> Trainer:
    """Makes the run's pool in `directory`, or opens and recovers it; the Trainer is ready for its next step.

    stopping: whether this process was asked to stop; of a rank, its group knows. ranks: that train the pool together,
    all of which call this at once. source: instead of the configuration's data; the same on all ranks.

    Raises ConfigError where a field that may not change differs from what the pool was made with, and what Pool,
    source and Checkpoint raise. Nothing is made where the configuration or the data is wrong.
    """
    opened = assemble(
        config,
        directory,
        recovery=recovery,
        trust_after_reboot=trust_after_reboot,
        stopping=stopping,
        ranks=ranks,
        source=source,
    )
    with ExitStack() as on_error:
        trainer = on_error.enter_context(opened)
        saved = trainer.checkpoint.saved("config")
        trainer.recover()
        if saved is not None:
            apply_hyperparameters(saved, to_plain(config), trainer)
        on_error.pop_all()
    return trainer


def assemble(
    config: RunConfig,
    directory: Path,
    *,
    recovery: RecoveryMode = "exact",
    trust_after_reboot: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    ranks: Group | None = None,
    source: Source | None = None,
) -> Trainer:
    """A Trainer whose `recover` has not run yet: model and optimizers have their initial values."""
    source = source or open_source(config.data)
    prepare_device(open_device(config.device.kind))
    seed_generators(config.train.seed)
    options: dict[str, Any] = {
        "seed": config.pool.seed,
        "medium": config.pool.medium,
        "log_bytes": config.pool.log_bytes,
        "row_checksums": config.pool.row_checksums,
        "scratchpad_bytes": config.pool.scratchpad_bytes,
        "dense_interval": config.pool.dense_interval,
        "recovery": recovery,
        "trust_after_reboot": trust_after_reboot,
    }
    plain = to_plain(config)
    if ranks is None and is_of_group(directory):
        ranks = Group.from_environment(memory_ranks=0, timeout=config.group.timeout, stopping=stopping)
    with ExitStack() as on_error:
        if ranks is None:
            pool = on_error.enter_context(Pool(directory, **options))
            _refuse_changes_of(pool, plain)  # before the tables are compared, which says less
        else:
            pool = on_error.enter_context(_shared_pool(config, directory, source, ranks, options))
        rows = EmbeddingBagCollection(
            pool, config.embedding.tables(source.features), optimizer=config.embedding.spec(), device=config.device
        )
        if isinstance(pool, SharedPool):  # which is opened with its tables
            _refuse_changes_of(pool, plain)
            stopping = pool.wants_to_stop
        model, dense_optimizer = build_model(config, source, rows)
        if pool.part[0] > 0:
            seed_generators(config.train.seed + pool.part[0])  # the same parameters, other random numbers from here on
        trainer = Trainer(
            config.train,
            pool=pool,
            rows=rows,
            model=model,
            dense_optimizer=dense_optimizer,
            source=source,
            device=config.device,
            extra={"config": plain},
            stopping=stopping,
        )
        on_error.pop_all()
    return trainer


def _shared_pool(
    config: RunConfig, directory: Path, source: Source, ranks: Group, options: Mapping[str, Any]
) -> SharedPool:
    def measure(layout: Sequence[TableShards], num_shards: int, first_sample: int) -> list[int]:
        rows = [feature.num_embeddings for feature in source.features]
        return measure_load(
            source,
            range(len(rows)),
            rows,
            layout,
            num_shards=num_shards,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            shuffle=config.train.shuffle,
            lanes=config.train.lanes,
            first_sample=first_sample,
        )

    group = GroupOptions(shards=config.group.shards, split_rows=config.group.split_rows, timeout=config.group.timeout)
    return SharedPool(directory, **options, group=group, ranks=ranks, measure=measure)


def _refuse_changes_of(pool: Pool, plain: Mapping[str, Any]) -> None:
    saved = None if pool.is_new else saved_config(pool.dense_state())
    if saved is not None:
        refuse_changes(saved, plain)
        _warn_of_another_device(saved, plain)


def evaluate_pool(
    config: RunConfig, directory: Path, source: Source, on_batch: Callable[[int], None] | None = None
) -> tuple[int, Evaluation]:
    """The step of a pool's newest dense state, and how its model does on `source`. Takes no lock, changes nothing."""
    resolve_vector_functions()
    pool = ReadOnlyPool(directory)
    dense_state = pool.core.dense_state()
    if dense_state is None:
        raise StateError(f"{directory} holds no dense state yet: it was not trained")
    step, structure, tensors = dense_state
    saved = state_tree.unpack(structure, tensors)
    if (saved_plain := saved.get(_CONFIG)) is not None:
        refuse_changes(saved_plain, to_plain(config))
    rows = EmbeddingBagCollection(
        cast(Pool, pool), config.embedding.tables(source.features), optimizer=config.embedding.spec()
    )
    model, _ = build_model(config, source, rows)
    load_all({"model": model}, saved)
    return step, evaluate_model(model, source, config.train, on_batch)


def seed_generators(seed: int) -> None:
    """Every generator whose state a dense slot keeps: so two runs of one configuration end with one state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one that models and users draw from


def saved_config(dense_state: tuple[bytes, bytes] | None) -> dict[str, Any] | None:
    """The configuration of the run that wrote a pool's dense state; None where there is none."""
    if dense_state is None:
        return None
    saved = state_tree.unpack(*dense_state).get(_CONFIG)
    return saved if isinstance(saved, dict) else None


def refuse_changes(saved: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """ConfigError for the first field that differs and is not in CHANGEABLE."""
    saved = {**{section: plain[section] for section in ("group", "device")}, **saved}  # of before there were these
    saved["train"] = {"lanes": 1, **saved.get("train", {})}
    for line in differences(saved, plain):
        name = line.partition(":")[0]
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in CHANGEABLE):
            raise ConfigError(f"{line}, but a pool cannot change that: go back to the old value, or start a new pool")


def _warn_of_another_device(saved: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    def of(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {"device": {name: value for name, value in tree["device"].items() if name != "scratchpad_bytes"}}

    if "device" in saved:
        warn_of_changes(differences(of(saved), of(plain)), stacklevel=3)


class Optimized(Protocol):
    """A trainer, as far as its optimizers go."""

    rows: Any
    dense_optimizer: torch.optim.Optimizer


def apply_hyperparameters(saved: Mapping[str, Any], plain: Mapping[str, Any], trainer: Optimized) -> list[str]:
    """Gives the optimizers' groups what the file changed since the pool's state was saved; returns it in words."""
    changes = []
    optimizers = {"embedding": trainer.rows.optimizer, "optimizer": trainer.dense_optimizer}
    for line in differences(saved, plain):
        section, _, key = line.partition(":")[0].partition(".")
        optimizer = optimizers.get(section)
        if optimizer is None or key not in optimizer.defaults:
            continue
        for group in optimizer.param_groups:
            group[key] = optimizer.defaults[key]
        changes.append(line)
    return changes


def _with_hyperparameters(
    section: str, name: str, kind: type[RowOptimizerSpec], config: EmbeddingConfig
) -> RowOptimizerSpec:
    allowed = [option for option in ("eps", "betas") if option in kind.__dataclass_fields__]
    return kind(lr=config.lr, weight_decay=config.weight_decay, **_given_options(section, name, allowed, config))


def _given_options(section: str, name: str, allowed: Sequence[str], config: Any) -> dict[str, Any]:
    """The options that are set; ConfigError for one that the optimizer does not have."""
    options = {}
    for option in ("momentum", "eps", "betas"):
        value = getattr(config, option, None)
        if value is None:
            continue
        if option not in allowed:
            raise ConfigError(f"{section}.{option}: {name} has none; leave it out")
        options[option] = value
    return options
