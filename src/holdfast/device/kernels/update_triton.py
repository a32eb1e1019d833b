"""The kernel of update.py.

It writes what it reads, so nothing of a tile is stored before all of it is loaded.
"""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="possibly-undefined"
# ruff: noqa: ANN001, ANN202, SIM109

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.device.kernels.dispatch import device_of
from holdfast.device.kernels.keys import KeyUpdate
from holdfast.device.kernels.keys_triton import load_record, store_record
from holdfast.device.kernels.rounding import seed_key
from holdfast.device.kernels.rounding_triton import absorb, element_bits, to_bfloat16, to_float16
from holdfast.device.kernels.rows_triton import fold_lanes, row_pointers
from holdfast.device.kernels.tiles import LAUNCH, block_of, tile_of
from holdfast.device.kernels.update import (
    ADAGRAD,
    ADAM,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAM,
    SGD,
    Constants,
    Rounding,
)

_SGD = tl.constexpr(SGD)
_ROWWISE_ADAGRAD = tl.constexpr(ROWWISE_ADAGRAD)
_ADAGRAD = tl.constexpr(ADAGRAD)
_ADAM = tl.constexpr(ADAM)
_ROWWISE_ADAM = tl.constexpr(ROWWISE_ADAM)

_VARYING = ["num_rows", "key_of_seed", "step", "pool_step"]
_INDEXES = ["slots", "tables", "own_rows", "gradient_scale", "keys", "key_tables", "admit_after"]


def update_rows(
    kind: int,
    weights: Tensor,
    state: Tensor | None,
    slots: Tensor,
    sums: Tensor,
    *,
    constants: Constants,
    step: int,
    gradient_scale: Tensor,
    rounding: Rounding | None,
    fresh_weights: Tensor,
    fresh_state: Tensor | None,
    keyed: KeyUpdate | None,
) -> None:
    seed, tables, own_rows = (0, None, None) if rounding is None else rounding
    num_rows, dim = sums.shape
    lanes = min(16, block_of(dim))
    tile = tile_of(dim, elements_per_thread=8, least_block=16)
    with device_of(weights):
        _update_rows[(tile.programs(num_rows),)](
            weights,
            state,
            slots,
            sums,
            gradient_scale,
            tables,
            own_rows,
            fresh_weights,
            fresh_state,
            None if keyed is None else _words(state),
            None if keyed is None else _words(fresh_state),
            None if keyed is None else keyed.keys,
            None if keyed is None else keyed.tables,
            None if keyed is None else keyed.admit_after,
            num_rows,
            0 if rounding is None else seed_key(seed),
            step,
            0 if keyed is None else keyed.step,
            constants.learning_rate,
            constants.epsilon,
            constants.weight_decay,
            constants.beta1,
            constants.beta2,
            constants.rest1,
            constants.rest2,
            constants.correction1,
            constants.correction2,
            kind=kind,
            decays=constants.weight_decay != 0,
            dim=dim,
            state_floats=0 if state is None else state.shape[1],
            rows=tile.rows,
            block=tile.block,
            lanes=lanes,
            **LAUNCH,
        )


def _words(state: Tensor | None) -> Tensor:
    assert state is not None  # with keys there is always some
    return state.view(torch.int32)


@triton.jit
def _mean_square(
    sums,
    weights,
    row,
    slot,
    inside,
    scale,
    weight_decay,
    has_l2: tl.constexpr,
    dim: tl.constexpr,
    lanes: tl.constexpr,
):
    """Of each row's gradient, [rows, 1]."""
    squares = tl.zeros((row.shape[0], lanes), tl.float32)
    for first in tl.static_range(0, dim, lanes):
        column = first + tl.arange(0, lanes)[None, :]
        there = inside[:, None] & (column < dim)
        gradient = scale * tl.load(row_pointers(sums, row, column, dim), mask=there, other=0.0)
        if has_l2:
            old = tl.load(row_pointers(weights, slot, column, dim), mask=there, other=0.0)
            gradient += weight_decay * old.to(tl.float32)
        squares += gradient * gradient
    return tl.div_rn(fold_lanes(squares), tl.full((row.shape[0], 1), dim, tl.float32))


@triton.jit
def _random_bits(key_of_seed, step, tables, own_rows, row, inside, column):
    """Of the rows' elements, [rows, columns]."""
    none = tl.zeros_like(row).to(tl.uint64)
    key = absorb(none + key_of_seed.to(tl.uint64), tl.load(tables + row, mask=inside, other=0).to(tl.uint64))
    key = absorb(key, none + step.to(tl.uint64))
    key = absorb(key, tl.load(own_rows + row, mask=inside, other=0).to(tl.uint64))
    return element_bits(key[:, None], column.to(tl.uint32))


