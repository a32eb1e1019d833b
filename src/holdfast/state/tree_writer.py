"""The half of the codec that writes (state_tree.py): values to what `json` writes, tensors aside."""

from __future__ import annotations

import base64
import enum
import io
import random
import struct
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from holdfast.state.tree_names import NAMES, NUMPY_SCALAR_KINDS, shortened

# Longer bytes go to the tensors: copied at memory speed, and the text stays the same from step to step.
_INLINE_BYTES = 64
_INT64 = range(-(2**63), 2**63)
_TORCH_NUMPY_KINDS = frozenset("?bhilqBHILQefdFD")


class Unwritable(Exception):
    """`reason`, and the keys that lead to the value, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []


class Writer:
    """One flatten: collects tensors while it turns values into what `json` writes. Dispatches by exact type, because
    subclasses of int, str or tuple (enums, named tuples) would come back as something else."""

    __slots__ = ("_encoders", "_numbers", "_ordered", "records", "tensors")

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self.tensors: list[Tensor] = []
        self.records: list[tuple[str, list[int]]] = []
        self._numbers: dict[int, int] = {}
        self._encoders: dict[type, Callable[[Any], Any]] = {
            type(None): _same,
            bool: _same,
            str: _same,
            int: _encode_int,
            float: _encode_float,
            list: self._list,
            dict: self._dict,
            OrderedDict: self._dict,
            defaultdict: self._dict,
            tuple: self._tuple,
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            bytes: self._bytes,
            np.ndarray: self._array,
            Counter: self._counter,
            torch.Size: _encode_size,
            torch.dtype: _encode_dtype,
            torch.device: _encode_device,
        }

    def encode(self, value: Any) -> Any:
        encoder = self._encoders.get(type(value))
        return self._other(value) if encoder is None else encoder(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic):
            return {"$scalar": [_numpy_dtype(value.dtype), _base64(value.tobytes())]}
        raise Unwritable(_reason(value))

    def _list(self, values: Sequence[Any]) -> list[Any]:
        out = []
        try:
            for value in values:
                encoder = self._encoders.get(type(value))
                out.append(self._other(value) if encoder is None else encoder(value))
        except Unwritable as error:
            error.path.append(len(out))
            raise
        return out

    def _dict(self, values: dict[Any, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        key: Any = None
        for key in values:
            if type(key) is not str or key[:1] == "$":
                return {"$dict": self._pairs(values)}
        try:
            for key, value in values.items():
                encoder = self._encoders.get(type(value))
                out[key] = self._other(value) if encoder is None else encoder(value)
        except Unwritable as error:
            error.path.append(key)
            raise
        return out

    def _pairs(self, values: dict[Any, Any]) -> list[list[Any]]:
        out = []
        key: Any = None
        try:
            for key, value in values.items():
                encoder = self._encoders.get(type(value))
                out.append([self.encode(key), self._other(value) if encoder is None else encoder(value)])
        except Unwritable as error:
            error.path.append(key)
            raise
        return out

    def _tuple(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return {"$tuple": self._list(values)}

    def _counter(self, values: Counter[Any]) -> dict[str, Any]:
        return {"$counter": self._pairs(values)}

    def _tensor(self, tensor: Tensor) -> dict[str, Any]:
        number = self._number(tensor)
        order = _order_of(self.tensors[number]) if self._ordered else None
        return {"$tensor": number} if order is None else {"$ordered": [number, order]}

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            if is_lazy(tensor):
                raise Unwritable("the parameter has no values yet; call forward once before the Checkpoint is made")
            name = NAMES.get(tensor.dtype)
            if name is None or not _has_plain_memory(tensor):
                raise Unwritable(
                    f"{_described(tensor)} cannot be written down; only dense tensors with memory of their own and a "
                    "plain dtype can"
                )
            number = self._numbers[id(tensor)] = len(self.tensors)
            if tensor.dtype.is_complex and tensor.is_conj():
                tensor = tensor.resolve_conj()  # its bytes must be its values
            elif tensor.is_neg():
                tensor = tensor.resolve_neg()
            self.tensors.append(tensor)
            self.records.append((name, [*tensor.shape]))
        return number

    def _bytes(self, value: bytes) -> dict[str, Any]:
        if len(value) <= _INLINE_BYTES:
            return {"$bytes": _base64(value)}
        # bytearray, because torch wants memory that it could write.
        self.tensors.append(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        self.records.append(("uint8", [len(value)]))
        return {"$bytes": len(self.tensors) - 1}

    def _array(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        number = self._numbers.get(id(value))
        if number is None:
            dtype = value.dtype
            if dtype.char not in _TORCH_NUMPY_KINDS or not dtype.isnative:
                return {"$array": [_numpy_dtype(dtype), [*value.shape], self._bytes(value.tobytes())]}
            number = self._numbers[id(value)] = len(self.tensors)
            usable = value.flags.c_contiguous and value.flags.writeable
            tensor = torch.from_numpy(value if usable else value.copy(order="C"))
            self.tensors.append(tensor)
            self.records.append((NAMES[tensor.dtype], [*tensor.shape]))
        return {"$array": number}


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether its bytes are where it says: those of a subclass that wraps tensors (DTensor), or whose storage somebody
    freed for a while (FSDP), are not."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def _order_of(tensor: Tensor) -> list[int] | None:
    """Its dimensions from the outermost in memory to the innermost; None where they lie as they are numbered, or where
    its elements do not lie side by side."""
    if tensor.is_contiguous():
        return None
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


def _described(tensor: Tensor) -> str:
    kind = "a tensor" if type(tensor) in (Tensor, torch.nn.Parameter) else f"a {type(tensor).__name__}"
    layout = "nested" if tensor.is_nested else tensor.layout
    return f"{kind} of dtype {tensor.dtype}, layout {layout} on {tensor.device}"


def path_of(innermost_first: Sequence[Any]) -> str:
    text = ""
    for key in reversed(innermost_first):
        if not text and isinstance(key, str):
            text = key
        elif isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{shortened(key)}]"
    return text or "the state"


def _same(value: Any) -> Any:
    return value


def _encode_int(value: int) -> Any:
    return value if value in _INT64 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if value - value == 0.0 else {"$float": struct.pack(">d", value).hex()}


def _encode_size(value: torch.Size) -> dict[str, list[int]]:
    return {"$size": list(value)}


def _encode_dtype(value: torch.dtype) -> dict[str, str]:
    if value not in NAMES:
        raise Unwritable(f"{value} cannot be written down")
    return {"$dtype": NAMES[value]}


def _encode_device(value: torch.device) -> dict[str, str]:
    return {"$device": str(value)}


def _numpy_dtype(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in NUMPY_SCALAR_KINDS or not dtype.itemsize:
        raise Unwritable(f"a numpy value of dtype {dtype} cannot be written down; only numbers, dates and text can")
    return dtype.str


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _reason(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return f"the enum member {value} cannot be written down; keep its value ({value.value!r}) instead"
    if isinstance(value, type):
        return f"the class {value.__qualname__} cannot be written down; keep its name instead"
    if callable(value) and isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return (
            f"a function ({value.__qualname__}) cannot be written down; leave it out of the state and make it again "
            "before the state is loaded, or use an object whose attributes are plain values"
        )
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__} cannot be written down; keep its name instead"
    if isinstance(value, io.IOBase):
        return "an open file cannot be written down; keep its path and position instead"
    if isinstance(value, random.SystemRandom):
        return f"a {type(value).__name__} has no state that could come back; use a random.Random, which has"
    if isinstance(value, (np.random.BitGenerator, np.random.SeedSequence)):
        return f"a {kind} cannot be written down; keep the numpy.random.Generator that is made of it"
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return f"a {type(value).__name__} inside another value cannot be written down; give it to extra by its own name"
    if isinstance(value, (int, float, str, bytes, tuple, list, dict)):
        base = next(base for base in type(value).__mro__ if base.__module__ == "builtins")
        return f"a {kind} would come back as a plain {base.__name__}; make it one"
    if hasattr(value, "state_dict"):
        return f"a {kind} cannot be written down; keep its state_dict() instead"
    return f"a {kind} cannot be written down; keep plain values, lists, dicts and tensors instead"
