"""The kernels of move.py."""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from holdfast.device.kernels.dispatch import device_of
from holdfast.device.kernels.rows_triton import row_pointers
from holdfast.device.kernels.tiles import LAUNCH, block_of, tile_of

_VARYING = ["num_rows"]
_INDEXES = ["slots", "missing", "tables", "own_rows", "bases"]


def gather_rows(
    weights: Tensor, state: Tensor | None, slots: Tensor, out_weights: Tensor, out_state: Tensor | None
) -> None:
    _copy(weights, state, out_weights, out_state, slots, None, gathers=True)


def scatter_rows(
    in_weights: Tensor,
    in_state: Tensor | None,
    slots: Tensor,
    missing: Tensor,
    weights: Tensor,
    state: Tensor | None,
) -> None:
    _copy(in_weights, in_state, weights, state, slots, missing, gathers=False)


def _copy(
    weights: Tensor,
    state: Tensor | None,
    to_weights: Tensor,
    to_state: Tensor | None,
    slots: Tensor,
    missing: Tensor | None,
    *,
    gathers: bool,
) -> None:
    num_rows = (slots if missing is None else missing).numel()
    tile = tile_of(weights.shape[1], elements_per_thread=8)
    with device_of(to_weights):
        _copy_rows[(tile.programs(num_rows),)](
            weights,
            state,
            to_weights,
            to_state,
            slots,
            missing,
            num_rows,
            gathers=gathers,
            rows=tile.rows,
            dim=weights.shape[1],
            block=tile.block,
            state_floats=0 if state is None else state.shape[1],
            state_block=1 if state is None else block_of(state.shape[1]),
            **LAUNCH,
        )


def gather_home(
    bases: Tensor,
    tables: Tensor,
    rows: Tensor,
    missing: Tensor,
    slots: Tensor,
    weights: Tensor,
    state: Tensor | None,
) -> None:
    tile = tile_of(weights.shape[1], elements_per_thread=8)
    with device_of(weights):
        _gather_home[(tile.programs(missing.numel()),)](
            bases,
            tables,
            rows,
            missing,
            slots,
            weights,
            state,
            missing.numel(),
            rows=tile.rows,
            dim=weights.shape[1],
            block=tile.block,
            weight_bytes=weights.element_size(),
            state_floats=0 if state is None else state.shape[1],
            state_block=1 if state is None else block_of(state.shape[1]),
            **LAUNCH,
        )


@triton.jit
def _copy_columns(source, row, target, place, inside, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    there = inside[:, None] & (column < width)
    values = tl.load(row_pointers(source, row, column, width), mask=there)
    tl.store(row_pointers(target, place, column, width), values, mask=there)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _copy_rows(
    weights,
    state,
    to_weights,
    to_state,
    slots,
    missing,
    num_rows,
    gathers: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    state_floats: tl.constexpr,
    state_block: tl.constexpr,
):
    compact = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = compact < num_rows
    unique = compact if missing is None else tl.load(missing + compact, mask=inside, other=0)
    slot = tl.load(slots + unique, mask=inside, other=0)
    row, place = (slot, compact) if gathers else (compact, slot)
    _copy_columns(weights, row, to_weights, place, inside, dim, block)
    if state is not None:
        _copy_columns(state, row, to_state, place, inside, state_floats, state_block)


@triton.jit
def _copy_columns_home(
    address, row, target, place, inside, item_bytes: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    column = tl.arange(0, block)[None, :]
    there = inside[:, None] & (column < width)
    source = (address + row * (width * item_bytes)).to(target.dtype)
    if width * item_bytes % 16 == 0:
        source = tl.multiple_of(source, 16)
    values = tl.load(source[:, None] + column, mask=there)
    tl.store(row_pointers(target, place, column, width), values, mask=there)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _gather_home(
    bases,
    tables,
    own_rows,
    missing,
    slots,
    weights,
    state,
    num_rows,
    rows: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    weight_bytes: tl.constexpr,
    state_floats: tl.constexpr,
    state_block: tl.constexpr,
):
    nth = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = nth < num_rows
    unique = tl.load(missing + nth, mask=inside, other=0)
    base = bases + 2 * tl.load(tables + unique, mask=inside, other=0)
    row = tl.load(own_rows + unique, mask=inside, other=0)
    slot = tl.load(slots + unique, mask=inside, other=0)
    weights_at = tl.load(base, mask=inside, other=0)
    _copy_columns_home(weights_at, row, weights, slot, inside, weight_bytes, dim, block)
    if state is not None:
        state_at = tl.load(base + 1, mask=inside, other=0)
        _copy_columns_home(state_at, row, state, slot, inside, 4, state_floats, state_block)
