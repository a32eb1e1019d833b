"""Loops of own_loops.py under a default device that is not the host's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from elsewhere import Elsewhere

import own_loops


def train(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    with Elsewhere():
        own_loops.train(directory, say, options)


def weighted(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    with Elsewhere():
        own_loops.weighted(directory, say, options)
