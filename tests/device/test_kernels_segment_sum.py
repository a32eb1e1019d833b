"""Sums of gradients per row: one tree per number of occurrences, in Triton's kernels and in their twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.device import kernels
from holdfast.device.kernels.segment_sum import CHUNK
from kernel_cases import (
    DEVICE,
    DIMS,
    EITHER,
    generator,
    huge,
    in_torch,
    in_triton,
    needs_triton,
    normals,
    numbers,
    same_bits,
    starts_of,
)


def sums_of(
    grad: Tensor, counts: Sequence[int], offsets: Tensor, dim: int, scale: Tensor | None, *, slack: int = 0, **options
) -> Tensor:
    most = max(counts, default=0) + slack
    return kernels.segment_sum(grad, starts_of(counts), offsets, dim, scale=scale, max_occurrences=most, **options)


def tree(values: np.ndarray) -> np.ndarray:
    """float32 [occurrences, dim]: chunks of 64 in order, then of their sums, until one is left."""
    while len(values) > 1:
        values = np.stack([np.add.accumulate(values[i : i + CHUNK])[-1] for i in range(0, len(values), CHUNK)])
    return values[0]


@needs_triton
@given(
    dim=st.sampled_from(DIMS),
    counts=st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 63, 64, 65, 128, 129, 200]), min_size=1, max_size=7),
    scaled=st.booleans(),
    slack=st.sampled_from([0, 1, 5000]),
    seed=st.integers(0, 1 << 20),
)
@settings(derandomize=True, database=None, max_examples=30)
def test_kernel_and_twin_sum_alike(dim, counts, scaled, slack, seed):
    aligned = dim % 4 == 0
    grad = normals(6, dim + 8, seed=seed)
    count = sum(counts)
    offsets = numbers((grad.numel() - dim) // 4, count, seed + 1) * 4 if aligned else numbers(40, count, seed + 1)
    scale = normals(count, seed=seed + 2) if scaled else None

    def add() -> Tensor:
        return sums_of(grad, counts, offsets, dim, scale, slack=slack, alignment=4 if aligned else 1)

    assert same_bits(in_triton(add), in_torch(add))


@pytest.mark.dear
@EITHER
@pytest.mark.parametrize("count", [1, 2, 64, 65, 4095, 4096, 4097, 4161, 9000, 262_145])
def test_a_row_is_summed_by_the_tree_of_its_number_of_occurrences(run, count: int):
    dim = 3 if count < 10_000 else 1
    grad = normals(700, dim, seed=count)
    offsets = numbers(699, 2 * count + 3, count) * dim
    counts = [1, count, 2, min(count, 10_000)]
    found = run(lambda: sums_of(grad, counts, offsets, dim, None))
    rows = grad.cpu().numpy()[offsets.cpu().numpy() // dim]
    begin = 0
    for row, length in enumerate(counts):
        expected = torch.from_numpy(tree(rows[begin : begin + length]))
        assert same_bits(found[row].cpu(), expected), f"row {row} of {length} occurrences"
        begin += length


@pytest.mark.dear
@EITHER
def test_no_bit_depends_on_the_other_rows(run):
    counts = [3, 70, 0, 64, 1, 5000, 65, 1, 1, 128, 4097, 2]
    dim = 4
    grad = normals(300, dim, seed=5)
    offsets = numbers(299, sum(counts), 6) * dim
    scale = normals(sum(counts), seed=7)
    together = run(lambda: sums_of(grad, counts, offsets, dim, scale))
    begin = 0
    for row, count in enumerate(counts):
        own = slice(begin, begin + count)
        alone = run(lambda own=own, count=count: sums_of(grad, [count], offsets[own].clone(), dim, scale[own].clone()))
        assert same_bits(alone[0], together[row]), f"row {row} of {count} occurrences"
        begin += count


@EITHER
def test_rows_without_occurrences_and_no_rows(run):
    grad, none = normals(2, 4, seed=0), torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert run(lambda: sums_of(grad, [], none, 4, None)).shape == (0, 4)
    assert same_bits(run(lambda: sums_of(grad, [0, 0], none, 4, None)), torch.zeros(2, 4, device=DEVICE))


@EITHER
def test_one_row_has_them_all(run):
    count, dim = 20_000, 16
    grad = normals(1, dim, seed=8)
    found = run(lambda: sums_of(grad, [count], torch.zeros(count, dtype=torch.int32, device=DEVICE), dim, None))
    assert torch.allclose(found, count * grad, rtol=1e-5)


@needs_triton
def test_gradients_beyond_two_to_the_31_elements(pool_root: Path):
    width = 1 << 20
    grad = huge(pool_root / "grad", (1 << 11) + 1, width, torch.float32)
    grad[-1] = torch.randn(width, generator=generator(9)).to(DEVICE)
    near = numbers(width - 8, 130, 9)
    offsets = (near.long() + (1 << 31)).to(torch.uint32).view(torch.int32)
    found = in_triton(lambda: sums_of(grad, [130], offsets, 8, None))
    assert same_bits(found, in_torch(lambda: sums_of(grad[-1:].clone(), [130], near, 8, None)))
