"""Pooled lookups and the gradients of per-sample weights: Triton's kernels and their twins, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.device import kernels
from kernel_cases import (
    DEVICE,
    DIMS,
    DTYPES,
    Lookups,
    huge,
    in_torch,
    in_triton,
    needs_triton,
    normals,
    numbers,
    same_bits,
)

LENGTHS = st.sampled_from([[0], [1], [0, 1, 2, 5], [3], [0, 0, 0, 21], [8, 9, 80]])


def pooled(weights: Tensor, batch: Lookups, *, mean: bool, alignment: int = 1) -> Tensor:
    out = torch.full((batch.samples, batch.width), 7.0, device=DEVICE)
    kernels.pooled_lookup(
        weights,
        batch.slots,
        batch.bag_start,
        batch.columns,
        out,
        scale=batch.scale,
        mean=mean,
        alignment=alignment,
    )
    return out


@needs_triton
@given(
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    lengths=LENGTHS,
    features=st.integers(1, 3),
    samples=st.integers(1, 7),
    gap=st.sampled_from([0, 3, 4]),
    scaled=st.booleans(),
    mean=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(derandomize=True, database=None, max_examples=60)
def test_kernel_and_twin_pool_and_differentiate_alike(dim, dtype, lengths, features, samples, gap, scaled, mean, seed):
    chosen = [lengths[i] for i in numbers(len(lengths), features * samples, seed)]
    batch = Lookups.random(num_slots=40, dim=dim, lengths=chosen, features=features, scaled=scaled, gap=gap, seed=seed)
    weights = normals(40, dim, seed=seed, dtype=dtype)
    alignment = 4 if dim % 4 == 0 and gap % 4 == 0 else 1

    def pool() -> Tensor:
        return pooled(weights, batch, mean=mean, alignment=alignment)

    assert same_bits(in_triton(pool), in_torch(pool))
    grad = normals(samples, batch.width, seed=seed + 2)

    def differentiate() -> Tensor:
        return kernels.scale_gradients(
            weights, batch.slots, batch.bag_start, batch.columns, grad, mean=mean, alignment=alignment
        )

    assert same_bits(in_triton(differentiate), in_torch(differentiate))


@pytest.mark.parametrize("run", [pytest.param(in_triton, marks=needs_triton), in_torch])
def test_other_columns_are_left_and_empty_bags_give_zeros(run):
    batch = Lookups.random(num_slots=9, dim=5, lengths=[0, 2, 0, 0], features=2, scaled=False, gap=2, seed=1)
    out = run(lambda: pooled(normals(9, 5, seed=1), batch, mean=True))
    assert bool((out[:, :2] == 7).all()) and bool((out[:, 7:9] == 7).all()), "gaps"
    assert bool((out[0, 9:14] == 0).all()) and bool((out[:, 2:7] == 0).all()), "empty bags"
    assert bool((out[1, 9:14] != 0).all())


@pytest.mark.parametrize("run", [pytest.param(in_triton, marks=needs_triton), in_torch])
def test_no_bit_depends_on_slots_or_on_other_bags(run):
    lengths = [5, 0, 70, 2, 1, 33]
    batch = Lookups.random(num_slots=50, dim=20, lengths=lengths, features=1, scaled=True, gap=0, seed=2)
    weights = normals(50, 20, seed=2)
    all_bags = run(lambda: pooled(weights, batch, mean=True))
    elsewhere = torch.randperm(90)[:50].to(DEVICE)
    moved = torch.full((90, 20), float("nan"), device=DEVICE)
    moved[elsewhere] = weights
    for bag, length in enumerate(lengths):
        span = slice(int(batch.bag_start[bag]), int(batch.bag_start[bag + 1]))
        alone = Lookups(
            slots=elsewhere[batch.slots[span].long()].to(torch.int32),
            bag_start=torch.tensor([0, length], dtype=torch.int32, device=DEVICE),
            columns=batch.columns,
            scale=batch.scale[span].clone(),
            samples=1,
            width=20,
        )
        found = run(lambda alone=alone: pooled(moved, alone, mean=True))
        assert same_bits(found[0], all_bags[bag]), f"bag {bag} of {length}"


@pytest.mark.parametrize("run", [pytest.param(in_triton, marks=needs_triton), in_torch])
def test_nothing_to_look_up(run):
    weights = normals(3, 4, seed=0)
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    for samples in (0, 3):
        start = torch.zeros(samples + 1, dtype=torch.int32, device=DEVICE)
        batch = Lookups(empty, start, empty.new_zeros(1), None, samples, 4)
        assert bool((run(lambda batch=batch: pooled(weights, batch, mean=False)) == 0).all())
        grad = torch.ones(samples, 4, device=DEVICE)
        found = run(
            lambda start=start, grad=grad: kernels.scale_gradients(
                weights, empty, start, empty.new_zeros(1), grad, mean=True
            )
        )
        assert found.shape == (0,)


@needs_triton
def test_rows_beyond_two_to_the_31_elements(pool_root: Path):
    num_slots = (1 << 24) + 8
    weights = huge(pool_root / "weights", num_slots, 128, torch.float16)
    weights[-8:] = normals(8, 128, seed=3, dtype=torch.float16)
    batch = Lookups.random(num_slots=8, dim=128, lengths=[3, 2], features=1, scaled=False, gap=0, seed=3)
    far = Lookups(batch.slots + (num_slots - 8), batch.bag_start, batch.columns, None, 2, 128)
    near_rows = weights[-8:].clone()
    assert same_bits(in_triton(lambda: pooled(weights, far, mean=False)), pooled(near_rows, batch, mean=False))
    grad = normals(2, 128, seed=4)
    found, expected = (
        in_triton(
            lambda rows=rows, slots=slots: kernels.scale_gradients(
                rows, slots, batch.bag_start, batch.columns, grad, mean=False
            )
        )
        for rows, slots in ((weights, far.slots), (near_rows, batch.slots))
    )
    assert same_bits(found, expected)
