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

import base64
import binascii
import enum
import io
import json
import math
import random
import struct
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from holdfast.errors import Corrupted, FormatMismatch, StateError
from holdfast.state.generators import into_python, of_python

ALIGNMENT_BYTES = 64

_FORMAT = 1
# Longer bytes go to the tensors: copied at memory speed, and the text stays the same from step to step.
_INLINE_BYTES = 64
_INT64 = range(-(2**63), 2**63)
_INTEGER_NAMES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
_FLOAT_NAMES = ["float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"]
_FLOAT8_NAMES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
_DTYPE_NAMES = [*_INTEGER_NAMES, *_FLOAT_NAMES, *_FLOAT8_NAMES]
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TORCH_NUMPY_KINDS = frozenset("?bhilqBHILQefdFD")
_NUMPY_SCALAR_KINDS = frozenset("biufcmMSU")


def flatten(tree: Any) -> tuple[bytes, list[Tensor]]:
    """The text of `tree`, and its tensors in order of first occurrence.

    The tensors are those of the tree, on their device and with their strides: whoever copies them makes them contiguous
    and brings them to the CPU. (Numpy arrays and long bytes come as CPU tensors; arrays share memory where they can.)
    Raises StateError that names the place of what cannot be written down.
    """
    writer = _Writer()
    try:
        node = writer.encode(tree)
        text = _to_json({"format": _FORMAT, "tensors": writer.records, "tree": node})
    except _Unwritable as error:
        raise StateError(f"{path_of(error.path)}: {error.reason}") from None
    except RecursionError:
        raise StateError("the state contains itself, or is nested too deep to be written down") from None
    return text.encode("ascii"), writer.tensors


