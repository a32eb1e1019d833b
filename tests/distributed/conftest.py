"""Makes this folder's modules importable, and the processes that ranks and commands are forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked_commands import Commands
from group_runs import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks() as process:
        yield process


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    with Commands() as process:
        yield process
