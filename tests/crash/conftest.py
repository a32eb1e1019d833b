"""Makes the crash tests' own modules importable, and the process that their children are forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_runs import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process
