"""Pages of reports: one for a question, of whatever benchmarks answer it.

A folder of reports/ has a page, report.md. A folder within it (reports/larger/tiers) has results and pictures of its
own, and a part of the page above: under a heading by its name, between two markers. Whoever writes a page or a part
replaces what was there before and leaves the rest. Elsewhere (runs/bench) each folder has a page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

REPORTS = Path(__file__).resolve().parent / "reports"

_PART = re.compile(r"<!-- part: (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end of \1 -->\n", re.DOTALL)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:|#|/)([^)\s]+)\)")


def page_of(directory: Path, reports: Path = REPORTS) -> Path:
    """Where the report of `directory` is."""
    return (directory.parent if _is_part(directory, reports) else directory) / "report.md"


def write(directory: Path, text: str, reports: Path = REPORTS) -> None:
    """Replaces the report of `directory` by `text`, markdown with links from there."""
    page = page_of(directory, reports)
    there = page.read_text() if page.exists() else ""
    own, parts = _PART.sub("", there).strip("\n"), {each["name"]: each[0] for each in _PART.finditer(there)}
    if _is_part(directory, reports):
        name = directory.name
        parts[name] = f"<!-- part: {name} -->\n{part_of(directory, text)}<!-- end of {name} -->\n"
    else:
        own = text.strip("\n")
    page.write_text("\n".join(block for block in (f"{own}\n" if own else "", *parts.values()) if block))


def read(directory: Path, reports: Path = REPORTS) -> str:
    """What it has, as it stands on its page."""
    text = page_of(directory, reports).read_text()
    if not _is_part(directory, reports):
        return _PART.sub("", text).strip("\n") + "\n"
    return next(each["text"] for each in _PART.finditer(text) if each["name"] == directory.name)


def part_of(directory: Path, text: str) -> str:
    """What `write` makes of it for the page above: headings are two levels further down, links begin there."""
    text = _HEADING.sub(lambda heading: "##" + heading[0], text.strip("\n"))
    text = _LINK.sub(lambda link: f"]({posixpath.normpath(posixpath.join(directory.name, link[1]))})", text)
    return f"## {directory.name}\n\n{text}\n"


def _is_part(directory: Path, reports: Path) -> bool:
    return directory.resolve().parent.parent == reports.resolve()
