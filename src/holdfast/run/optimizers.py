"""The optimizer of a run's dense part and its learning-rate schedule, as [optimizer] and [scheduler] describe them.

Both are classes of PyTorch, by name; the keys of a table are their keyword arguments. What PyTorch thinks of them is
found when the file is read: each is made and stepped once, for a parameter of its own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import ConfigError
from holdfast.files.config import OWN_KEYS, OwnKeys
from holdfast.files.config_text import nearest
from holdfast.run.references import load

_WITH_OUR_DEFAULTS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_REFUSED_OPTIMIZERS = {
    "LBFGS": "it computes each batch several times (a closure), and a step is computed once",
    "SparseAdam": "it takes sparse gradients, and those of the dense part are dense; rows have an optimizer of their "
    "own: embedding.optimizer",
}
_REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "it waits for a measurement to get worse, and a schedule of a run is a function of the step",
    "LRScheduler": "it is the base of the others",
}
_FUNCTIONS = ("lr_lambda", "scale_fn")
_SET_HERE = ("params", "optimizer", "last_epoch", "capturable", "differentiable")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of the dense part.

    name: of torch.optim. lr, weight_decay: as there. momentum: of sgd alone. eps, betas: where it has them; None: its
    default. options: any other keyword argument of the class.
    """

    name: Literal["sgd", "adagrad", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)

    def __post_init__(self) -> None:
        _try_out(self)

    def make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer. Raises ConfigError."""
        allowed = {"sgd": ("momentum",), "adagrad": ("eps",)}.get(self.name, ("eps", "betas"))
        options = given_options("optimizer", self.name, allowed, self)
        keys = OwnKeys.of(self.options, "optimizer")
        ours = {"lr": self.lr, "weight_decay": self.weight_decay, **options}
        return _make(_WITH_OUR_DEFAULTS[self.name], parameters, keys, ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizerConfig:
    """Any other optimizer of torch.optim, with PyTorch's own defaults.

    name: of the class, as PyTorch spells it: `RAdam`, `AdamW`, `Rprop`. Not LBFGS, which computes a batch several
    times, and not SparseAdam. options: its keyword arguments.
    """

    name: str
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)

    @staticmethod
    def is_meant_by(table: Mapping[str, Any]) -> bool:
        """Whether a table [optimizer] is one of these."""
        name = table.get("name")
        return isinstance(name, str) and name not in _WITH_OUR_DEFAULTS

    def __post_init__(self) -> None:
        _try_out(self)

    def make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer. Raises ConfigError."""
        keys = OwnKeys.of(self.options, "optimizer")
        there = _classes(torch.optim, torch.optim.Optimizer)
        kind = _class_of(self.name, there, _REFUSED_OPTIMIZERS, keys, list(_WITH_OUR_DEFAULTS))
        return _make(kind, parameters, keys, {})


AnyOptimizerConfig: TypeAlias = OptimizerConfig | TorchOptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """A schedule of the dense part's learning rate: stepped once a batch, after the optimizer.

    name: of a class of torch.optim.lr_scheduler, as PyTorch spells it. Not ReduceLROnPlateau, which waits for a
    measurement. options: its keyword arguments; of SequentialLR and ChainedScheduler, `schedulers` is an array of such
    tables; a function (`lr_lambda`, `scale_fn`) is named "package.module:function".
    """

    name: str
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)

    def make(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """The schedule of `optimizer`. Raises ConfigError."""
        return _make_scheduler(self.name, OwnKeys.of(self.options, "scheduler"), optimizer)

    def try_out(self, optimizer: AnyOptimizerConfig) -> frozenset[str]:
        """Makes it and steps it; returns the hyperparameters of the optimizer that it sets. Raises ConfigError."""
        live = optimizer.make([_parameter()])
        scheduler = self.make(live)
        with _errors("scheduler", self.name), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                live.step()
                scheduler.step()
        cycles = {"momentum", "betas"} & live.defaults.keys() if "max_momentum" in live.param_groups[0] else set()
        return frozenset({"lr", *cycles})

    def check_length(self, num_steps: int) -> None:
        """Raises ConfigError for a schedule that ends before the last of so many steps."""
        if self.name != "OneCycleLR":
            return
        keys = OwnKeys.of(self.options, "scheduler")
        total = keys.get("total_steps") or keys.get("epochs", 0) * keys.get("steps_per_epoch", 0)
        if total < num_steps:
            raise keys.error("total_steps", f"OneCycleLR ends after {total} steps, and training at step {num_steps}")


def follows(old: AnyOptimizerConfig, new: AnyOptimizerConfig) -> str:
    """Why a state that was made with `old` cannot go on with `new`, in words; empty where it can."""
    optimizer, defaults = old.make([_parameter()]), new.make([_parameter()]).defaults
    optimizer.step()
    for group in optimizer.param_groups:
        group.update(defaults)
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(optimizer).__name__} keeps other state with it ({error!r})"
    return ""


