"""What a loader hands to the loop: one batch of dense features, sparse ids and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from holdfast.errors import DataError

Bags: TypeAlias = Tensor | tuple[Tensor, Tensor]  # of a feature: see from_bags


class JaggedFeatures:
    """Ragged ids of several features in one pair of tensors, in the shape of TorchRec's ``KeyedJaggedTensor``.

    values:  int64 ``[num_ids]``, feature by feature, sample by sample.
    offsets: int64 ``[num_features * batch_size + 1]``; sample ``b`` of feature ``f`` holds
             ``values[offsets[f * batch_size + b] : offsets[f * batch_size + b + 1]]``.
    weights: float32 ``[num_ids]`` per-sample weights, or None.
    """

    __slots__ = ("_keys", "_offsets", "_values", "_weights")

    def __init__(self, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> None:
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets
        self._weights = weights

    @classmethod
    def from_bags(cls, bags: Mapping[str, Bags]) -> JaggedFeatures:
        """From a mapping of features to their bags, which are one of

        - ids ``[batch_size]``: one a sample, as ``torch.nn.Embedding`` takes them;
        - ids ``[batch_size, length]``: so many a sample, as ``torch.nn.EmbeddingBag`` takes them;
        - a nested tensor of ids, of layout ``torch.jagged``: as many as each sample has;
        - ``(ids, offsets)``, ids ``[num_ids]``, with the offsets of ``torch.nn.EmbeddingBag``: ``[batch_size]``, or
          with a last entry that equals ``num_ids`` (``include_last_offset``).

        Which of the latter two it is, a feature without offsets tells, or else the common length: where the features'
        offsets have two lengths, one apart, the longer ones carry the last entry. Where all have one length, they carry
        it if every feature's last offset equals its ``num_ids``; so a batch whose last bag is empty in every feature
        must be given with the last entry. Ids and offsets are int64 or int32.
        Raises DataError that names the feature whose ids or offsets are of another shape, or do not fit each other.
        """
        given = {key: _ids_and_offsets(key, bag) for key, bag in bags.items()}
        first = next((ids.device for ids, _ in given.values()), None)
        if other := [(key, ids.device) for key, (ids, _) in given.items() if ids.device != first]:
            raise DataError(
                f"feature {other[0][0]!r}: ids on {other[0][1]}, another feature's on {first}: keep all on one"
            )
        batch_size = _common_batch_size(given)
        values: list[Tensor] = []
        starts: list[Tensor] = []
        num_ids = 0
        for key, (ids, offsets) in given.items():
            if offsets is None:
                of_bag = math.prod(ids.shape[1:])
                bag_starts = torch.arange(batch_size, dtype=torch.int64, device=ids.device) * of_bag
            else:
                bag_starts = offsets[:batch_size].to(torch.int64)
                _check_offsets(key, bag_starts, offsets, ids.numel())
            starts.append(bag_starts + num_ids)
            values.append(ids.reshape(-1).to(torch.int64))
            num_ids += ids.numel()
        device = values[0].device if values else None
        starts.append(torch.tensor([num_ids], dtype=torch.int64, device=device))
        all_values = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
        return cls(list(given), all_values, torch.cat(starts))

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def lengths(self) -> Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def stride(self) -> int:
        """The batch size."""
        return (self._offsets.numel() - 1) // max(1, len(self._keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch; batch ``number`` (from 1) is a pure function of (files, seed, number).

    dense: float32 ``[batch_size, num_dense]``; labels: float32 ``[batch_size]``; first_sample: position of the batch's
    first sample in the endless, shuffled stream (epoch after epoch), which is what the cursor counts.
    """

    number: int
    first_sample: int
    dense: Tensor
    features: JaggedFeatures
    labels: Tensor

    @property
    def size(self) -> int:
        return int(self.labels.numel())


