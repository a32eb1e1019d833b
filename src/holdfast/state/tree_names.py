"""What a state's text may name: dtypes by their names, and values in messages."""

from __future__ import annotations

from typing import Any

import torch

FORMAT = 1
_INTEGER_NAMES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
_FLOAT_NAMES = ["float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"]
_FLOAT8_NAMES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
_DTYPE_NAMES = [*_INTEGER_NAMES, *_FLOAT_NAMES, *_FLOAT8_NAMES]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY_SCALAR_KINDS = frozenset("biufcmMSU")


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
