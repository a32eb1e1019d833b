"""What a function that builds a model is told of the data, and the function that builds the DLRM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from holdfast.data.source import Feature
from holdfast.models.dlrm import DLRM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model is made for.

    features: the categorical features of the data, in the order of the pooled vectors. embedding_dim: columns of the
    pooled vector of each. num_dense: columns of `dense`; 0 where the data have none.
    """

    features: tuple[Feature, ...]
    embedding_dim: int
    num_dense: int

    @property
    def pooled_width(self) -> int:
        """Columns of all pooled vectors side by side."""
        return len(self.features) * self.embedding_dim


def build_dlrm(
    inputs: ModelInputs,
    embeddings: nn.Module,
    *,
    top: Sequence[int],
    bottom: Sequence[int] = (),
    interaction: Literal["dot", "concat"] = "dot",
) -> DLRM:
    """A DLRM over `embeddings`, whose sizes are those of DLRM. Raises ValueError."""
    return DLRM(
        embeddings=embeddings,
        num_dense=inputs.num_dense,
        embedding_dim=inputs.embedding_dim,
        num_features=len(inputs.features),
        bottom=bottom,
        top=top,
        interaction=interaction,
    )
