"""The typed codec of training state: a tree of plain values and tensors, as one JSON text and a list of tensors.

Invariants
- What comes back has the types, values and dict order of what went in, floats to the bit (NaNs with their payload);
  only `OrderedDict` and `defaultdict` become `dict`, and a `Parameter` or other tensor subclass becomes a `Tensor`.
- Nothing is pickled, imported, evaluated or called: reading builds values of the types listed below and no others.
- What cannot be written down is a StateError that names its place in the tree; what cannot be read is Corrupted.
- Equal trees give equal bytes, and the text changes only when something other than a tensor's contents changes.

The text is ASCII JSON: ``{"format": 1, "tensors": [[dtype, shape], ...], "tree": node}``. None, bool, str, list, dict
with str keys, float and int (64 bits) are their JSON selves; every other value is an object with one key that begins
with "$":

    {"$tensor": number}                     a tensor; the same object twice has the same number
    {"$ordered": [number, [1, 0]]}          one whose dimensions lie in memory in this order, the outermost first
    {"$tuple": [...]}  {"$size": [...]}     tuple, torch.Size
    {"$dict": [[key, value], ...]}          a dict with keys that are no str, or that begin with "$"
    {"$counter": [[key, value], ...]}       collections.Counter (MultiStepLR keeps one)
    {"$int": "-0x1f..."}                    an int beyond 64 bits
    {"$float": "7ff8000000000000"}          NaN or infinity: the bits of the IEEE double
    {"$bytes": "<base64>"} or {"$bytes": number}   short ones here, long ones as a uint8 tensor
    {"$dtype": "float32"}  {"$device": "cuda:0"}   torch.dtype, torch.device
    {"$array": number}                      a numpy array, as a tensor
    {"$array": [dtype, shape, bytes]}       a numpy array of a dtype that torch lacks (dates, text)
    {"$scalar": [dtype, bytes]}             a numpy scalar
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import Corrupted, StateError
from holdfast.state.tree_names import FORMAT
from holdfast.state.tree_reader import Reader, parse
from holdfast.state.tree_writer import Unwritable, Writer, path_of

ALIGNMENT_BYTES = 64


def flatten(tree: Any, *, ordered: bool = False) -> tuple[bytes, list[Tensor]]:
    """The text of `tree`, and its tensors in order of first occurrence.

    The tensors are those of the tree, on their device and with their strides: whoever copies them makes them contiguous
    and brings them to the CPU. (Numpy arrays and long bytes come as CPU tensors; arrays share memory where they can.)
    ordered: the text has the order of a tensor's dimensions in memory, too, by which products with it are computed (a
    matrix of eigenvectors lies by columns).
    Raises StateError that names the place of what cannot be written down.
    """
    writer = Writer(ordered=ordered)
    try:
        node = writer.encode(tree)
        text = _to_json({"format": FORMAT, "tensors": writer.records, "tree": node})
    except Unwritable as error:
        raise StateError(f"{path_of(error.path)}: {error.reason}") from None
    except RecursionError:
        raise StateError("the state contains itself, or is nested too deep to be written down") from None
    return text.encode("ascii"), writer.tensors


def unflatten(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    """The tree of `flatten`, with `tensors` (same number, dtypes and shapes) in their places; they are not copied, but
    for those that are ordered.

    Raises Corrupted if `structure` is not what flatten writes or does not fit the tensors, FormatMismatch if a later
    version wrote it.
    """
    records, node = parse(structure)
    found = describe_tensors(tensors)
    if len(found) != len(records):
        raise Corrupted(f"state: {len(records)} tensors are described, {len(found)} are there")
    for number, (record, actual) in enumerate(zip(records, found, strict=True)):
        if record != actual:
            raise Corrupted(f"state: tensor {number} is described as {record}, and is {actual}")
    try:
        return Reader(list(tensors)).decode(node)
    except RecursionError:
        raise Corrupted("state: the structure is nested too deep") from None


def unpack(structure: bytes, tensors: bytes | bytearray | memoryview) -> Any:
    """The tree of `flatten`, its tensors copied out of `tensors`: their bytes as `layout` places them.

    Every tensor is one on the CPU with memory of its own, contiguous or as it was ordered. Raises as `unflatten` does.
    """
    records, _ = parse(structure)
    offsets, total = _offsets([_num_bytes(dtype, shape) for dtype, shape in records])
    view = memoryview(tensors).cast("B")
    if view.nbytes != total:
        raise Corrupted(f"state: the tensors should have {total} bytes, there are {view.nbytes}")
    out = []
    for (dtype, shape), offset in zip(records, offsets, strict=True):
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if tensor.numel():
            destination = tensor.view(-1).view(torch.uint8).numpy()
            destination[:] = np.frombuffer(view, dtype=np.uint8, count=destination.size, offset=offset)
        out.append(tensor)
    return unflatten(structure, out)


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where the contiguous bytes of each tensor begin when they lie one after the other, and the end of the last.

    Offsets are in bytes, multiples of 64.
    """
    return _offsets([tensor.nbytes for tensor in tensors])


def describe_tensors(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What the text records of each tensor: dtype and shape."""
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def _offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    offsets = []
    end = 0
    for size_bytes in sizes_bytes:
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(begin)
        end = begin + size_bytes
    return offsets, end


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


_to_json = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode
