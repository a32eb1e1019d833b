"""What the tests of kernels share: both implementations side by side, random batches, and arrays larger than memory.

A batch's indexes are made from (seed, shape) alone; a failure names them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import using

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [1, 2, 3, 8, 15, 16, 17, 33, 64, 100, 128, 257, 512]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def same_bits(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (left, right)]
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(*bits)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return left is None and right is None


def in_triton(function: Callable[[], object]) -> object:
    with using("triton"):
        return function()


def in_torch(function: Callable[[], object]) -> object:
    with using("twin"):
        return function()


EITHER = pytest.mark.parametrize("run", [pytest.param(in_triton, marks=needs_triton), in_torch])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(high: int, count: int, seed: int) -> Tensor:
    """int32 ``[count]`` in [0, high)."""
    return torch.randint(0, max(1, high), (count,), generator=generator(seed), dtype=torch.int32).to(DEVICE)


def normals(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype).to(DEVICE)


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


@dataclass(frozen=True)
class Lookups:
    """A group's lookups of a batch: features side by side, with a gap before each, in an output of `width` columns."""

    slots: Tensor
    bag_start: Tensor
    columns: Tensor
    scale: Tensor | None
    samples: int
    width: int

    @classmethod
    def random(
        cls, *, num_slots: int, dim: int, lengths: Sequence[int], features: int, scaled: bool, gap: int, seed: int
    ) -> Lookups:
        bag_start = starts_of(lengths)
        count = int(bag_start[-1])
        columns = torch.arange(features, dtype=torch.int32).flip(0) * (dim + gap) + gap
        return cls(
            slots=numbers(num_slots, count, seed),
            bag_start=bag_start,
            columns=columns.to(DEVICE),
            scale=normals(count, seed=seed + 1) if scaled else None,
            samples=len(lengths) // features,
            width=features * (dim + gap),
        )


def huge(path: Path, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """``[rows, width]`` of which only what is touched takes memory, where the CPU computes."""
    if DEVICE == "cpu":
        return torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype).view(rows, width)
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs a GPU with 32 GiB")
    return torch.empty(rows, width, dtype=dtype, device=DEVICE)
