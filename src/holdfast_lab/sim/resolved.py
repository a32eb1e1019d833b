"""A system after everything that it builds on: each value, the file that says it, and what it overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast_lab.sim.library import read_tree

_NOT_INHERITED = ("base",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """key: dotted. file: that says so. overridden: what files below it said, by their names, the nearest first."""

    key: str
    value: Any
    file: Path
    overridden: Mapping[str, Any] = field(default_factory=dict)


def lines_of(chain: Sequence[Path]) -> list[Line]:
    """chain: a declaration's files, the base first. Lines in the order in which files say them. Raises ConfigError."""
    found: dict[str, Line] = {}
    for path in chain:
        for key, value in _leaves(read_tree(path), ""):
            below = found.get(key)
            overridden = {} if below is None else {below.file.stem: below.value, **below.overridden}
            found[key] = Line(key=key, value=value, file=path, overridden=overridden)
    return [line for line in found.values() if line.key not in _NOT_INHERITED]


def shown(line: Line) -> str:
    """As the file would say it, with a comment about where it is from."""
    where = line.file.stem
    if line.overridden:
        before = ", ".join(f"{name}: {json.dumps(value)}" for name, value in line.overridden.items())
        where = f"{where}, over {before}"
    return f"{line.key.rpartition('.')[2]} = {json.dumps(line.value)}  # {where}"


def grouped(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """By table of the file, "" for the keys above all tables."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.key.rpartition(".")[0], []).append(line)
    return groups


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and name not in ("after_earlier", "beside"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