def given_options(section: str, name: str, allowed: Sequence[str], config: Any) -> dict[str, Any]:
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


def _make(
    kind: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], keys: OwnKeys, ours: Mapping[str, Any]
) -> torch.optim.Optimizer:
    _check_keywords(kind, keys)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in keys.items()}
    for name, value in {**ours, **options}.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ConfigError(f"optimizer.{name} = {value}; it must be finite")  # PyTorch takes NaN
    with _errors("optimizer", kind.__name__):
        return kind(parameters, **ours, **options)  # type: ignore[arg-type]


def _make_scheduler(name: str, keys: OwnKeys, optimizer: torch.optim.Optimizer) -> LRScheduler:
    kind = _class_of(name, _classes(torch.optim.lr_scheduler, LRScheduler), _REFUSED_SCHEDULERS, keys, [])
    _check_keywords(kind, keys)
    options: dict[str, Any] = {key: value for key, value in keys.items() if key != "schedulers"}
    for key in _FUNCTIONS:
        if key in options:
            options[key] = load(keys.read(key, str), key, keys)
    if "schedulers" in keys:
        options["schedulers"] = [_make_part(table, optimizer) for table in keys.tables("schedulers")]
    with _errors("scheduler", name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: LRScheduler = kind(optimizer=optimizer, **options)
        return made


def _make_part(table: OwnKeys, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler within another."""
    if "name" not in table:
        raise table.error("name", "missing; it is the class of torch.optim.lr_scheduler")
    name = table.read("name", str)
    return _make_scheduler(name, table.without("name"), optimizer)


def _classes(module: Any, base: type) -> dict[str, Any]:
    """Of the base, by name: those that are public there."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not torch.optim.Optimizer
        if not name.startswith("_")
    }


def _class_of(
    name: str, there: Mapping[str, Any], refused: Mapping[str, str], keys: OwnKeys, others: Sequence[str]
) -> Any:
    if name in refused:
        raise keys.error("name", f"{name} is not for the dense part of a run: {refused[name]}")
    if name not in there:
        known = [each for each in (*there, *others) if each not in refused]
        alike = [each for each in known if each.lower() == name.lower()]
        close = f"did you mean {alike[0]}?" if alike else nearest(name, known)
        raise keys.error("name", f"PyTorch {torch.__version__.split('+')[0]} has no {name!r}; {close}")
    return there[name]


def _check_keywords(kind: Any, keys: OwnKeys) -> None:
    parameters = list(inspect.signature(kind.__init__).parameters)[1:]
    valid = [name for name in parameters if name not in _SET_HERE]
    for name in keys:
        if name not in valid:
            raise keys.error(name, f"unknown key; {nearest(name, valid)} ({kind.__name__} takes {', '.join(valid)})")


def _try_out(config: AnyOptimizerConfig) -> None:
    optimizer = config.make([_parameter()])
    with _errors("optimizer", config.name):
        optimizer.step()


def _parameter() -> nn.Parameter:
    """One that has a gradient."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    return parameter


@contextmanager
def _errors(section: str, name: str) -> Iterator[None]:
    """What PyTorch says of wrong values, as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{section}: {name}: {str(error) or repr(error)}") from error
