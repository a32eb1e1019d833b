"""A loop of a user's own in which each rank has a number of threads of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import own_loops


def warned(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: threads, of this rank; and those of own_loops.train."""
    torch.set_num_threads(options["threads"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own_loops.train(directory, say, options)
    say(warned=[str(one.message) for one in caught if "the run goes on" in str(one.message)])
