"""Which implementation of a kernel runs: Triton's on CUDA tensors where Triton is installed, else the plain-torch twin.

Nothing here or beside it imports Triton before a kernel of it is going to run: it is optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Implementation = Literal["triton", "twin"]

_chosen: ContextVar[Implementation | None] = ContextVar("chosen", default=None)


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Runs every kernel as `implementation` has it. For tests: Triton's interpreter takes CPU tensors, too."""
    token = _chosen.set(implementation)
    try:
        yield
    finally:
        _chosen.reset(token)


def runs_triton(tensor: Tensor) -> bool:
    """Whether a kernel on `tensor` is Triton's."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen == "triton"
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, where Triton launches."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