@triton.jit
def _apply(old, gradient, square, m, v, constants, kind: tl.constexpr, decays: tl.constexpr):
    """The optimizer's rule: new weights and moments. Those that it does not have are left."""
    learning_rate, epsilon, weight_decay, beta1, beta2, rest1, rest2, correction1, correction2 = constants
    if kind == _SGD:
        new = old - learning_rate * gradient
    elif kind == _ADAM or kind == _ROWWISE_ADAM:
        m = beta1 * m + rest1 * gradient
        v = beta2 * v + rest2 * square
        root = tl.sqrt_rn(tl.div_rn(v, tl.zeros_like(v) + correction2))
        direction = tl.div_rn(tl.div_rn(m, tl.zeros_like(m) + correction1), tl.zeros_like(m) + (root + epsilon))
        if decays:
            direction = direction + weight_decay * old
        new = old - learning_rate * direction
    else:
        v = v + square
        root = tl.sqrt_rn(v) + epsilon
        if kind == _ROWWISE_ADAGRAD:
            new = old - tl.div_rn(tl.zeros_like(root) + learning_rate, root) * gradient
        else:
            new = old - tl.div_rn(learning_rate * gradient, root)
    return new, m, v


@triton.jit
def _store(array, slot, fresh, row, columns, width, values, mask):
    """To slots, and compactly."""
    tl.store(row_pointers(array, slot, columns, width), values, mask=mask)
    tl.store(row_pointers(fresh, row, columns, width), values, mask=mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEXES)
def _update_rows(
    weights,
    state,
    slots,
    sums,
    gradient_scale,
    tables,
    own_rows,
    fresh_weights,
    fresh_state,
    records,
    fresh_records,
    keys,
    key_tables,
    admit_after,
    num_rows,
    key_of_seed: tl.int64,
    step: tl.int64,
    pool_step: tl.int64,
    learning_rate,
    epsilon,
    weight_decay,
    beta1,
    beta2,
    rest1,
    rest2,
    correction1,
    correction2,
    kind: tl.constexpr,
    decays: tl.constexpr,
    dim: tl.constexpr,
    state_floats: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    column = tl.arange(0, block)[None, :]
    there = inside[:, None] & (column < dim)
    scale = tl.load(gradient_scale)
    is_adam: tl.constexpr = kind == _ADAM or kind == _ROWWISE_ADAM
    is_rowwise: tl.constexpr = kind == _ROWWISE_ADAGRAD or kind == _ROWWISE_ADAM
    has_l2: tl.constexpr = decays and not is_adam

    # The second moment: of a row, or of each of its elements; behind the first one, where there is one.
    moment = (dim if is_adam else 0) + (tl.zeros((1, 1), tl.int32) if is_rowwise else column)
    is_moment = inside[:, None] if is_rowwise else there

    gradient = scale * tl.load(row_pointers(sums, row, column, dim), mask=there, other=0.0)
    there_now = tl.load(row_pointers(weights, slot, column, dim), mask=there, other=0.0)
    old = there_now.to(tl.float32)
    if keys is not None:
        _, _, updates = load_record(records, slot, inside, state_floats)
        key = tl.load(keys + row, mask=inside, other=0)
        first = tl.load(admit_after + tl.load(key_tables + row, mask=inside, other=0), mask=inside, other=0)
    old_m = old  # of an optimizer without
    old_v = old
    if is_adam:
        old_m = tl.load(row_pointers(state, slot, column, state_floats), mask=there, other=0.0)
    if kind != _SGD:
        old_v = tl.load(row_pointers(state, slot, moment, state_floats), mask=is_moment, other=0.0)
    if has_l2:
        gradient += weight_decay * old
    if is_rowwise:
        square = _mean_square(sums, weights, row, slot, inside, scale, weight_decay, has_l2, dim, lanes)
    else:
        square = gradient * gradient
    # Several threads may hold one element, each loads it for itself, and one of them is going to store it.
    tl.debug_barrier()

    constants = (learning_rate, epsilon, weight_decay, beta1, beta2, rest1, rest2, correction1, correction2)
    new, m, v = _apply(old, gradient, square, old_m, old_v, constants, kind, decays)
    if tables is not None:
        random = _random_bits(key_of_seed, step, tables, own_rows, row, inside, column)
        new = to_bfloat16(new, random) if weights.dtype.element_ty == tl.bfloat16 else to_float16(new, random)

    if keys is not None:
        updates = tl.minimum(updates + 1, 0xFFFFFFFF)
        trains = (updates >= first)[:, None]
        store_record(records, slot, inside, state_floats, key, pool_step, updates)
        store_record(fresh_records, row, inside, state_floats, key, pool_step, updates)
        new = tl.where(trains, new.to(weights.dtype.element_ty), there_now)
        if is_adam:
            m = tl.where(trains, m, old_m)
        if kind != _SGD:
            v = tl.where(trains, v, old_v)

    _store(weights, slot, fresh_weights, row, column, dim, new, there)
    if is_adam:
        _store(state, slot, fresh_state, row, column, state_floats, m, there)
    if kind != _SGD:
        _store(state, slot, fresh_state, row, moment, state_floats, v, is_moment)
