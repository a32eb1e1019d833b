"""A default device that is not the host's, for what holdfast makes itself and not for what its user makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import holdfast

_OURS = str(Path(holdfast.__file__).parent)
_TORCHS = str(Path(sys.modules["torch"].__file__ or "").parent)


class Elsewhere(TorchFunctionMode):
    """As under ``torch.set_default_device`` of one that has no memory: what was made there is of no use."""

    def __torch_function__(
        self, of: Callable[..., Any], types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        if of in _device_constructors() and named.get("device") is None and _caller().startswith(_OURS):
            named["device"] = "meta"
        return of(*given, **named)


def _caller() -> str:
    """The file that called torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCHS):
        frame = frame.f_back
    return frame.f_code.co_filename
