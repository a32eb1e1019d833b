"""The network of a run, as [model] describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError


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
