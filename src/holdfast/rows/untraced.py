"""What torch.compile does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def untraced(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """What ``torch.compile`` leaves as it is: of the verbs it would trace what is Python, anew for each number of ids.
    torch.compiler.disable imports the compiler, so it is asked when something is called, by when an optimizer has."""
    disabled: list[Callable[_Given, _Result]] = []

    @functools.wraps(method)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        if not disabled:
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return disabled[0](*given, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is this function traced
    return call
