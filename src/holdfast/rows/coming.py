"""A batch that was planned before its turn, and what it takes for the plan to be its plan still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.rows.row_access import PlannedFeatures

Tensors = tuple[tuple[Any, Tensor | None, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """The plan of `features`, which had these tensors, each in its so-manieth version (PyTorch counts the changes in
    place)."""

    features: Any
    tensors: Tensors
    planned: PlannedFeatures

    def is_of(self, features: Any) -> bool:
        """Whether the plan is that of `features` as they are now."""
        if features is not self.features:
            return False
        now = tensors_of(features)
        return len(now) == len(self.tensors) and all(
            key == old_key and tensor is old and version == old_version
            for (key, tensor, version), (old_key, old, old_version) in zip(now, self.tensors, strict=True)
        )


def tensors_of(features: Any) -> Tensors:
    """All that a plan is made of."""
    if isinstance(features, Mapping):
        return tuple(
            (key, tensor, tensor._version)
            for key, bags in features.items()
            for tensor in (bags if isinstance(bags, tuple | list) else (bags,))
            if isinstance(tensor, Tensor)
        )
    keys = tuple(features.keys())
    offsets = features.offsets() if hasattr(features, "offsets") else features.lengths()
    return tuple(
        (keys, tensor, -1 if tensor is None else tensor._version)
        for tensor in (features.values(), offsets, features.weights_or_none())
    )
