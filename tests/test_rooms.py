"""Folders of the sources are rooms in an order, and nothing uses a room that comes after its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core"
PACKAGE = ROOT / "src/holdfast"
LAB = ROOT / "src/holdfast_lab"
CHOOSERS = ("pools/pool.py", "pools/read_only.py", "pools/proving_hook.py")
MAX_LINES = 400
MAX_FUNCTION_LINES = 70


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


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """(when, module): "always", when a function is "called", or for the "types" alone."""
    tree = ast.parse(path.read_text())
    called, types = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            types |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        when = "types" if id(node) in types else "called" if id(node) in called else "always"
        if isinstance(node, ast.Import):
            yield from ((when, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((when, f"{node.module}.{alias.name}") for alias in node.names)


def test_the_packages_page_names_every_room() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").exists() or path.name == "errors.py"}
    assert sorted(rooms_of(ROOT / "src/README.md")) == sorted(found)


def test_a_room_of_the_package_imports_only_rooms_before_it() -> None:
    order = {room: number for number, room in enumerate(rooms_of(ROOT / "src/README.md"))}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in ("__init__.py", "__main__.py"):  # which hand out what the rooms have
            continue
        room = order[name.parts[0].removesuffix(".py")]
        for when, module in imports_of(path):
            parts = module.split(".")
            if parts[0] != "holdfast" or parts[1] == "_core" or when == "types":
                continue
            is_choice = when == "called" and str(name) in CHOOSERS
            if not is_choice and order.get(parts[1], len(order)) > room:
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_holdfast_does_not_know_the_lab() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if "holdfast_lab" in path.read_text()] == []
    assert any("holdfast" in path.read_text() for path in LAB.rglob("*.py"))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """What it does: a command's options and its docstring, which is its help, are not counted."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def test_files_and_functions_are_short() -> None:
    long = []
    for folder in (PACKAGE, LAB):
        for path in folder.rglob("*.py"):
            text = path.read_text()
            if len(text.splitlines()) > MAX_LINES:
                long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
            functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            long += [f"{path.relative_to(ROOT)}: {f.name}" for f in functions if lines_of(f) > MAX_FUNCTION_LINES]
    assert not long
