"""How the axes of the reports' pictures look."""

from __future__ import annotations

from typing import Any


def plain(axes: Any, title: str | None = None) -> None:
    """Without a box around them; the title over their left end."""
    if title is not None:
        axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
