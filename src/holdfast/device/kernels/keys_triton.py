"""The kernel of keys.py, and what the update kernel does with records."""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.device.kernels.dispatch import device_of
from holdfast.device.kernels.keys import RECORD_FLOATS, InitialValues, initial_key
from holdfast.device.kernels.rounding_triton import absorb, element_bits, nearest_bfloat16
from holdfast.device.kernels.rows_triton import row_pointers
from holdfast.device.kernels.tiles import LAUNCH, block_of, tile_of

_VARYING = ["num_rows", "key_of_seed"]
_INDEXES = ["slots", "keys", "tables", "oldest", "low", "span", "largest"]
_RECORD_FLOATS = tl.constexpr(RECORD_FLOATS)


def start_keys(
    weights: Tensor, state: Tensor, slots: Tensor, keys: Tensor, tables: Tensor, oldest: Tensor, initial: InitialValues
) -> None:
    tile = tile_of(weights.shape[1], elements_per_thread=8)
    with device_of(weights):
        _start_keys[(tile.programs(slots.numel()),)](
            weights,
            state,
            state.view(torch.int32),
            slots,
            keys,
            tables,
            oldest,
            initial.low,
            initial.span,
            initial.largest,
            slots.numel(),
            initial_key(initial.seed),
            largest_finite=0.0 if weights.dtype == torch.float32 else torch.finfo(weights.dtype).max,
            rows=tile.rows,
            dim=weights.shape[1],
            block=tile.block,
            state_floats=state.shape[1],
            state_block=block_of(state.shape[1]),
            **LAUNCH,
        )


@triton.jit
def load_record(records, row, inside, state_floats):
    """Keys, steps and numbers of updates of rows ``[rows]`` of an array ``[…, state_floats]``: int64 each. records: the
    state as int32."""
    at = records + (row.to(tl.int64) + 1) * state_floats - _RECORD_FLOATS
    low = tl.load(at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(at + 1, mask=inside, other=0).to(tl.int64) << 32
    step = tl.load(at + 2, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    updates = tl.load(at + 3, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    return low | high, step, updates


@triton.jit
def store_record(records, row, inside, state_floats, key, step, updates):
    at = records + (row.to(tl.int64) + 1) * state_floats - _RECORD_FLOATS
    tl.store(at, key.to(tl.int32), mask=inside)
    tl.store(at + 1, (key >> 32).to(tl.int32), mask=inside)
    tl.store(at + 2, tl.zeros_like(key).to(tl.int32) + step.to(tl.int32), mask=inside)
    tl.store(at + 3, updates.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _start_keys(
    weights,
    state,
    records,
    slots,
    keys,
    tables,
    oldest,
    low,
    span,
    largest,
    num_rows,
    key_of_seed: tl.int64,
    largest_finite: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    state_floats: tl.constexpr,
    state_block: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    key = tl.load(keys + row, mask=inside, other=0)
    table = tl.load(tables + row, mask=inside, other=0)
    of_key, step, updates = load_record(records, slot, inside, state_floats)
    # Several threads may hold one record, and one of them is going to store.
    tl.debug_barrier()
    counts = (updates != 0) & (of_key == key) & (step >= tl.load(oldest + row, mask=inside, other=0))
    begins = inside & (counts == 0)

    column = tl.arange(0, block)[None, :]
    none = tl.zeros_like(key).to(tl.uint64)
    row_key = absorb(none + key_of_seed.to(tl.uint64), table.to(tl.uint64))
    row_key = absorb(row_key, key.to(tl.uint64))
    bits = element_bits(row_key[:, None], column.to(tl.uint32))
    uniform = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
    lowest = tl.load(low + table, mask=inside, other=0.0)[:, None]
    widths = tl.load(span + table, mask=inside, other=0.0)[:, None]
    most = tl.load(largest + table, mask=inside, other=0.0)[:, None]
    value = tl.minimum(lowest + widths * uniform, most)
    if largest_finite != 0.0:
        value = tl.minimum(tl.maximum(value, -largest_finite), largest_finite)
    value = nearest_bfloat16(value) if weights.dtype.element_ty == tl.bfloat16 else value.to(weights.dtype.element_ty)
    there = begins[:, None] & (column < dim)
    tl.store(row_pointers(weights, slot, column, dim), value, mask=there)
    float_of_state = tl.arange(0, state_block)[None, :]
    there = begins[:, None] & (float_of_state < state_floats)
    nothing = tl.zeros((rows, state_block), tl.float32)
    tl.store(row_pointers(state, slot, float_of_state, state_floats), nothing, mask=there)