def unflatten(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    """The tree of `flatten`, with `tensors` (same number, dtypes and shapes) in their places; they are not copied.

    Raises Corrupted if `structure` is not what flatten writes or does not fit the tensors, FormatMismatch if a later
    version wrote it.
    """
    records, node = _parse(structure)
    found = describe_tensors(tensors)
    if len(found) != len(records):
        raise Corrupted(f"state: {len(records)} tensors are described, {len(found)} are there")
    for number, (record, actual) in enumerate(zip(records, found, strict=True)):
        if record != actual:
            raise Corrupted(f"state: tensor {number} is described as {record}, and is {actual}")
    try:
        return _Reader(list(tensors)).decode(node)
    except RecursionError:
        raise Corrupted("state: the structure is nested too deep") from None


def unpack(structure: bytes, tensors: bytes | bytearray | memoryview) -> Any:
    """The tree of `flatten`, its tensors copied out of `tensors`: their bytes as `layout` places them.

    Every tensor is a contiguous one on the CPU with memory of its own. Raises as `unflatten` does.
    """
    records, _ = _parse(structure)
    offsets, total = _offsets([_num_bytes(dtype, shape) for dtype, shape in records])
    view = memoryview(tensors).cast("B")
    if view.nbytes != total:
        raise Corrupted(f"state: the tensors should have {total} bytes, there are {view.nbytes}")
    out = []
    for (dtype, shape), offset in zip(records, offsets, strict=True):
        tensor = torch.empty(shape, dtype=dtype)
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


def rng_state() -> dict[str, Any]:
    """The state of the process's random number generators, as a tree for `flatten`.

    torch: CPU generator, uint8 tensor. python: `random`. numpy: the legacy global generator, if numpy.random was
    imported. cuda: one uint8 tensor per device, if CUDA is initialised.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": of_python(random)}
    if "numpy.random" in sys.modules:
        legacy = np.random.get_state(legacy=False)  # noqa: NPY002  (what users draw from is what must come back)
        state["numpy"] = {**legacy, **legacy["state"]}
        del state["numpy"]["state"]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    return state


def set_rng_state(tree: dict[str, Any]) -> None:
    """Puts the random number generators where `rng_state` found them. Raises StateError if `tree` is no such state.

    The states of CUDA devices that this process does not have are left out, with a warning.
    """
    try:
        into_python(random, tree["python"])
        torch.set_rng_state(tree["torch"])
        if (legacy := tree.get("numpy")) is not None:
            np.random.set_state(  # noqa: NPY002
                (legacy["bit_generator"], legacy["key"], legacy["pos"], legacy["has_gauss"], legacy["gauss"])
            )
        cuda = tree.get("cuda", [])
        num_devices = torch.cuda.device_count() if cuda else 0
        if len(cuda) > num_devices:
            warnings.warn(
                f"the state has random number generators of {len(cuda)} CUDA devices, this process has {num_devices}: "
                "what is drawn on the others will differ",
                stacklevel=2,
            )
        for device, state in enumerate(cuda[:num_devices]):
            torch.cuda.set_rng_state(state, device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise StateError(f"the state of the random number generators does not fit: {error!r}") from error


class _Unwritable(Exception):
    """`reason`, and the keys that lead to the value, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []


class _Writer:
    """One flatten: collects tensors while it turns values into what `json` writes. Dispatches by exact type, because
    subclasses of int, str or tuple (enums, named tuples) would come back as something else."""

    __slots__ = ("_encoders", "_numbers", "records", "tensors")

    def __init__(self) -> None:
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
        raise _Unwritable(_reason(value))

    def _list(self, values: Sequence[Any]) -> list[Any]:
        out = []
        try:
            for value in values:
                encoder = self._encoders.get(type(value))
                out.append(self._other(value) if encoder is None else encoder(value))
        except _Unwritable as error:
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
        except _Unwritable as error:
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
        except _Unwritable as error:
            error.path.append(key)
            raise
        return out

    def _tuple(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return {"$tuple": self._list(values)}

    def _counter(self, values: Counter[Any]) -> dict[str, Any]:
        return {"$counter": self._pairs(values)}

    def _tensor(self, tensor: Tensor) -> dict[str, int]:
        return {"$tensor": self._number(tensor)}

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            if is_lazy(tensor):
                raise _Unwritable("the parameter has no values yet; call forward once before the Checkpoint is made")
            name = _NAMES.get(tensor.dtype)
            if name is None or tensor.layout is not torch.strided or tensor.is_meta:
                raise _Unwritable(
                    f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device} cannot be written "
                    "down; only dense tensors with memory and a plain dtype can"
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
            self.records.append((_NAMES[tensor.dtype], [*tensor.shape]))
        return {"$array": number}


class _Reader:
    """One unflatten: every node is checked before it is believed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._decoders: dict[str, Callable[[Any], Any]] = {
            "$tensor": self._tensor,
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
            raise Corrupted(f"state: a list is expected, {_shortened(body)} is there")
        return [self.decode(item) for item in body]

    def _pairs(self, body: Any, out: dict[Any, Any]) -> dict[Any, Any]:
        for pair in self._list_of_lists(body, 2):
            key, value = self.decode(pair[0]), self.decode(pair[1])
            try:
                if key in out:
                    raise Corrupted(f"state: the key {_shortened(key)} occurs twice")
                out[key] = value
            except TypeError:
                raise Corrupted(f"state: {_shortened(key)} cannot be a key") from None
        return out

    def _list_of_lists(self, body: Any, length: int) -> list[list[Any]]:
        if not isinstance(body, list) or not all(isinstance(item, list) and len(item) == length for item in body):
            raise Corrupted(f"state: a list of lists of {length} is expected, {_shortened(body)} is there")
        return body

    def _tensor(self, body: Any) -> Tensor:
        if type(body) is not int or not 0 <= body < len(self._tensors):
            raise Corrupted(f"state: there is no tensor {_shortened(body)}; there are {len(self._tensors)}")
        return self._tensors[body]

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
            raise Corrupted(f"state: base64 is expected, {_shortened(content)} is there")
        return self._from_bytes(dtype, (), _decode_base64(content))[()]

    def _from_bytes(self, name: Any, shape: tuple[int, ...], content: Any) -> np.ndarray[Any, Any]:
        try:
            dtype = np.dtype(name) if isinstance(name, str) else None
        except (TypeError, ValueError, SyntaxError):
            dtype = None
        if dtype is None or dtype.kind not in _NUMPY_SCALAR_KINDS or not dtype.itemsize or dtype.subdtype is not None:
            raise Corrupted(f"state: {_shortened(name)} is no numpy dtype of plain values")
        if not isinstance(content, bytes) or len(content) != math.prod(shape) * dtype.itemsize:
            raise Corrupted(f"state: a numpy array {dtype} {shape} does not have these bytes: {_shortened(content)}")
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
        if content:
            array.reshape(-1)[:] = np.frombuffer(content, dtype)
        return array


def _parse(structure: bytes) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], Any]:
    """The records (dtype, shape) and the tree's node."""
    try:
        document = json.loads(structure.decode("ascii"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, ASCII, and integers of too many digits
        raise Corrupted(f"state: the structure is not what holdfast writes: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise Corrupted("state: the structure has no format number")
    if document["format"] != _FORMAT:
        raise FormatMismatch(f"state: format {_shortened(document['format'])}; this build knows {_FORMAT}")
    if document.keys() != {"format", "tensors", "tree"} or not isinstance(document["tensors"], list):
        raise Corrupted(f"state: the structure's fields are {_shortened(list(document))}")
    records = []
    for record in document["tensors"]:
        if not isinstance(record, list) or len(record) != 2:
            raise Corrupted(f"state: a tensor is described as {_shortened(record)}")
        records.append((_dtype(record[0]), _shape(record[1])))
    return records, document["tree"]


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


def _same(value: Any) -> Any:
    return value


def _encode_int(value: int) -> Any:
    return value if value in _INT64 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if value - value == 0.0 else {"$float": struct.pack(">d", value).hex()}


def _encode_size(value: torch.Size) -> dict[str, list[int]]:
    return {"$size": list(value)}


def _encode_dtype(value: torch.dtype) -> dict[str, str]:
    if value not in _NAMES:
        raise _Unwritable(f"{value} cannot be written down")
    return {"$dtype": _NAMES[value]}


def _encode_device(value: torch.device) -> dict[str, str]:
    return {"$device": str(value)}


def _numpy_dtype(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _NUMPY_SCALAR_KINDS or not dtype.itemsize:
        raise _Unwritable(f"a numpy value of dtype {dtype} cannot be written down; only numbers, dates and text can")
    return dtype.str


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Corrupted(f"state: {_shortened(text)} is not base64") from None


def _decode_int(body: Any) -> int:
    try:
        if isinstance(body, str):
            return int(body, 16)
    except ValueError:
        pass
    raise Corrupted(f"state: {_shortened(body)} is no hexadecimal integer")


def _decode_float(body: Any) -> float:
    try:
        if isinstance(body, str):
            return float(struct.unpack(">d", bytes.fromhex(body))[0])
    except (ValueError, struct.error):
        pass
    raise Corrupted(f"state: {_shortened(body)} are not the bits of a double")


def _decode_device(body: Any) -> torch.device:
    try:
        if isinstance(body, str):
            return torch.device(body)
    except RuntimeError:
        pass
    raise Corrupted(f"state: {_shortened(body)} is no device")


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise Corrupted(f"state: {_shortened(name)} is no tensor dtype that this build knows")
    return _DTYPES[name]


def _shape(body: Any) -> tuple[int, ...]:
    # The bound on every product of sizes keeps torch from overflowing on a forged shape.
    if not isinstance(body, list) or not all(type(size) is int and size >= 0 for size in body):
        raise Corrupted(f"state: {_shortened(body)} is no shape")
    if len(body) > 64 or math.prod(max(size, 1) for size in body) >= 2**59:
        raise Corrupted(f"state: no tensor has the shape {_shortened(body)}")
    return tuple(body)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def path_of(innermost_first: Sequence[Any]) -> str:
    text = ""
    for key in reversed(innermost_first):
        if not text and isinstance(key, str):
            text = key
        elif isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{_shortened(key)}]"
    return text or "the state"


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
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return f"a {type(value).__name__} inside another value cannot be written down; give it to extra by its own name"
    if isinstance(value, (int, float, str, bytes, tuple, list, dict)):
        base = next(base for base in type(value).__mro__ if base.__module__ == "builtins")
        return f"a {kind} would come back as a plain {base.__name__}; make it one"
    if hasattr(value, "state_dict"):
        return f"a {kind} cannot be written down; keep its state_dict() instead"
    return f"a {kind} cannot be written down; keep plain values, lists, dicts and tensors instead"


_to_json = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode
