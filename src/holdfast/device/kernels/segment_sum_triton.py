"""The kernels of segment_sum.py.

The tasks of a level are chunks of rows with more than 64 occurrences, and nobody counts them first: place p of a level
whose chunks hold `span` occurrences belongs to the row that has occurrence (p + 1) × span / 2 - 1, if that is a long
one, and to the chunk p - row_start × 2 / span of it, if there is such a chunk. Every chunk of a row with more than
`span` occurrences has a place so, and no two have one (a row of n > span occurrences has n / span chunks, rounded up,
which are at most 2 n / span, rounded down, and its places begin and end at occurrences of its own). The place is also
where the chunk's sum goes: the 2 L / span sums of a level need no more memory than that, and no prefix sum.
"""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.device.kernels.dispatch import device_of
from holdfast.device.kernels.rows_triton import row_pointers, segment_at
from holdfast.device.kernels.segment_sum import CHUNK
from holdfast.device.kernels.tiles import LAUNCH_SUMS, tile_of

_VARYING = ["num_rows", "num_places", "num_chunk_programs", "num_halvings"]
_INDEXES = ["row_start", "gradient_offset", "scale"]


def segment_sum(
    grad: Tensor,
    row_start: Tensor,
    gradient_offset: Tensor,
    dim: int,
    *,
    scale: Tensor | None,
    max_occurrences: int,
    alignment: int,
) -> Tensor:
    num_rows, num_lookups = row_start.numel() - 1, gradient_offset.numel()
    num_halvings = num_rows.bit_length()
    of_rows = tile_of(dim, elements_per_thread=8, unroll=4)
    of_chunks = tile_of(dim, elements_per_thread=4, unroll=8)
    sums = torch.empty(num_rows, dim, dtype=torch.float32, device=grad.device)
    span = CHUNK
    max_occurrences = min(max_occurrences, num_lookups)
    parts = _places(span, num_lookups, dim, sums) if max_occurrences > span else None
    num_places = 0 if parts is None else parts.shape[0]
    num_chunk_programs = of_chunks.programs(num_places)
    with device_of(grad):
        _sum_gradients[(num_chunk_programs + of_rows.programs(num_rows),)](
            grad,
            row_start,
            gradient_offset,
            scale,
            sums,
            parts,
            num_rows,
            num_places,
            num_chunk_programs,
            num_halvings,
            chunk=CHUNK,
            dim=dim,
            alignment=alignment,
            rows=of_rows.rows,
            rows_unroll=of_rows.unroll,
            chunks=of_chunks.rows,
            chunks_unroll=of_chunks.unroll,
            block=of_rows.block,
            **LAUNCH_SUMS,
        )
        while parts is not None:
            items, num_places = parts, parts.shape[0]
            next_span = span * CHUNK
            parts = _places(next_span, num_lookups, dim, sums) if max_occurrences > next_span else None
            _sum_parts[(of_chunks.programs(num_places),)](
                items,
                row_start,
                sums,
                parts,
                num_rows,
                num_places,
                num_halvings,
                chunk=CHUNK,
                span=span,
                dim=dim,
                rows=of_chunks.rows,
                unroll=of_chunks.unroll,
                block=of_chunks.block,
                **LAUNCH_SUMS,
            )
            span = next_span
    return sums


