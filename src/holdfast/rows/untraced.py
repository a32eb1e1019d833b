"""What torch.compile does not trace, and what nobody records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from holdfast.errors import StepError

_OUTSIDE = "rows lie in the pool: record or compile the module that is given their vectors, and look rows up outside"
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def untraced(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """What ``torch.compile`` leaves as it is: of the verbs it would trace what is Python, anew for each number of ids.
    torch.compiler.disable imports the compiler, so it is asked when something is called, by when an optimizer has."""
    disabled: list[Callable[_Given, _Result]] = []

    @functools.wraps(method)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        if not disabled:
            disabled.append(torch.compiler.disable(method, reason=_OUTSIDE))  # type: ignore[no-untyped-call]
        return disabled[0](*given, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is this function traced
    call._torchdynamo_disable_msg = _OUTSIDE  # type: ignore[attr-defined]
    return call


def refuse_recording() -> NoReturn:
    """Raises StepError: what is recorded runs without the pool."""
    raise StepError(f"a forward pass that torch.jit, torch.export, torch.fx or ONNX records: {_OUTSIDE}")


def check_not_recorded(features: Any) -> None:
    """Raises StepError where the forward pass of `features` is recorded, to be run later."""
    given = features.values() if isinstance(features, Mapping) else (features,)
    is_symbolic = any(isinstance(part, torch.fx.Proxy) for part in given)
    if is_symbolic or torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        refuse_recording()
