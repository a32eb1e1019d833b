"""Rows between slots, staging and the pool's own memory. Nothing is computed: what arrives are the bytes that left.

Bytes: weights and state of every row read once and written once, and 4 to 20 for its numbers. A tile holds whole rows,
several of them where they are small, so a warp asks for whole lines; `gather_home` asks the host for them, tile beside
tile without staging, and has some 100 KiB of requests on the link as soon as a few hundred programs run.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import runs_triton


def gather_rows(
    weights: Tensor, state: Tensor | None, slots: Tensor, out_weights: Tensor, out_state: Tensor | None
) -> None:
    """Copies rows from slots to compact rows.

    weights: ``[num_slots, dim]``, float32, float16 or bfloat16. state: float32 ``[num_slots, state_floats]``, or None.
    slots: int32 ``[num_rows]``. out_weights, out_state: the same of ``[num_rows, …]``.
    """
    if slots.numel() == 0:
        return
    if runs_triton(weights):
        from holdfast.device.kernels import move_triton

        move_triton.gather_rows(weights, state, slots, out_weights, out_state)
        return
    place = slots.long()
    out_weights.copy_(weights[place])
    if state is not None and out_state is not None:
        out_state.copy_(state[place])


def scatter_rows(
    in_weights: Tensor,
    in_state: Tensor | None,
    slots: Tensor,
    missing: Tensor,
    weights: Tensor,
    state: Tensor | None,
) -> None:
    """Copies compact rows to slots: row m to ``slots[missing[m]]``.

    in_weights: ``[num_missing, dim]``. in_state: float32 ``[num_missing, state_floats]``, or None. slots: int32
    ``[num_unique]``. missing: int32 ``[num_missing]``. weights, state: as `gather_rows` has them.
    """
    if missing.numel() == 0:
        return
    if runs_triton(weights):
        from holdfast.device.kernels import move_triton

        move_triton.scatter_rows(in_weights, in_state, slots, missing, weights, state)
        return
    place = slots[missing.long()].long()
    weights[place] = in_weights
    if state is not None and in_state is not None:
        state[place] = in_state


def gather_home(
    bases: Tensor,
    tables: Tensor,
    rows: Tensor,
    missing: Tensor,
    slots: Tensor,
    weights: Tensor,
    state: Tensor | None,
) -> None:
    """Copies rows from host memory to slots: row ``rows[u]`` of table ``tables[u]`` to ``slots[u]``, u being every one
    of `missing`.

    bases: int64 ``[num_tables, 2]``, the addresses of each table's weights and of its state, multiples of 16; memory
    that is registered with the device, and stays so until the copies are over. tables: int32 ``[num_unique]``. rows:
    int64 ``[num_unique]``. missing: int32 ``[num_missing]``. slots: int32 ``[num_unique]``. weights, state: as
    `gather_rows` has them.
    """
    if missing.numel() == 0:
        return
    if runs_triton(weights):
        from holdfast.device.kernels import move_triton

        move_triton.gather_home(bases, tables, rows, missing, slots, weights, state)
        return
    wanted = missing.long()
    for number in sorted(set(tables[wanted].tolist())):
        of_table = wanted[tables[wanted] == number]
        row, place = rows[of_table].cpu(), slots[of_table].long()
        for column, to in ((0, weights), (1, state)):
            if to is not None:
                to[place] = _rows_at(int(bases[number, column]), row, to).to(to.device)


def _rows_at(address: int, rows: Tensor, like: Tensor) -> Tensor:
    """Rows of an array in this process's memory, of the width and dtype of `like`."""
    width = like.shape[1]
    num_elements = (int(rows.max()) + 1) * width
    memory = (ctypes.c_char * (num_elements * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(-1, width)[rows]
