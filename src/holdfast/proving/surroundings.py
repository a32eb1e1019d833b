"""The script's own variables that no Checkpoint holds: generators, tensors, optimizers, counters.

They are no part of the state, and most of them need not be. But where a resumed run parts from an uninterrupted one,
the cause is one of them, so the witness keeps a digest of each.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.proving.observation import bytes_of, short_digest
from holdfast.proving.record import OUTSIDE, Leaf
from holdfast.train.checkpoint import Checkpoint

_DEPTH = 5
_MOST_LEAVES = 2000
_MOST_BYTES = 32 << 20
_PLAIN = (bool, int, float, str, complex)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def surrounding_leaves(checkpoint: Checkpoint) -> list[Leaf]:
    """What the frames of the script hold beside `checkpoint`, the innermost first."""
    walk = _Walk(checkpoint)
    for frame in _frames():
        where = f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}"
        walk.variables(frame.f_locals, where)
        if frame.f_locals is not frame.f_globals:
            walk.variables(frame.f_globals, f"<module>, {Path(frame.f_code.co_filename).name}")
    return walk.leaves


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "holdfast" and not _is_installed(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_installed(file: str) -> bool:
    return file.startswith(("<frozen", _STANDARD_LIBRARY)) or "site-packages" in file or "dist-packages" in file


@dataclass(slots=True)
class _Walk:
    checkpoint: Checkpoint
    leaves: list[Leaf] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _bytes: int = 0

    def __post_init__(self) -> None:
        for target in self.checkpoint._state._objects.values():
            self._seen |= {id(target), id(getattr(target, "_generator", target))}
            if isinstance(target, nn.Module):
                self._seen |= {id(value) for value in (*target.parameters(), *target.buffers())}
        model = self.checkpoint._state._objects["model"]
        self._seen.discard(id(model))  # what of it is not in its state_dict counts

    def variables(self, names: Mapping[str, Any], where: str) -> None:
        if id(names) in self._seen:
            return
        self._seen.add(id(names))
        for name, value in list(names.items()):
            if not name.startswith("__"):
                self.value(name, value, where, 0)

    def value(self, name: str, value: Any, where: str, depth: int) -> None:
        if len(self.leaves) >= _MOST_LEAVES or depth > _DEPTH:
            return
        with suppress(Exception):  # whatever a stranger's object raises when it is looked at: it is only evidence
            self._value(name, value, where, depth)

    def _value(self, name: str, value: Any, where: str, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._add("number" if not isinstance(value, str) else "text", name, repr(value).encode(), where)
            return
        if value is None or isinstance(value, (type, types.ModuleType, types.FunctionType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if state := _generator_state(value):
            self._add(f"generator {type(value).__module__}.{type(value).__qualname__}", name, state, where)
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) or value.requires_grad:
                self._tensor(name, value, where)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.dtype.kind != "O":
                self._add("array", name, np.ascontiguousarray(value).tobytes(), where)
        elif isinstance(value, nn.Module):
            self._module(name, value, where, depth)
        elif isinstance(value, torch.optim.Optimizer):
            if not _is_holdfasts(value):
                self._with_state_dict(f"optimizer {type(value).__name__}", name, value, where)
        else:
            self._container(name, value, where, depth)

    def _container(self, name: str, value: Any, where: str, depth: int) -> None:
        if isinstance(value, Mapping):
            for key, item in list(value.items())[:_MOST_LEAVES]:
                self.value(f"{name}[{key!r}]", item, where, depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            if all(isinstance(item, _PLAIN) for item in value):
                self._add("list", name, repr(value).encode(), where)
                return
            for number, item in enumerate(list(value)[:_MOST_LEAVES]):
                self.value(f"{name}[{number}]", item, where, depth + 1)
        elif isinstance(value, set):
            self._add("set", name, repr(sorted(map(repr, value))).encode(), where)
        elif type(value).__module__.startswith("torch.utils.data"):
            for key in ("generator", "sampler", "batch_sampler", "dataset"):
                self.value(f"{name}.{key}", vars(value).get(key), where, depth + 1)
        elif hasattr(value, "state_dict") and not _is_holdfasts(value):
            self._with_state_dict(type(value).__name__, name, value, where)
        elif _is_users(value):
            for key, item in list(vars(value).items()):
                self.value(f"{name}.{key}", item, where, depth + 1)

    def _module(self, name: str, module: nn.Module, where: str, depth: int) -> None:
        """Of the model: what is not in its state_dict. Of another: all."""
        if _is_holdfasts(module):
            return
        for path, part in module.named_modules():
            here = f"{name}.{path}" if path else name
            if path:
                self._seen.add(id(part))
            if _is_holdfasts(part):
                continue
            self._add("number", f"{here}.training", repr(part.training).encode(), where)
            for key, item in [*part._parameters.items(), *part._buffers.items()]:
                if item is not None and (id(item) not in self._seen or key in part._non_persistent_buffers_set):
                    self._tensor(f"{here}.{key}", item, where)
            for key, item in list(vars(part).items()):
                if not key.startswith("_") and key != "training":
                    self.value(f"{here}.{key}", item, where, depth + 1)

    def _with_state_dict(self, kind: str, name: str, value: Any, where: str) -> None:
        self._add(kind, name, b"".join(_flat(value.state_dict())), where)

    def _tensor(self, name: str, tensor: Tensor, where: str) -> None:
        if tensor.nbytes <= _MOST_BYTES and self._bytes <= 8 * _MOST_BYTES and tensor.layout is torch.strided:
            self._bytes += tensor.nbytes
            self._add("tensor", name, bytes_of(tensor), where)

    def _add(self, kind: str, name: str, data: bytes | memoryview, where: str) -> None:
        self.leaves.append(Leaf(OUTSIDE, f"{name} ({where})", short_digest(data), f"{kind}"))


def _generator_state(value: Any) -> bytes | None:
    if isinstance(value, torch.Generator):
        return bytes(bytes_of(value.get_state()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)).encode()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def _flat(node: Any) -> Iterator[bytes]:
    if isinstance(node, Tensor):
        yield bytes(bytes_of(node))
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield repr(key).encode()
            yield from _flat(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _flat(value)
    elif isinstance(node, _PLAIN) or node is None:
        yield repr(node).encode()


def _is_holdfasts(value: Any) -> bool:
    """Whether holdfast looks after it; its models are the user's."""
    module = type(value).__module__
    return module.startswith("holdfast.") and not module.startswith("holdfast.models")


def _is_users(value: Any) -> bool:
    """Whether its class is of the script, or of a module beside it."""
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    is_of_main = type(value).__module__ in ("__main__", "__mp_main__")
    return (
        hasattr(value, "__dict__")
        and not _is_holdfasts(value)
        and (
            is_of_main
            or (file is not None and not _is_installed(file) and not type(value).__module__.startswith("holdfast"))
        )
    )
