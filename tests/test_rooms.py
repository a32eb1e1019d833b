"""Folders of the sources are rooms in an order, and nothing uses a room that comes after its own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core"


def rooms_of(page: Path) -> list[str]:
    """The first column of the page's table."""
    return re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)


def test_the_core_s_page_names_every_room() -> None:
    assert sorted(rooms_of(CORE / "README.md")) == sorted(path.name for path in CORE.iterdir() if path.is_dir())
    assert [path.name for path in CORE.iterdir() if path.is_file()] == ["README.md"]


def test_files_of_the_core_include_only_what_is_in_their_room_or_one_before() -> None:
    order = {room: number for number, room in enumerate(rooms_of(CORE / "README.md"))}
    wrong = []
    for path in CORE.rglob("*"):
        if path.suffix not in (".h", ".cpp"):
            continue
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            room = name.partition("/")[0]
            if room not in order or order[room] > order[path.parent.name]:
                wrong.append(f"{path.relative_to(ROOT)} includes {name}")
    assert not wrong
