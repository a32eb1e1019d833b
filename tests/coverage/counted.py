"""What the interpreter of `make coverage` imports when it starts, in every process: coverage.py, which measures it, and
the core that was built with counters in place of the installed one.

interpreter.py makes that interpreter. Nothing here is imported by tests."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/coverage"


class _CountedCore:
    """Finds `holdfast._core` in the build with counters."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name != "holdfast._core":
            return None
        return spec_from_file_location(name, _core())


def _core() -> Path:
    found = list(BUILD.glob("_core*.so"))
    assert len(found) == 1, f"{found}: make coverage builds one"
    return found[0]


def begin() -> None:
    """Begins the measurement, where the environment asks for one."""
    sys.path.insert(0, str(ROOT / "src"))
    sys.meta_path.insert(0, _CountedCore)  # type: ignore[arg-type]
    if "COVERAGE_PROCESS_START" not in os.environ:
        return
    import coverage

    coverage.process_startup()


begin()
