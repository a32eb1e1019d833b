"""Tests' folders are put on the path together, so a module's name must say which one it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    names = Counter(
        path.name for path in Path(__file__).parent.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")
    )
    assert [name for name, count in names.items() if count > 1] == []
