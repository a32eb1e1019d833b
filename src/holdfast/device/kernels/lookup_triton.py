"""The kernels of lookup.py. The search for a lookup's bag makes `scale_gradients` parallel over lookups, not bags."""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from holdfast.device.kernels.dispatch import device_of
from holdfast.device.kernels.rows_triton import fold_lanes, row_pointers, segment_at
from holdfast.device.kernels.tiles import LAUNCH, LAUNCH_SUMS, Tile, block_of, tile_of

_VARYING = ["num_bags", "num_lookups", "batch_size", "width", "num_halvings"]
_INDEXES = ["lookup_slot", "bag_start", "columns", "scale"]


def pooled_lookup(
    weights: Tensor,
    lookup_slot: Tensor,
    bag_start: Tensor,
    columns: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None,
    mean: bool,
    alignment: int,
) -> None:
    num_bags = bag_start.numel() - 1
    dim = weights.shape[1]
    tile = _tile_of_bags(dim, num_bags, lookup_slot.numel())
    with device_of(weights):
        _pooled_lookup[(tile.programs(num_bags),)](
            weights,
            lookup_slot,
            bag_start,
            columns,
            scale,
            out,
            num_bags,
            out.shape[0],
            out.shape[1],
            mean=mean,
            dim=dim,
            alignment=alignment,
            rows=tile.rows,
            block=tile.block,
            unroll=tile.unroll,
            **LAUNCH_SUMS,
        )


def _tile_of_bags(dim: int, num_bags: int, num_lookups: int) -> Tile:
    if num_lookups > 4 * num_bags:
        return tile_of(dim, elements_per_thread=4, unroll=8)
    return tile_of(dim, elements_per_thread=8, unroll=2)


def scale_gradients(
    weights: Tensor,
    lookup_slot: Tensor,
    bag_start: Tensor,
    columns: Tensor,
    grad: Tensor,
    *,
    mean: bool,
    alignment: int,
) -> Tensor:
    num_lookups, num_bags = lookup_slot.numel(), bag_start.numel() - 1
    dim = weights.shape[1]
    lanes = min(16, block_of(dim))
    tile = tile_of(lanes, elements_per_thread=4)
    found = grad.new_empty(num_lookups)
    with device_of(weights):
        _scale_gradients[(tile.programs(num_lookups),)](
            weights,
            lookup_slot,
            bag_start,
            columns,
            grad,
            found,
            num_lookups,
            num_bags,
            grad.shape[0],
            grad.shape[1],
            num_bags.bit_length(),
            mean=mean,
            dim=dim,
            alignment=alignment,
            rows=tile.rows,
            lanes=lanes,
            **LAUNCH,
        )
    return found


@triton.jit
def _first_element(bag, columns, inside, batch_size, width, alignment: tl.constexpr):
    """Where the columns of each bag begin in the pooled output."""
    column = tl.load(columns + bag // batch_size, mask=inside, other=0)
    return tl.multiple_of((bag % batch_size).to(tl.int64) * width + column, alignment)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _pooled_lookup(
    weights,
    lookup_slot,
    bag_start,
    columns,
    scale,
    out,
    num_bags,
    batch_size,
    width,
    mean: tl.constexpr,
    dim: tl.constexpr,
    alignment: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    unroll: tl.constexpr,
):
    bag = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = bag < num_bags
    begin = tl.load(bag_start + bag, mask=inside, other=0)
    length = tl.load(bag_start + bag + 1, mask=inside, other=0) - begin
    column = tl.arange(0, block)[None, :]
    is_column = column < dim
    sums = tl.zeros((rows, block), tl.float32)
    for first in range(0, tl.max(length, 0), unroll):
        for i in tl.static_range(unroll):
            there = first + i < length
            lookup = begin + first + i
            slot = tl.load(lookup_slot + lookup, mask=there, other=0)
            row = tl.load(row_pointers(weights, slot, column, dim), mask=there[:, None] & is_column, other=0.0).to(
                tl.float32
            )
            if scale is not None:
                row = tl.load(scale + lookup, mask=there, other=0.0)[:, None] * row
            sums += row
    if mean:
        sums = tl.div_rn(1.0, tl.maximum(length, 1).to(tl.float32))[:, None] * sums
    place = out + _first_element(bag, columns, inside, batch_size, width, alignment)[:, None] + column
    tl.store(place, sums, mask=inside[:, None] & is_column)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _scale_gradients(
    weights,
    lookup_slot,
    bag_start,
    columns,
    grad,
    found,
    num_lookups,
    num_bags,
    batch_size,
    width,
    num_halvings,
    mean: tl.constexpr,
    dim: tl.constexpr,
    alignment: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
):
    lookup = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = lookup < num_lookups
    slot = tl.load(lookup_slot + lookup, mask=inside, other=0)
    bag = segment_at(bag_start, num_bags, num_halvings, tl.where(inside, lookup, 0))
    gradient = grad + _first_element(bag, columns, inside, batch_size, width, alignment)[:, None]
    sums = tl.zeros((rows, lanes), tl.float32)
    for first in tl.static_range(0, dim, lanes):
        column = first + tl.arange(0, lanes)[None, :]
        there = inside[:, None] & (column < dim)
        row = tl.load(row_pointers(weights, slot, column, dim), mask=there, other=0.0)
        sums += tl.load(gradient + column, mask=there, other=0.0) * row.to(tl.float32)
    dot = fold_lanes(sums)
    if mean:
        length = tl.load(bag_start + bag + 1) - tl.load(bag_start + bag)
        dot = dot * tl.div_rn(1.0, tl.maximum(length, 1).to(tl.float32))[:, None]
    tl.store(found + lookup[:, None], dot, mask=inside[:, None])
