"""Row optimizers: what an update does to a row. FBGEMM's definitions, and its names where TorchRec users know them.

Each is a frozen description. ``EmbeddingBagCollection.optimizer`` is the live object: a ``torch.optim.Optimizer`` whose
``param_groups`` learning-rate schedulers can drive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError, StepError

# In the order of the pool's format (core/kernels/kernels.h, RowOptimizer).
OPTIMIZERS = ("sgd", "exact_row_wise_adagrad", "adagrad", "adam", "partial_row_wise_adam")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizerSpec:
    """Common to all; `kind` is its place in OPTIMIZERS."""

    kind: ClassVar[int]
    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for field in ("lr", "weight_decay", "eps"):
            value = getattr(self, field, 0.0)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{type(self).__name__}: {field} = {value}; it must be finite, and not negative")
        for beta in getattr(self, "betas", ()):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{type(self).__name__}: betas = {self.betas}; each must lie in [0, 1)")  # type: ignore[attr-defined]

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "eps": getattr(self, "eps", 0.0),
            "betas": getattr(self, "betas", (0.0, 0.0)),
            "weight_decay": self.weight_decay,
        }


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
    """Adam on the rows that a step touches, with bias correction by the number of updates (FBGEMM ``ADAM``)."""

    kind: ClassVar[int] = 3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdam(RowOptimizerSpec):
    """Adam with one second moment a row, of mean(g²) (FBGEMM ``PARTIAL_ROWWISE_ADAM``)."""

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

    anchor: Tensor

    def update_rows(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None: ...
    def drop_gradients(self) -> None: ...


class RowOptimizer(torch.optim.Optimizer):
    """The live row optimizer of a collection.

    Its one parameter is the collection's anchor, a scalar that backward gives the gradient 1 (NaN when the row
    gradients are not finite). Whatever multiplies that gradient multiplies the row gradients: so
    ``GradScaler.unscale_`` and ``GradScaler.step`` work as they are, and skip as they should.
    """

    def __init__(self, collection: UpdatesRows, spec: RowOptimizerSpec) -> None:
        super().__init__([collection.anchor], spec.hyperparameters())
        self._collection = collection

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the rows of this step's forward passes and writes them home. Returns what `closure` returns, which is
        called once, before. Raises StepError, with nothing updated, where a schedule has made a setting infinite or
        NaN."""
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
        beta1, beta2 = group["betas"]
        settings = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        for name, value in (*settings.items(), ("betas", beta1), ("betas", beta2)):
            if not math.isfinite(value):
                raise StepError(f"the row optimizer's {name} is {value}: every row of the batch would be, too")
        return {
            "learning_rate": settings["lr"],
            "epsilon": settings["eps"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": settings["weight_decay"],
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the row gradients that were accumulated since the last step."""
        super().zero_grad(set_to_none=set_to_none)
        self._collection.drop_gradients()
