"""Counter-based random bits, and stochastic rounding to 16 bits with them, in plain torch: core/base/counter_rng.h and
core/kernels/row_formats.inc.h.

Words of 32 bits are held in int64, of which the lower half counts; 64-bit keys are int64, which wraps as uint64 does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

STOCHASTIC_ROUNDING = int.from_bytes(b"rounding", "big")

_WORD = 0xFFFFFFFF


def signed(number: int) -> int:
    """64 bits as the signed number that they are."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


@cache
def seed_key(seed: int) -> int:
    """The part of a row's key that is the same for all: absorb(stochastic_rounding, seed), as a signed number."""
    return int(absorb(torch.tensor(signed(STOCHASTIC_ROUNDING)), torch.tensor(signed(seed))))


def random_bits(rounding: tuple[int, Tensor, Tensor], step: int, dim: int) -> Tensor:
    """The words of every element of rows: int64 ``[rows, dim]``, the lower 32 bits of each."""
    seed, tables, rows = rounding
    key = absorb(torch.full_like(rows, seed_key(seed)), tables.long())
    return element_bits(absorb(absorb(key, torch.full_like(rows, signed(step))), rows), dim)


def element_bits(keys: Tensor, dim: int) -> Tensor:
    """32 bits for each element of rows with these keys, int64 ``[rows]``: the lower half of int64 ``[rows, dim]``."""
    key = keys[:, None]
    x = (torch.arange(dim, device=keys.device) * 0x9E3779B9 + key) & _WORD
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = x ^ ((key >> 32) & _WORD)
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def round_stochastically(values: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """float32 ``[rows, dim]`` to float16 or bfloat16: random bits below the last one that is kept, then a cut."""
    bits = values.contiguous().view(torch.int32).long() & _WORD
    absolute = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        magnitude = (absolute + (random & 0xFFFF)) >> 16
        infinity, payload_shift, quiet_bit = 0x7F80, 16, 0x40
    else:
        exponent, fraction = absolute >> 23, absolute & 0x7FFFFF
        significand = torch.where(exponent != 0, fraction | 0x800000, fraction)
        below = (113 - exponent).clamp(min=0)
        cut = (below + 13).clamp(max=31)
        kept = significand >> (below - 18).clamp(min=0, max=31)
        normal = (exponent - 113).clamp(min=0) << 10
        magnitude = normal + ((kept + (random & ((1 << cut) - 1))) >> cut)
        infinity, payload_shift, quiet_bit = 0x7C00, 13, 0x200
    nan = infinity | quiet_bit | ((absolute >> payload_shift) & (quiet_bit - 1))
    special = torch.where(absolute > 0x7F800000, nan, infinity)
    result = torch.where(absolute < 0x7F800000, magnitude.clamp(max=infinity - 1), special) | ((bits >> 16) & 0x8000)
    return result.to(torch.int16).view(dtype)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def absorb(key: Tensor, value: Tensor) -> Tensor:
    """counter_rng::absorb."""
    return _mix((key + signed(0x9E3779B97F4A7C15)) ^ value)
