"""The half of the codec that reads (state_tree.py): every node is checked before it is believed."""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import Corrupted, FormatMismatch
from holdfast.state.tree_names import DTYPES, FORMAT, NUMPY_SCALAR_KINDS, shortened


def parse(structure: bytes) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], Any]:
    """The records (dtype, shape) and the tree's node."""
    try:
        document = json.loads(structure.decode("ascii"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, ASCII, and integers of too many digits
        raise Corrupted(f"state: the structure is not what holdfast writes: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise Corrupted("state: the structure has no format number")
    if document["format"] != FORMAT:
        raise FormatMismatch(f"state: format {shortened(document['format'])}; this build knows {FORMAT}")
    if document.keys() != {"format", "tensors", "tree"} or not isinstance(document["tensors"], list):
        raise Corrupted(f"state: the structure's fields are {shortened(list(document))}")
    records = []
    for record in document["tensors"]:
        if not isinstance(record, list) or len(record) != 2:
            raise Corrupted(f"state: a tensor is described as {shortened(record)}")
        records.append((_dtype(record[0]), _shape(record[1])))
    return records, document["tree"]


class Reader:
    """One unflatten: every node is checked before it is believed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._laid_out: dict[int, Tensor] = {}
        self._decoders: dict[str, Callable[[Any], Any]] = {
            "$tensor": self._tensor,
            "$ordered": self._ordered,
            "$tuple": lambda body: tuple(self._list(body)),
            "$size": lambda body: torch.Size(_shape(body)),
            "$dict": lambda body: self._pairs(body, {}),
            "$counter": lambda body: self._pairs(body, Counter()),
            "$int": _decode_int,
            "$float": _decode_float,
            "$bytes": self._bytes,
            "$dtype": _dtype,
            "$device": _decode_device,
            "$array": self._array,
            "$scalar": self._scalar,
        }

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((tag, body),) = node.items()
            if tag in self._decoders:
                return self._decoders[tag](body)
        out = {}
        for key, value in node.items():
            if key.startswith("$"):
                raise Corrupted(f"state: unknown tag {key!r}")
            out[key] = self.decode(value)
        return out

    def _list(self, body: Any) -> list[Any]:
        if not isinstance(body, list):
            raise Corrupted(f"state: a list is expected, {shortened(body)} is there")
        return [self.decode(item) for item in body]

    def _pairs(self, body: Any, out: dict[Any, Any]) -> dict[Any, Any]:
        for pair in self._list_of_lists(body, 2):
            key, value = self.decode(pair[0]), self.decode(pair[1])
            try:
                if key in out:
                    raise Corrupted(f"state: the key {shortened(key)} occurs twice")
                out[key] = value
            except TypeError:
                raise Corrupted(f"state: {shortened(key)} cannot be a key") from None
        return out

    def _list_of_lists(self, body: Any, length: int) -> list[list[Any]]:
        if not isinstance(body, list) or not all(isinstance(item, list) and len(item) == length for item in body):
            raise Corrupted(f"state: a list of lists of {length} is expected, {shortened(body)} is there")
        return body

    def _tensor(self, body: Any) -> Tensor:
        if type(body) is not int or not 0 <= body < len(self._tensors):
            raise Corrupted(f"state: there is no tensor {shortened(body)}; there are {len(self._tensors)}")
        return self._tensors[body]

    def _ordered(self, body: Any) -> Tensor:
        number, order = self._list_of_lists([body], 2)[0]
        tensor = self._tensor(number)
        if number not in self._laid_out:
            dims = list(range(tensor.dim()))
            if not isinstance(order, list) or not all(type(dim) is int for dim in order) or sorted(order) != dims:
                raise Corrupted(f"state: {shortened(order)} is no order of the {tensor.dim()} dimensions of a tensor")
            like = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
            self._laid_out[number] = like.copy_(tensor)
        return self._laid_out[number]

    def _bytes(self, body: Any) -> bytes:
        if isinstance(body, str):
            return _decode_base64(body)
        tensor = self._tensor(body)
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise Corrupted(f"state: tensor {body} stands for bytes, and is {tensor.dtype} {tuple(tensor.shape)}")
        return tensor.numpy().tobytes()

    def _array(self, body: Any) -> np.ndarray[Any, Any]:
        if isinstance(body, list):
            dtype, shape, content = self._list_of_lists([body], 3)[0]
            return self._from_bytes(dtype, _shape(shape), self.decode(content))
        if type(body) is int and body in self._arrays:
            return self._arrays[body]
        tensor = self._tensor(body)
        try:
            array: np.ndarray[Any, Any] = tensor.numpy()
        except TypeError:
            raise Corrupted(f"state: tensor {body} stands for a numpy array, and is {tensor.dtype}") from None
        self._arrays[body] = array
        return array

    def _scalar(self, body: Any) -> Any:
        dtype, content = self._list_of_lists([body], 2)[0]
        if not isinstance(content, str):
            raise Corrupted(f"state: base64 is expected, {shortened(content)} is there")
        return self._from_bytes(dtype, (), _decode_base64(content))[()]

    def _from_bytes(self, name: Any, shape: tuple[int, ...], content: Any) -> np.ndarray[Any, Any]:
        try:
            dtype = np.dtype(name) if isinstance(name, str) else None
        except (TypeError, ValueError, SyntaxError):
            dtype = None
        if dtype is None or dtype.kind not in NUMPY_SCALAR_KINDS or not dtype.itemsize or dtype.subdtype is not None:
            raise Corrupted(f"state: {shortened(name)} is no numpy dtype of plain values")
        if not isinstance(content, bytes) or len(content) != math.prod(shape) * dtype.itemsize:
            raise Corrupted(f"state: a numpy array {dtype} {shape} does not have these bytes: {shortened(content)}")
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
        if content:
            array.reshape(-1)[:] = np.frombuffer(content, dtype)
        return array


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Corrupted(f"state: {shortened(text)} is not base64") from None


def _decode_int(body: Any) -> int:
    try:
        if isinstance(body, str):
            return int(body, 16)
    except ValueError:
        pass
    raise Corrupted(f"state: {shortened(body)} is no hexadecimal integer")


def _decode_float(body: Any) -> float:
    try:
        if isinstance(body, str):
            return float(struct.unpack(">d", bytes.fromhex(body))[0])
    except (ValueError, struct.error):
        pass
    raise Corrupted(f"state: {shortened(body)} are not the bits of a double")


def _decode_device(body: Any) -> torch.device:
    try:
        if isinstance(body, str):
            return torch.device(body)
    except RuntimeError:
        pass
    raise Corrupted(f"state: {shortened(body)} is no device")


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise Corrupted(f"state: {shortened(name)} is no tensor dtype that this build knows")
    return DTYPES[name]


def _shape(body: Any) -> tuple[int, ...]:
    # The bound on every product of sizes keeps torch from overflowing on a forged shape.
    if not isinstance(body, list) or not all(type(size) is int and size >= 0 for size in body):
        raise Corrupted(f"state: {shortened(body)} is no shape")
    if len(body) > 64 or math.prod(max(size, 1) for size in body) >= 2**59:
        raise Corrupted(f"state: no tensor has the shape {shortened(body)}")
    return tuple(body)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
