"""Tables of the benchmarks' reports."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_table(head: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of one, and an empty one behind it."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]
