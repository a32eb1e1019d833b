"""Random number generators of a user's own, as objects with a ``state_dict``: loading puts a state back in place, so
that whoever holds the generator (a sampler, a dropout of one's own) goes on with it."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateError


class _Kept:
    """A generator. Its state says of which kind it is, since the state of one kind means nothing to another."""

    def __init__(self, kind: str, generator: Any) -> None:
        self._kind = kind
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._kind, "state": _STATES[self._kind][0](self._generator)}

    def load_state_dict(self, saved: Any) -> None:
        """Raises StateError where `saved` is of another kind of generator."""
        if not isinstance(saved, dict) or saved.get("generator") != self._kind:
            was = saved.get("generator", "a dict") if isinstance(saved, dict) else type(saved).__name__
            raise StateError(f"it is a {self._kind}, and was saved as {was}: make it of that kind again")
        _STATES[self._kind][1](self._generator, saved["state"])


def as_stateful(value: Any) -> Any:
    """`value`, or what keeps it where it is a generator."""
    if isinstance(value, torch.Generator):
        return _Kept("torch.Generator", value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Kept("random.Random", value)
    if "numpy.random" in sys.modules:
        if isinstance(value, np.random.Generator):
            return _Kept("numpy.random.Generator", value)
        if isinstance(value, np.random.RandomState):
            return _Kept("numpy.random.RandomState", value)
    return value


def of_python(generator: Any) -> dict[str, Any]:
    """The state of a random.Random, or of the module `random`, as a tree for state_tree."""
    version, words, gauss_next = generator.getstate()
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss_next": gauss_next}


def into_python(generator: Any, state: dict[str, Any]) -> None:
    """Puts it back."""
    words = struct.unpack(f"<{len(state['words']) // 4}I", state["words"])
    generator.setstate((state["version"], words, state["gauss_next"]))


_STATES: dict[str, tuple[Any, Any]] = {
    "torch.Generator": (torch.Generator.get_state, torch.Generator.set_state),
    "random.Random": (of_python, into_python),
    "numpy.random.Generator": (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    "numpy.random.RandomState": (
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
}
