"""Rows of tables with keys, in slots: whose they are, how they begin, and which of them train.

A row ends with its record (core/kernels/kernels.h, KeyRecord: the key, the step that updated it last, the number of
updates), and that decides in a slot what it decides at home: the row is the key's if the record says so and is of a
step that counts; else it begins, with the key's initial value and no state. Initial values are the core's to the bit
(core/kernels/move_rows.inc.h: f(seed, table, key, element)).

Bytes a row: its record read, and weights and state written where it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import runs_triton
from holdfast.device.kernels.rounding import absorb, element_bits, signed

RECORD_FLOATS = 4

_INITIAL_VALUES = int.from_bytes(b"initial\0", "big")
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Of the pool's tables, by number: float32 ``[num_tables]`` each, on the device. A value is ``low + span × u``, and
    `largest` where that is more."""

    seed: int
    low: Tensor
    span: Tensor
    largest: Tensor

    @classmethod
    def of(cls, seed: int, bounds: Sequence[tuple[float, float]], device: torch.device) -> InitialValues:
        """bounds: of each table's initial values."""
        low, high = np.array(bounds, np.float32).reshape(-1, 2).T
        span = np.where(low < high, high - low, np.float32(0))
        largest = np.where(span > 0, np.nextafter(high, np.float32(-np.inf)), low)
        return cls(seed, *(torch.from_numpy(values.copy()).to(device) for values in (low, span, largest)))


@dataclass(frozen=True, slots=True)
class KeyUpdate:
    """Of rows that a step updates: their keys, int64 ``[num_unique]``, and their tables' numbers, int32 likewise.
    admit_after: int64 ``[num_tables]``, the update of a key that is the first to train it. step: the pool's."""

    keys: Tensor
    tables: Tensor
    admit_after: Tensor
    step: int


@cache
def initial_key(seed: int) -> int:
    """The part of a row's key that is the same for all: absorb(initial_values, seed), as a signed number."""
    return int(absorb(torch.tensor(signed(_INITIAL_VALUES)), torch.tensor(signed(seed))))


def start_keys(
    weights: Tensor, state: Tensor, slots: Tensor, keys: Tensor, tables: Tensor, oldest: Tensor, initial: InitialValues
) -> None:
    """Rows that are not their keys' yet, or not any more, become what they are before any update.

    weights: ``[num_slots, dim]``, float32, float16 or bfloat16. state: float32 ``[num_slots, state_floats]``, records
    at the end. slots: int32 ``[num_unique]``, different ones. keys: int64 ``[num_unique]``. tables: int32
    ``[num_unique]``, the pool's numbers. oldest: int64 ``[num_unique]``: a record of an earlier step does not count.
    """
    if slots.numel() == 0:
        return
    if runs_triton(weights):
        from holdfast.device.kernels import keys_triton

        keys_triton.start_keys(weights, state, slots, keys, tables, oldest, initial)
        return
    place = slots.long()
    there = state[place]
    key, step, updates = read_records(there)
    begins = ((updates == 0) | (key != keys) | (step < oldest))[:, None]
    weights[place] = torch.where(begins, _initial_rows(keys, tables.long(), weights, initial), weights[place])
    state[place] = there.masked_fill(begins, 0.0)


def read_records(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, steps and numbers of updates of rows' state ``[num_rows, state_floats]``: int64 ``[num_rows]`` each."""
    words = state[:, -RECORD_FLOATS:].contiguous().view(torch.int32).long()
    low, high, step, updates = words.unbind(1)
    return (low & _WORD) | (high << 32), step & _WORD, updates & _WORD


def records(keys: Tensor, step: int, updates: Tensor) -> Tensor:
    """float32 ``[num_rows, RECORD_FLOATS]``."""
    words = torch.stack((keys, keys >> 32, torch.full_like(keys, step), updates), dim=1)
    return words.to(torch.int32).view(torch.float32)


def _initial_rows(keys: Tensor, tables: Tensor, like: Tensor, initial: InitialValues) -> Tensor:
    key = absorb(absorb(torch.full_like(keys, initial_key(initial.seed)), tables), keys)
    uniform = (element_bits(key, like.shape[1]) >> 8).float() * 2.0**-24
    low, span, largest = (of[tables][:, None] for of in (initial.low, initial.span, initial.largest))
    value = torch.minimum(low + span * uniform, largest)
    if like.dtype == torch.float32:
        return value
    finite = torch.finfo(like.dtype).max
    return value.clamp(-finite, finite).to(like.dtype)
