"""The network of a run, as [model] describes it: the DLRM, or what a function of the user's builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.files.config import OWN_KEYS, UNRECORDED, OwnKeys
from holdfast.models import ModelInputs, build_dlrm
from holdfast.rows.embedding import PooledFeatures
from holdfast.rows.row_access import LookedUp
from holdfast.run.references import call

_TRIAL_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DLRM.

    kind: may be left out. bottom, top: sizes of the MLPs' layers, without their input; bottom ends in embedding.dim,
    top in 1; without dense columns there is no bottom, and the embeddings interact among themselves. interaction: of
    the embeddings and the bottom MLP's output: their dot products, or all of them side by side.
    """

    kind: Literal["dlrm"] = field(default="dlrm", metadata=UNRECORDED)
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...]
    interaction: Literal["dot", "concat"] = "dot"

    def __post_init__(self) -> None:
        for name in ("bottom", "top"):
            sizes = getattr(self, name)
            if min(sizes, default=1) < 1 or (name == "top" and not sizes):
                raise ConfigError(f"model.{name} = {list(sizes)}; it must be one or more sizes, each at least 1")
        if self.top[-1] != 1:
            raise ConfigError(f"model.top = {list(self.top)}; its last size must be 1, the logit")

    def make(self, inputs: ModelInputs, embeddings: nn.Module) -> nn.Module:
        """The network. Raises ConfigError where it does not fit the data."""
        if inputs.num_dense < 1 and self.bottom:
            raise ConfigError(
                f"model.bottom = {list(self.bottom)}: the data have no dense columns for a bottom MLP; leave it out"
            )
        if inputs.num_dense > 0 and not self.bottom:
            raise ConfigError(
                f"model.bottom: the data have {inputs.num_dense} dense columns, so it is needed; its last size must be "
                f"embedding.dim = {inputs.embedding_dim}"
            )
        try:
            return build_dlrm(inputs, embeddings, bottom=self.bottom, top=self.top, interaction=self.interaction)
        except ValueError as error:
            raise ConfigError(f"model: {error}") from error

    def try_out(self, inputs: ModelInputs) -> nn.Module:
        """One without values. Raises ConfigError where it does not fit the data."""
        with torch.device("meta"):
            return self.make(inputs, StandIn(inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModelConfig:
    """A model of your own: what a function returns.

    build: "package.module:function", of a module beside the file, in the working directory, or installed. It is called
    with `holdfast.models.ModelInputs` and the embeddings. options: whatever keyword arguments the function has.
    """

    build: str
    options: OwnKeys = field(default_factory=OwnKeys, metadata=OWN_KEYS)

    @staticmethod
    def is_meant_by(table: Mapping[str, Any]) -> bool:
        """Whether a table [model] is one of these."""
        return "build" in table

    def make(self, inputs: ModelInputs, embeddings: nn.Module) -> nn.Module:
        """The network. Raises ConfigError, and what the function raises."""
        keys = OwnKeys.of(self.options, "model")
        model = call(self.build, "build", [("inputs", inputs), ("embeddings", embeddings)], keys)
        if not isinstance(model, nn.Module):
            raise keys.error("build", f"{self.build} returned a {type(model).__name__}; it must return an nn.Module")
        return model

    def try_out(self, inputs: ModelInputs) -> nn.Module:
        """One that is thrown away, over a stand-in, which has computed a few samples. Raises ConfigError for what the
        loop cannot work with, and what the model raises."""
        embeddings = StandIn(inputs)
        model = self.make(inputs, embeddings)
        keys = OwnKeys.of(self.options, "model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise keys.error("build", f"{self.build} returned a model without parameters to train: give it a bias")
        if lazy := [
            name for name, parameter in model.named_parameters() if isinstance(parameter, nn.UninitializedParameter)
        ]:
            raise keys.error("build", f"{lazy[0]} has no size before the first batch: give it one, see ModelInputs")
        pooled = torch.zeros(_TRIAL_SAMPLES, inputs.pooled_width, requires_grad=True)
        dense = torch.zeros(_TRIAL_SAMPLES, inputs.num_dense)
        try:
            logits = model(dense, LookedUp(pooled))
        except Exception as error:
            error.add_note(
                f"holdfast called the model of model.build = {self.build!r} with dense {tuple(dense.shape)} and pooled "
                f"embeddings {tuple(pooled.shape)}, to see that it fits the data; nothing was made"
            )
            raise
        if problem := _problem(logits, pooled, embeddings):
            raise keys.error("build", f"forward of the model of {self.build} {problem}")
        return model


def _problem(logits: Any, pooled: Tensor, embeddings: StandIn) -> str:
    """What is wrong with what a model's forward returned; empty where nothing is."""
    wanted = f"a floating tensor of shape ({_TRIAL_SAMPLES},), one logit a sample, is needed"
    if not isinstance(logits, Tensor):
        return f"returned a {type(logits).__name__}: {wanted}"
    if logits.shape != (_TRIAL_SAMPLES,) or not logits.is_floating_point():
        close = ": return logits.squeeze(1)" if logits.shape == (_TRIAL_SAMPLES, 1) else ""
        return f"returned {logits.dtype} of shape {tuple(logits.shape)}, where {wanted}{close}"
    if not embeddings.is_used:
        return "never called embeddings(features): the rows would not be trained"
    reaches = logits.requires_grad and torch.autograd.grad(logits.sum(), pooled, allow_unused=True)[0] is not None
    return "" if reaches else "lets no gradient through to the embeddings: the rows would not be trained"


class StandIn(nn.Module):
    """Embeddings without tables, for vectors that are pooled already; as an EmbeddingBagCollection otherwise."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self._keys = [feature.name for feature in inputs.features]
        self._dims = [inputs.embedding_dim] * len(self._keys)
        self.is_used = False

    def keys(self) -> list[str]:
        """The features in the order of the output."""
        return self._keys

    @property
    def output_width(self) -> int:
        """Columns of the pooled output."""
        return sum(self._dims)

    def forward(self, features: Any) -> PooledFeatures:
        if not isinstance(features, LookedUp):
            raise ConfigError(
                f"model.build: forward gave embeddings a {type(features).__name__}; give them the features that "
                "forward was given, as they are"
            )
        self.is_used = True
        return PooledFeatures(self._keys, self._dims, features.values)
