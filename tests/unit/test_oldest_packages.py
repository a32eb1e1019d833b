"""What pyproject.toml allows is what was tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("tensorboard", "export", "bench", "sim")


def releases(lines: list[str], sign: str) -> dict[str, tuple[int, ...]]:
    """By package, without zeros at the end: 1.26 and 1.26.0 are one release."""
    found = {}
    for line in lines:
        if match := re.fullmatch(rf"([\w-]+){sign}([\d.]+)", line.strip()):
            numbers = [int(number) for number in match[2].split(".")]
            while numbers[-1] == 0:
                numbers.pop()
            found[match[1]] = tuple(numbers)
    return found


def test_the_oldest_packages_that_are_allowed_are_those_that_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = releases([*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])], ">=")
    assert len(allowed) >= len(project["dependencies"])
    assert releases((ROOT / "constraints-oldest.txt").read_text().splitlines(), "==") == allowed


def test_every_package_that_is_needed_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = releases((ROOT / "constraints.txt").read_text().splitlines(), "==")
    needed = releases(project["dependencies"], ">=")
    assert {name: pinned[name] for name in needed if pinned[name] < needed[name]} == {}
