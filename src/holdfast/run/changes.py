"""What a run's file may change from one start to the next on the same pool.

Once a pool is there, its run's configuration lies in it (`extra["config"]` of the dense state). On resume every field
is compared with it: what may change is listed in CHANGEABLE; any other change is refused, by name. A hyperparameter of
an optimizer that the file changed since then is applied from the next step on; one that it did not change keeps
whatever value it has come to. Refused, too, are those that the state of an optimizer cannot follow (amsgrad, centered),
and those that a [scheduler] sets: the learning rate is a function of the step then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from holdfast.errors import ConfigError
from holdfast.files.config import differences, read_value, to_plain
from holdfast.run.optimizers import AnyOptimizerConfig, follows
from holdfast.run.sections import RunConfig
from holdfast.state import state_tree
from holdfast.state.provenance import warn_of_changes

CONFIG = "extra['config']"  # where Checkpoint keeps it
_OF_ORDER = (
    "train.lanes",
    "train.shuffle",
)  # another with new data, and then alone: the loader compares
_OF_IDS = ("criteo", "synthetic")  # data all of whose tables' ids are made of their number of rows, but for keys
_DEVICE_SETTINGS = "device_settings"  # there, too, in pools from before a state had a record of its provenance

# Fields that may differ from those that the pool was made with, and the sections all of whose fields may.
CHANGEABLE = (
    "data.criteo.paths",  # the loader compares what is in the files, wherever they lie
    "data.parquet.paths",
    "data.path",  # where data.source names a function: a fingerprint says what is there
    "data.paths",
    "validation",
    "embedding.lr",
    "embedding.eps",
    "embedding.betas",
    "embedding.weight_decay",
    "optimizer",  # but for its name
    "pool.dense_interval",
    "pool.dial",
    "pool.log",  # likewise
    "pool.log_bytes",
    "pool.medium",  # Pool compares it with how its rows are kept
    "pool.row_checksums",  # likewise
    "pool.scratchpad_bytes",
    "pool.scratchpad_nodes",
    "pool.synchronous",
    "pool.victims",
    "group.shards",  # of a pool of one process; a group's compares it with its own
    "group.timeout",
    "group.shared_memory",
    "device",  # the pool does not care; the bits of the steps to come do
    _DEVICE_SETTINGS,
    "train.batch_size",  # positions in the data count samples
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
    "train.new_data",
)


def saved_config(dense_state: tuple[bytes, bytes] | None) -> dict[str, Any] | None:
    """The configuration of the run that wrote a pool's dense state; None where there is none."""
    if dense_state is None:
        return None
    saved = state_tree.unpack(*dense_state).get(CONFIG)
    return saved if isinstance(saved, dict) else None


def refuse_changes(saved: Mapping[str, Any], config: RunConfig) -> None:
    """ConfigError for the first field that differs and cannot."""
    plain = to_plain(config)
    saved = {**{section: plain[section] for section in ("group", "device")}, **saved}  # of before there were these
    if (saved["device"].get("dial") is None) != (config.device.dial is None):
        raise ConfigError(
            "device.dial: a pool is trained with a declared accelerator, which learns nothing, from its first step on "
            "or never: start a new pool"
        )
    saved["train"] = {"lanes": 1, **saved.get("train", {})}
    owned = frozenset() if config.scheduler is None else config.scheduler.try_out(config.optimizer)
    changes = differences(saved, plain)
    names = [line.partition(":")[0] for line in changes]
    for name, line in zip(names, changes, strict=True):
        may_change = any(name == allowed or name.startswith(f"{allowed}.") for allowed in CHANGEABLE)
        may_change = may_change or _is_number_of_rows(name, plain) or (config.train.new_data and name in _OF_ORDER)
        if not may_change or name == "optimizer.name":
            raise ConfigError(f"{line}, but a pool cannot change that: go back to the old value, or start a new pool")
        if name.startswith("optimizer.") and name.removeprefix("optimizer.") in owned:
            raise ConfigError(
                f"{line}, but [scheduler] sets it in every step: go back to the old value, or start a new pool"
            )
    of_optimizer = [line for line in changes if line.startswith("optimizer.")]
    if of_optimizer and (reason := follows(_saved_optimizer(saved), config.optimizer)):
        raise ConfigError(f"{of_optimizer[0]}, but {reason}: go back to the old value, or start a new pool")


def refuse_rows(saved: Mapping[str, Any], tables: Iterable[str]) -> None:
    """ConfigError for the first table whose number of rows the run of `saved` could not change: an id is made of the
    number there, so with another one it would find another row."""
    data = saved.get("data", {})
    if parquet := data.get("parquet"):
        are_fixed = {name for name, column in parquet["sparse"].items() if not _counts_alone(column)}
    else:
        are_fixed = set(tables) if any(data.get(kind) and not data[kind].get("keys") for kind in _OF_IDS) else set()
    for table in tables:
        if table in are_fixed:
            raise ConfigError(
                f"table '{table}': its run makes ids of its number of rows, by a hash or a draw, so with another one "
                "every id would find another row, and holdfast train refuses that: begin the table anew with holdfast "
                f"export and holdfast import --new {table}, or give the column keys = true from its first step on"
            )


def _is_number_of_rows(name: str, plain: Mapping[str, Any]) -> bool:
    """Whether the field is the number of rows of a column's table that the pool alone compares with its own."""
    section, _, field = name.rpartition(".")
    column: Any = plain
    for part in section.split("."):
        column = column.get(part) if isinstance(column, Mapping) else None
    return field == "num_embeddings" and isinstance(column, Mapping) and _counts_alone(column)


def _counts_alone(column: Mapping[str, Any]) -> bool:
    """Of a column whose values are keys, or ids already. A value that is hashed goes elsewhere with another number."""
    return bool(column.get("keys")) or column.get("hashing") == "identity"


def _saved_optimizer(saved: Mapping[str, Any]) -> AnyOptimizerConfig:
    given = {name: value for name, value in saved["optimizer"].items() if value is not None}
    optimizer: AnyOptimizerConfig = read_value(AnyOptimizerConfig, {**given}, "the pool's optimizer")
    return optimizer


def warn_of_another_device(saved: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
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
