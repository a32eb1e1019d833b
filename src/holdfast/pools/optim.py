"""Row optimizers: what an update does to a row. FBGEMM's definitions, and its names where TorchRec users know them.

Each is a frozen description. ``EmbeddingBagCollection.optimizer`` is the live object: a ``torch.optim.Optimizer`` whose
``param_groups`` learning-rate schedulers can drive.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError, StateError, StepError

_NEEDED = "lr, eps, weight_decay are numbers, betas two of them"

# In the order of the pool's format (core/kernels/kernels.h, RowOptimizer).
OPTIMIZERS = ("sgd", "exact_row_wise_adagrad", "adagrad", "adam", "partial_row_wise_adam")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizerSpec:
    """Common to all; `kind` is its place in OPTIMIZERS. Raises ConfigError for settings that are no numbers, or with
    which rows would become none."""

    kind: ClassVar[int]
    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        kind, given = type(self).__name__, self.hyperparameters()
        try:
            settings = _float32_settings(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{kind}: {given}: {_NEEDED}") from error
        for field in ("lr", "weight_decay", "eps"):
            if not 0.0 <= settings[field] < math.inf:
                raise ConfigError(f"{kind}: {field} = {given[field]}; it must be finite, and not negative")
        if hasattr(self, "eps") and settings["eps"] == 0.0:
            raise ConfigError(
                f"{kind}: eps = {given['eps']}; a row whose gradient is 0 would be NaN: give it some more"
            )
        if not _are_betas(settings):
            raise ConfigError(f"{kind}: betas = {given['betas']}; each must lie in [0, 1)")

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "eps": getattr(self, "eps", 0.0),
            "betas": getattr(self, "betas", (0.0, 0.0)),
            "weight_decay": self.weight_decay,
        }


def _float32_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """What hyperparameters are to the rows, whose arithmetic is float32: 0.99999999 is 1, 1e39 is infinite. Raises
    TypeError, ValueError, RuntimeError where they are no numbers."""
    beta1, beta2 = group["betas"]
    given = {name: group[name] for name in ("lr", "eps", "weight_decay")} | {"beta1": beta1, "beta2": beta2}
    return {name: ctypes.c_float(value).value for name, value in given.items()}


def _are_betas(settings: Mapping[str, float]) -> bool:
    return all(0.0 <= settings[name] < 1.0 for name in ("beta1", "beta2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(RowOptimizerSpec):
    """w -= lr · g (FBGEMM ``EmbOptimType.EXACT_SGD``)."""

    kind: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad(RowOptimizerSpec):
    """One accumulator a row: m += mean(g²); w -= lr · g / (sqrt(m) + eps) (FBGEMM ``EXACT_ROWWISE_ADAGRAD``)."""

    kind: ClassVar[int] = 1
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(RowOptimizerSpec):
    """One accumulator an element: m += g²; w -= lr · g / (sqrt(m) + eps) (FBGEMM ``EXACT_ADAGRAD``)."""

    kind: ClassVar[int] = 2
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(RowOptimizerSpec):
    """Adam on the rows that a step touches, with bias correction by the number of updates (FBGEMM ``ADAM``). Its weight
    decay is AdamW's, apart from the gradient; SGD's and Adagrad's is added to that."""

    kind: ClassVar[int] = 3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdam(RowOptimizerSpec):
    """Adam with one second moment a row, of mean(g²) (FBGEMM ``PARTIAL_ROWWISE_ADAM``); weight decay as there."""

    kind: ClassVar[int] = 4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


def check_spec(wanted: object) -> RowOptimizerSpec:
    """What was asked for. Raises ConfigError where it is none of rows."""
    if isinstance(wanted, RowOptimizerSpec):
        return wanted
    what = wanted.__name__ if isinstance(wanted, type) else type(wanted).__name__
    raise ConfigError(f"optimizer = {what}; it must be a row optimizer with its settings, as holdfast.SGD(lr=0.1)")


class UpdatesRows(Protocol):
    """What a row optimizer steps: a collection, or a rank's share of one."""

    @property
    def anchor(self) -> Tensor: ...

    def update_rows(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None: ...
    def drop_gradients(self) -> None: ...


class RowOptimizer(torch.optim.Optimizer):
    """The live row optimizer of a collection.

    Its one parameter is the collection's anchor, a scalar that backward gives the gradient 1 (NaN when the row
    gradients are not finite). Whatever multiplies that gradient multiplies the row gradients: so
    ``GradScaler.unscale_`` and ``GradScaler.step`` work as they are, and skip as they should. Its norm is the norm of
    the row gradients, for ``torch.nn.utils.clip_grad_norm_``.
    """

    def __init__(self, collection: UpdatesRows, spec: RowOptimizerSpec) -> None:
        super().__init__([collection.anchor], spec.hyperparameters())
        self._collection = collection

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the rows of this step's forward passes and writes them home. Returns what `closure` returns, which is
        called once, before. Raises StepError, with nothing updated, where a schedule has made a setting no number,
        infinite or NaN, or a beta 1."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        anchor = self.param_groups[0]["params"][0]
        if anchor.grad is not None:
            self._collection.update_rows(gradient_scale=anchor.grad, **self._settings())
        return loss

    def _settings(self) -> dict[str, float]:
        group = self.param_groups[0]
        try:
            settings = _float32_settings(group)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            given = {name: value for name, value in group.items() if name != "params"}
            raise StepError(f"the row optimizer has {given}: {_NEEDED}") from error
        for name, value in settings.items():
            if not math.isfinite(value):
                raise StepError(f"the row optimizer's {name} is {value}: every row of the batch would be, too")
        if not _are_betas(settings):
            raise StepError(f"the row optimizer's betas are {group['betas']}; each must lie in [0, 1)")
        return {
            "learning_rate": float(group["lr"]),
            "epsilon": float(group["eps"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "weight_decay": float(group["weight_decay"]),
        }

    def __getstate__(self) -> NoReturn:
        raise StateError("a row optimizer is neither copied nor pickled, it is its collection's: keep its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes the anchor alone, when it is made. Raises ConfigError for anything else."""
        if self.param_groups:
            raise ConfigError(
                "add_param_group: a row optimizer updates the rows of its collection and nothing else; give parameters "
                "of the dense part to an optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the row gradients that were accumulated since the last step."""
        super().zero_grad(set_to_none=set_to_none)
        self._collection.drop_gradients()
