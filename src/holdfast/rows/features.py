"""Features of a batch, as collections take them: their ids, and the processor's memory, in which a plan reads these."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.batch import Bags, JaggedFeatures
from holdfast.errors import DataError, level_of_caller


@runtime_checkable
class KeyedJagged(Protocol):
    """The part of TorchRec's ``KeyedJaggedTensor`` that is used."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


def bounds_of(jagged: Any) -> Tensor:
    """Its offsets, or what it has in place of them: the lengths."""
    bounds: Tensor = jagged.offsets() if hasattr(jagged, "offsets") else jagged.lengths()
    return bounds


def offsets_of(jagged: KeyedJagged) -> Tensor:
    if hasattr(jagged, "offsets"):
        return jagged.offsets()
    lengths = bounds_of(jagged)
    return torch.cat((torch.zeros(1, dtype=torch.int64, device=lengths.device), lengths.cumsum(0)))


def on_host(features: KeyedJagged | Mapping[str, Bags], wanted: Iterable[str]) -> KeyedJagged | Mapping[str, Bags]:
    """`features` themselves where their ids are in the host's memory; else those of them that are wanted, copied, with
    a warning: each copy waits for all that the device has been asked for. Per-sample weights stay where they are."""
    if isinstance(features, Mapping):
        bags = {feature: features[feature] for feature in wanted}
        if not any(_is_far(tensor) for bag in bags.values() for tensor in _tensors_of(bag)):
            return features
        _warn_of_copies()
        return {feature: _copied(bag) for feature, bag in bags.items()}
    if not (_is_far(features.values()) or _is_far(bounds_of(features))):
        return features
    _warn_of_copies()
    ids, offsets = features.values().cpu(), offsets_of(features).cpu()
    return JaggedFeatures(list(features.keys()), ids, offsets, features.weights_or_none())


def plain(tensor: Tensor, what: str, dtype: torch.dtype | None) -> NDArray[Any]:
    """A tensor of numbers of that kind as the core takes it. Raises DataError where it is another one."""
    if tensor.is_meta:
        raise DataError(f"{what} are on the meta device, where tensors have no elements")
    if tensor.layout is not torch.strided:
        raise DataError(f"{what} are of layout {tensor.layout}; those of a plain tensor are needed (to_dense())")
    if dtype is not None:
        if tensor.dtype.is_floating_point != dtype.is_floating_point or tensor.dtype.is_complex:
            raise DataError(f"{what} are {tensor.dtype}; {dtype} is needed")
        tensor = tensor.to(dtype)
    array: NDArray[Any] = tensor.cpu().contiguous().numpy()
    return array


def _is_far(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _tensors_of(bags: Any) -> list[Tensor]:
    parts = bags if isinstance(bags, tuple | list) else (bags,)
    return [part for part in parts if isinstance(part, Tensor)]


def _copied(bags: Any) -> Any:
    if isinstance(bags, tuple | list):
        return tuple(_copied(part) for part in bags)
    return bags.cpu() if isinstance(bags, Tensor) and _is_far(bags) else bags


def _warn_of_copies() -> None:
    warnings.warn(
        "ids lie on a device: a plan reads them on the processor, so each forward pass copies them there, and waits "
        "for all that the device has been asked for. Leave ids in the host's memory, and move the rest of a batch (a "
        "trainer that moves whole batches has a hook for that)",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )
