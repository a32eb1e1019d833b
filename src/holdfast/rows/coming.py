"""A batch that was planned before its turn, and what it takes for the plan to be its plan still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.rows.features import bounds_of
from holdfast.rows.row_access import PlannedFeatures

Tensors = tuple[tuple[Any, Tensor | None, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """The plan of `features`, which had these tensors, each with such contents."""

    features: Any
    tensors: Tensors
    planned: PlannedFeatures

    def is_of(self, features: Any) -> bool:
        """Whether the plan is that of `features` as they are now."""
        if features is not self.features:
            return False
        now = tensors_of(features)
        return len(now) == len(self.tensors) and all(
            key == old_key and tensor is old and contents == old_contents
            for (key, tensor, contents), (old_key, old, old_contents) in zip(now, self.tensors, strict=True)
        )


def tensors_of(features: Any) -> Tensors:
    """All that a plan is made of."""
    if isinstance(features, Mapping):
        return tuple(
            (key, tensor, contents_of(tensor))
            for key, bags in features.items()
            for tensor in (bags if isinstance(bags, tuple | list) else (bags,))
            if isinstance(tensor, Tensor)
        )
    keys = tuple(features.keys())
    return tuple(
        (keys, tensor, -1 if tensor is None else contents_of(tensor))
        for tensor in (features.values(), bounds_of(features), features.weights_or_none())
    )


def contents_of(tensor: Tensor) -> int:
    """Another number when they have changed, through NumPy or by another process, too, of which PyTorch knows nothing;
    of memory that neither reaches, its count is enough."""
    if len(parts := parts_of(tensor)) > 1:
        return hash(tuple(contents_of(part) for part in parts))
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return count_of_changes(tensor)
    return checksum_of(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a nested tensor is made of; of any other itself."""
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    return (tensor,)


def count_of_changes(tensor: Tensor) -> int:
    """As PyTorch has it; of tensors of its inference mode it has none."""
    return 0 if tensor.is_inference() else tensor._version


def checksum_of(array: NDArray[Any]) -> int:
    """Of its bytes, in order."""
    return _core.crc32c(0, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
