"""The functions of rounding.py, for the update kernel."""

# Parameters of kernels have the types of whatever is passed; Triton has none, and is not all of Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def absorb(key, value):
    """key, value: uint64."""
    return _mix((key + 0x9E3779B97F4A7C15) ^ value)


@triton.jit
def element_bits(key, element):
    """32 random bits for each element; key: uint64, element: uint32."""
    x = element * 0x9E3779B9 + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = x ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _finish(bits, magnitude, infinity: tl.constexpr, payload_shift: tl.constexpr, quiet_bit: tl.constexpr):
    """Puts sign, infinities and NaNs to the rounded magnitude of a finite value."""
    absolute = bits & 0x7FFFFFFF
    nan = infinity | quiet_bit | ((absolute >> payload_shift) & (quiet_bit - 1))
    special = tl.where(absolute > 0x7F800000, nan, infinity)
    result = tl.where(absolute < 0x7F800000, tl.minimum(magnitude, infinity - 1), special)
    return (result | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def to_bfloat16(values, random):
    """float32 to bfloat16; random: uint32."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = ((bits & 0x7FFFFFFF) + (random & 0xFFFF)) >> 16
    return _finish(bits, magnitude, 0x7F80, 16, 0x40).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest_bfloat16(values):
    """float32 to the nearest bfloat16, ties to even, and never to infinity. A cast does this on a device; Triton's
    interpreter cuts."""
    bits = values.to(tl.uint32, bitcast=True)
    return to_bfloat16(values, 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def to_float16(values, random):
    """float32 to float16; random: uint32."""
    bits = values.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    significand = tl.where(exponent != 0, fraction | 0x800000, fraction)
    below = 113 - tl.minimum(exponent, 113)
    cut = tl.minimum(below + 13, 31)
    kept = significand >> tl.minimum(tl.maximum(below, 18) - 18, 31)
    one = tl.full(cut.shape, 1, tl.uint32)
    normal = (tl.maximum(exponent, 113) - 113) << 10
    magnitude = normal + ((kept + (random & ((one << cut) - 1))) >> cut)
    return _finish(bits, magnitude, 0x7C00, 13, 0x200).to(tl.float16, bitcast=True)
