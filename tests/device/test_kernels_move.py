"""Rows between slots, staging and host memory: the bytes that left arrive, in their slot, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.device import kernels
from kernel_cases import (
    DEVICE,
    DIMS,
    DTYPES,
    EITHER,
    generator,
    huge,
    normals,
    numbers,
    same_bits,
)


class HostTables:
    """Tables in host memory that the device may read. A GPU reads it where it is: there, registering is tested."""

    def __init__(self, arrays: list[tuple[Tensor, Tensor | None]]) -> None:
        self.arrays = arrays
        addresses = [[w.data_ptr(), 0 if s is None else s.data_ptr()] for w, s in arrays]
        self.bases = torch.tensor(addresses, device=DEVICE)


def host_array(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    array = torch.randn(*shape, generator=generator(seed)).to(dtype)
    return array if DEVICE == "cpu" else array.pin_memory()


@EITHER
@given(
    dim=st.sampled_from(DIMS),
    state_floats=st.sampled_from([0, 1, 17, 64, 1024]),
    dtype=st.sampled_from(DTYPES),
    num_unique=st.sampled_from([1, 4, 23]),
    share_missing=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 1 << 20),
)
@settings(derandomize=True, database=None, max_examples=40)
def test_rows_arrive_as_they_left(run, dim, state_floats, dtype, num_unique, share_missing, seed):
    slots = torch.randperm(30, generator=generator(seed))[:num_unique].to(torch.int32).to(DEVICE)
    missing = (torch.rand(num_unique, generator=generator(seed + 1)) < share_missing).nonzero().flatten()
    places = slots[missing.to(DEVICE)].long()
    missing = missing.to(torch.int32).to(DEVICE)
    tables = numbers(2, num_unique, seed + 2)
    rows = numbers(50, num_unique, seed + 3).long()
    home = HostTables(
        [
            (
                host_array(50, dim, seed=seed + t, dtype=dtype),
                host_array(50, state_floats, seed=seed + 9 + t, dtype=torch.float32) if state_floats else None,
            )
            for t in range(2)
        ]
    )
    before = normals(30, dim, seed=seed, dtype=dtype)
    state_before = normals(30, state_floats, seed=seed) if state_floats else None

    def from_home() -> tuple[Tensor, Tensor | None]:
        weights, state = before.clone(), None if state_before is None else state_before.clone()
        kernels.gather_home(home.bases, tables, rows, missing, slots, weights, state)
        return weights, state

    def wanted(column: int) -> Tensor:
        of = [(int(tables[u]), int(rows[u])) for u in missing]
        width = (dim, state_floats)[column]
        found = [home.arrays[table][column][row] for table, row in of]
        return torch.stack(found).to(DEVICE) if found else torch.empty(0, width, dtype=(dtype, torch.float32)[column])

    expected, expected_state = before.clone(), None if state_before is None else state_before.clone()
    expected[places] = wanted(0).to(DEVICE)
    if state_floats:
        expected_state[places] = wanted(1).to(DEVICE)
    assert same_bits(run(from_home), (expected, expected_state))

    def out_and_in() -> tuple[Tensor | None, ...]:
        count = missing.numel()
        weights = torch.empty(count, dim, dtype=dtype, device=DEVICE)
        state = torch.empty(count, state_floats, device=DEVICE) if state_floats else None
        kernels.gather_rows(expected, expected_state, places.to(torch.int32), weights, state)
        again, state_again = before.clone(), None if state_before is None else state_before.clone()
        kernels.scatter_rows(weights, state, slots, missing, again, state_again)
        return weights, state, again, state_again

    weights, state, again, state_again = run(out_and_in)
    assert same_bits(weights, expected[places]) and (state is None or same_bits(state, expected_state[places]))
    assert same_bits((again, state_again), (expected, expected_state))


@EITHER
def test_slots_and_home_rows_beyond_two_to_the_31_elements(pool_root: Path, run):
    far = (1 << 24) + 8
    slot_rows = huge(pool_root / "slots", far, 128, torch.float16)
    data = normals(3, 128, seed=1, dtype=torch.float16)
    slots = torch.tensor([far - 1, far - 5, far - 2], dtype=torch.int32, device=DEVICE)
    missing = torch.arange(3, dtype=torch.int32, device=DEVICE)
    run(lambda: kernels.scatter_rows(data, None, slots, missing, slot_rows, None))
    back = torch.empty_like(data)
    run(lambda: kernels.gather_rows(slot_rows, None, slots, back, None))
    assert same_bits(back, data) and same_bits(slot_rows[slots.long()], data)
    if DEVICE == "cpu":
        home = HostTables([(slot_rows, None)])
        near = torch.zeros(3, 128, dtype=torch.float16)
        run(lambda: kernels.gather_home(home.bases, missing * 0, slots.long(), missing, missing, near, None))
        assert same_bits(near, data)


def test_a_gradient_is_finite_or_not():
    values = normals(40, 33, seed=3)
    assert bool(kernels.all_finite(values)) and bool(kernels.all_finite(values[:0]))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 17, 40 * 33 - 1):
            spoiled = values.clone()
            spoiled.view(-1)[place] = wrong
            assert not bool(kernels.all_finite(spoiled)), f"{wrong} at {place}"
    largest = torch.full((7,), torch.finfo(torch.float32).max, device=DEVICE)
    assert bool(kernels.all_finite(largest * torch.tensor([1.0, -1, 1, 1, 1, -1, 1], device=DEVICE)))
