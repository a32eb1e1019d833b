"""Random number generators: the process's, whose state a tree holds, and a user's own, objects with a ``state_dict``.

Loading puts a state back in place, so that whoever holds the generator (a sampler, a dropout of one's own) goes on with
it."""

from __future__ import annotations

import random
import struct
import sys
import warnings
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


def is_generator(value: Any) -> bool:
    """Whether `as_stateful` keeps it as one."""
    return as_stateful(value) is not value


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
