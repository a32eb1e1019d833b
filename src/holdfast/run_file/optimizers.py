"""The optimizer of a run's dense part, as [optimizer] describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from holdfast.errors import ConfigError


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
        options = given_options("optimizer", self.name, allowed, self)
        try:
            return kinds[self.name](parameters, lr=self.lr, weight_decay=self.weight_decay, **options)
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}") from error


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
