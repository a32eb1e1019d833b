"""Every page of the repository can be reached and holds together; the README is short, and its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pages import ROOT, blocks_of, reader_environment

MAX_README_WORDS = 900
_IGNORED = {".git", ".venv", ".venv-peers", "build", "dist", "runs", "shared", "node_modules"}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def markdown_files() -> list[Path]:
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _IGNORED and not name.startswith(".")]
        found += [Path(folder) / name for name in files if name.endswith(".md")]
    return sorted(found)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        anchors.add(slug if not seen[slug] else f"{slug}-{seen[slug]}")
        seen[slug] += 1
    return anchors


@pytest.mark.parametrize("page", markdown_files(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(without_code(page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors_of(target))
        if not is_there or not target.is_relative_to(ROOT):
            broken.append(link)
    assert not broken


def test_pages_that_code_names_are_there() -> None:
    """Comments and messages of the sources send readers to pages by name."""
    missing = []
    for folder in ("src", "core", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".toml"):
                names = re.findall(r"\bdocs/[\w/-]+\.(?:md|png)\b", path.read_text())
                missing += [f"{path.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).exists()]
    assert not missing


def test_files_of_the_sources_that_pages_name_are_there() -> None:
    """By their paths from the root, or from where their kind lies."""
    roots = [ROOT / folder for folder in (".", "src/holdfast", "src/holdfast_lab", "core", "tests", "benchmarks")]
    for page in markdown_files():
        names = re.findall(r"(?<![\w/.-])(?:\w+/)+\w+\.(?:py|h|cpp)\b", page.read_text())
        assert not [name for name in names if not any((root / name).exists() for root in (*roots, page.parent))], page


def test_the_index_names_every_page_of_docs() -> None:
    index = ROOT / "docs/README.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text())}
    assert {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - named == {index.resolve()}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def test_the_readme_s_lines_train(pool_root: Path) -> None:
    """As they stand, but for the pool's directory and the number of steps."""
    (block,) = (block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    assert len(block.text.splitlines()) <= 32
    text = block.text.replace("/dev/shm/my_pool", str(pool_root / "pool")).replace("pool.step < 200", "pool.step < 5")
    assert "my_pool" not in text
    assert "< 200" not in text
    done = subprocess.run(
        [sys.executable, "-c", f"{text}\nprint('reached', pool.step, bool(loss < 1))"],
        env={**reader_environment(), "MKL_CBWR": "AUTO,STRICT"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout == "reached 5 True\n", done.stderr
    assert not done.stderr