def jagged_parts(key: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and offsets of a nested tensor; DataError that names the feature if it is none of bags."""
    if nested.layout != torch.jagged or nested.dim() != 2:
        raise DataError(
            f"feature {key!r}: a nested tensor of ids has two dimensions and the layout torch.jagged, "
            f"not {nested.dim()} and {nested.layout}"
        )
    whole = nested.contiguous()  # ids that a view leaves out are left out
    return whole.values(), whole.offsets()  # type: ignore[attr-defined]


def holds_ids(tensor: Tensor) -> bool:
    """Whether its elements are whole numbers in memory."""
    return tensor.dtype in (torch.int64, torch.int32) and tensor.layout is torch.strided and not tensor.is_meta


def kind_of(tensor: Tensor) -> str:
    """Shape and dtype in words, and what is unusual beside them."""
    unusual = [str(tensor.layout)] if tensor.layout is not torch.strided else []
    return " ".join([str(tuple(tensor.shape)), str(tensor.dtype), *unusual, *(["on meta"] if tensor.is_meta else [])])


def _ids_and_offsets(key: str, bag: object) -> tuple[Tensor, Tensor | None]:
    """What from_bags was given of feature ``key``."""
    if isinstance(bag, Tensor):
        tensors: tuple[Any, ...] = jagged_parts(key, bag) if bag.is_nested else (bag,)
    else:
        tensors = tuple(bag) if isinstance(bag, Iterable) else ()
    if len(tensors) not in (1, 2) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise DataError(
            f"feature {key!r}: its bags are a tensor of ids, [batch_size] or [batch_size, length], or a pair "
            f"(ids, offsets) of tensors, not a {type(bag).__name__}"
        )
    for what, tensor, most in zip(("ids", "offsets"), tensors, (3 - len(tensors), 1), strict=False):
        if not 1 <= tensor.dim() <= most or not holds_ids(tensor):
            raise DataError(
                f"feature {key!r}: {what} must be a {'1-D' if most == 1 else '1-D or 2-D'} int64 or int32 tensor, "
                f"not {kind_of(tensor)}"
            )
        if tensor.device != tensors[0].device:
            raise DataError(
                f"feature {key!r}: ids on {tensors[0].device}, offsets on {tensor.device}: keep both on one"
            )
    return tensors[0], tensors[1] if len(tensors) == 2 else None


def _common_batch_size(bags: Mapping[str, tuple[Tensor, Tensor | None]]) -> int:
    """The batch size that all features agree on; DataError names a feature that does not fit."""
    plain = {key: len(ids) for key, (ids, offsets) in bags.items() if offsets is None}
    lengths = {key: offsets.numel() for key, (_, offsets) in bags.items() if offsets is not None}
    if plain:
        batch_size = next(iter(plain.values()))
        for key, size in plain.items():
            if size != batch_size:
                raise DataError(f"feature {key!r}: ids of {size} samples, where another feature has {batch_size}")
        for key, length in lengths.items():
            if length not in (batch_size, batch_size + 1):
                raise DataError(f"feature {key!r}: {length} offsets, where another feature has {batch_size} samples")
        return batch_size
    if not lengths:
        return 0
    shortest, longest = min(lengths.values()), max(lengths.values())
    if longest - shortest > 1:
        odd = max(lengths, key=lambda key: lengths[key])
        raise DataError(f"feature {odd!r}: {longest} offsets, where another feature has {shortest}")
    if shortest == 0 and longest == 0:
        return 0
    if longest > shortest:
        return shortest
    carries_last = all(offsets is not None and int(offsets[-1]) == ids.numel() for ids, offsets in bags.values())
    return longest - 1 if carries_last else longest


def _check_offsets(key: str, bag_starts: Tensor, offsets: Tensor, num_ids: int) -> None:
    """DataError unless the bags of feature ``key`` begin at 0, never go back, and end within its ids."""
    if offsets.numel() > bag_starts.numel() and int(offsets[-1]) != num_ids:
        raise DataError(f"feature {key!r}: the last offset is {int(offsets[-1])}, but there are {num_ids} ids")
    if bag_starts.numel() == 0:
        if num_ids:
            raise DataError(f"feature {key!r}: {num_ids} ids, but no bag to hold them")
        return
    if int(bag_starts[0]) != 0:
        raise DataError(f"feature {key!r}: offsets begin at {int(bag_starts[0])}, not at 0")
    if bool((bag_starts.diff() < 0).any()) or int(bag_starts[-1]) > num_ids:
        raise DataError(f"feature {key!r}: offsets go back, or beyond the {num_ids} ids")
