"""A run as its TOML file describes it: what builds source, pool, model and Trainer from a configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from holdfast.data import Source
from holdfast.device.faults import open_device
from holdfast.errors import ConfigError, StateError
from holdfast.files.config import to_plain
from holdfast.group.group import Group
from holdfast.group.layout import TableShards, measure_load
from holdfast.group.shared_pool import SharedPool
from holdfast.models import ModelInputs
from holdfast.pools.directory import RecoveryMode, is_of_group
from holdfast.pools.pool import Pool
from holdfast.pools.read_only import ReadOnlyPool
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.run.changes import (
    CONFIG,
    apply_hyperparameters,
    refuse_changes,
    saved_config,
    warn_of_another_device,
)
from holdfast.run.network import StandIn
from holdfast.run.sections import (
    RunConfig,
)
from holdfast.run.sources import open_source
from holdfast.state import state_tree
from holdfast.state.loading import load_all
from holdfast.state.reproducibility import prepare_device, resolve_vector_functions
from holdfast.train.evaluation import evaluate_model
from holdfast.train.metrics import Evaluation
from holdfast.train.options import last_step_of
from holdfast.train.trainer import Trainer
from holdfast.train.training_state import OfAllRanks


def model_inputs(config: RunConfig, source: Source) -> ModelInputs:
    """What the run's model is made for."""
    return ModelInputs(features=source.features, embedding_dim=config.embedding.dim, num_dense=int(source.num_dense))


def make_network(config: RunConfig, source: Source, embeddings: nn.Module | None = None) -> nn.Module:
    """The run's network over `embeddings`, or over a stand-in without tables. Its initial values are drawn from torch's
    generator. Raises ConfigError, and what a function of the user's raises."""
    inputs = model_inputs(config, source)
    return config.model.make(inputs, StandIn(inputs) if embeddings is None else embeddings)


def build_model(config: RunConfig, source: Source, rows: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The dense part and its optimizer."""
    model = make_network(config, source, rows)
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
        if config.scheduler is not None and trainer.pool.group.is_trainer:
            config.scheduler.check_length(trainer.last_step)  # which follows former data's steps
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
    _try_out(config, source)
    seed_generators(config.train.seed)
    options: dict[str, Any] = {
        "seed": config.pool.seed,
        "medium": config.pool.medium,
        "log_bytes": config.pool.log_bytes,
        "row_checksums": config.pool.row_checksums,
        "scratchpad_bytes": config.pool.scratchpad_bytes,
        "scratchpad_nodes": config.pool.scratchpad_nodes,
        "dense_interval": config.pool.dense_interval,
        "synchronous": config.pool.synchronous,
        "dial": config.pool.dial,
        "log": config.pool.log,
        "victims": config.pool.victims,
        "recovery": recovery,
        "trust_after_reboot": trust_after_reboot,
    }
    plain = to_plain(config)
    if ranks is None and is_of_group(directory):
        ranks = Group.from_environment(config.group.with_ranks(), stopping=stopping)
    with ExitStack() as on_error:
        if ranks is None:
            pool = on_error.enter_context(Pool(directory, **options))
            _refuse_changes_of(pool, config)  # before the tables are compared, which says less
        else:
            pool = on_error.enter_context(_shared_pool(config, directory, source, ranks, options))
        rows = EmbeddingBagCollection(
            pool, config.embedding.tables(source.features), optimizer=config.embedding.spec(), device=config.device
        )
        if isinstance(pool, SharedPool):  # which is opened with its tables
            _refuse_changes_of(pool, config)
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
            scheduler=None if config.scheduler is None else config.scheduler.make(dense_optimizer),
            source=source,
            device=config.device,
            extra={"config": OfAllRanks(plain)},  # but for paths and sizes of each machine
            stopping=stopping,
        )
        on_error.pop_all()
    return trainer


def _try_out(config: RunConfig, source: Source) -> None:
    """Raises, before anything is made, what the parts of the configuration raise for these data."""
    model = config.model.try_out(model_inputs(config, source))
    config.optimizer.make(list(model.parameters()))
    if config.scheduler is not None:
        config.scheduler.check_length(last_step_of(config.train, config.train.epochs * source.num_samples))


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

    return SharedPool(directory, **options, group=config.group.with_ranks(), ranks=ranks, measure=measure)


def _refuse_changes_of(pool: Pool, config: RunConfig) -> None:
    saved = None if pool.is_new else saved_config(pool.dense_state())
    if saved is not None:
        refuse_changes(saved, config)
        if isinstance(pool, SharedPool) and (shards := pool.opened.manifest.num_shards) != config.group.shards:
            raise ConfigError(
                f"group.shards: {config.group.shards}, but the pool is cut into {shards}, and cannot change that: say "
                f"so, or cut a copy of it (holdfast snapshot, then restore --shards {config.group.shards})"
            )
        warn_of_another_device(saved, to_plain(config))


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
    if (saved_plain := saved.get(CONFIG)) is not None:
        refuse_changes(saved_plain, config)
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