def _places(span: int, num_lookups: int, dim: int, like: Tensor) -> Tensor:
    return like.new_empty(num_lookups // (span // 2), dim)


@triton.jit
def _row_with_place(row_start, num_rows, num_halvings, place, num_places, span: tl.constexpr):
    """Of each place the row whose chunk it may be, the row's occurrences, and which chunk it would be."""
    half: tl.constexpr = span // 2
    last_occurrence = (tl.minimum(place, num_places - 1) + 1) * half - 1
    row = segment_at(row_start, num_rows, num_halvings, last_occurrence)
    begin = tl.load(row_start + row)
    return row, begin, tl.load(row_start + row + 1) - begin, place - begin // half


@triton.jit
def _sum_occurrences(
    grad,
    gradient_offset,
    scale,
    begin,
    count,
    inside,
    sums,
    place,
    dim: tl.constexpr,
    alignment: tl.constexpr,
    block: tl.constexpr,
    unroll: tl.constexpr,
):
    """Sums the gradients of occurrences [begin, begin + count), one after another, into rows `place` of `sums`."""
    column = tl.arange(0, block)[None, :]
    is_column = column < dim
    count = tl.where(inside, count, 0)
    total = tl.zeros((begin.shape[0], block), tl.float32)
    for first in range(0, tl.max(count, 0), unroll):
        for i in tl.static_range(unroll):
            there = first + i < count
            occurrence = begin + first + i
            offset = tl.load(gradient_offset + occurrence, mask=there, other=0).to(tl.uint32, bitcast=True)
            source = grad + tl.multiple_of(offset.to(tl.int64), alignment)[:, None] + column
            values = tl.load(source, mask=there[:, None] & is_column, other=0.0)
            if scale is not None:
                values = tl.load(scale + occurrence, mask=there, other=0.0)[:, None] * values
            total += values
    tl.store(row_pointers(sums, place, column, dim), total, mask=inside[:, None] & is_column)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _sum_gradients(
    grad,
    row_start,
    gradient_offset,
    scale,
    sums,
    parts,
    num_rows,
    num_places,
    num_chunk_programs,
    num_halvings,
    chunk: tl.constexpr,
    dim: tl.constexpr,
    alignment: tl.constexpr,
    rows: tl.constexpr,
    rows_unroll: tl.constexpr,
    chunks: tl.constexpr,
    chunks_unroll: tl.constexpr,
    block: tl.constexpr,
):
    """Whole rows of up to `chunk` occurrences into `sums`; the chunks of others, first because they take longest, into
    `parts`."""
    program = tl.program_id(0)
    if program >= num_chunk_programs:
        row = (program - num_chunk_programs) * rows + tl.arange(0, rows)
        begin = tl.load(row_start + row, mask=row < num_rows, other=0)
        count = tl.load(row_start + row + 1, mask=row < num_rows, other=0) - begin
        inside = (row < num_rows) & (count <= chunk)
        _sum_occurrences(
            grad, gradient_offset, scale, begin, count, inside, sums, row, dim, alignment, block, rows_unroll
        )
    else:
        if parts is not None:
            place = program * chunks + tl.arange(0, chunks)
            _, first, all_of_row, nth = _row_with_place(row_start, num_rows, num_halvings, place, num_places, chunk)
            left = all_of_row - nth * chunk
            is_chunk = (place < num_places) & (all_of_row > chunk) & (left > 0)
            of_chunk = tl.minimum(left, chunk)
            _sum_occurrences(
                grad,
                gradient_offset,
                scale,
                first + nth * chunk,
                of_chunk,
                is_chunk,
                parts,
                place,
                dim,
                alignment,
                block,
                chunks_unroll,
            )


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _sum_parts(
    items,
    row_start,
    sums,
    parts,
    num_rows,
    num_places,
    num_halvings,
    chunk: tl.constexpr,
    span: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    unroll: tl.constexpr,
    block: tl.constexpr,
):
    """Sums chunks of the sums that lie at the places of a level: the row's sum where it has one chunk, else a part of
    the next level. The task is at the place of its first item; the others are behind it."""
    column = tl.arange(0, block)[None, :]
    is_column = column < dim
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    row, begin, count, nth = _row_with_place(row_start, num_rows, num_halvings, place, num_places, span)
    num_items = (count + span - 1) // span
    inside = (place < num_places) & (num_items > 1) & (nth % chunk == 0) & (nth < num_items)
    count = tl.where(inside, tl.minimum(num_items - nth, chunk), 0)
    total = tl.zeros((rows, block), tl.float32)
    for first in range(0, tl.max(count, 0), unroll):
        for i in tl.static_range(unroll):
            there = (first + i < count)[:, None] & is_column
            total += tl.load(row_pointers(items, place + first + i, column, dim), mask=there, other=0.0)
    is_last = inside & (num_items <= chunk)
    tl.store(row_pointers(sums, row, column, dim), total, mask=is_last[:, None] & is_column)
    if parts is not None:
        next_place = begin // (span * chunk // 2) + nth // chunk
        is_part = inside & (num_items > chunk)
        tl.store(row_pointers(parts, next_place, column, dim), total, mask=is_part[:, None] & is_column)
