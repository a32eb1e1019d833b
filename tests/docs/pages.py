"""Pages of documentation as data: their code blocks, run in order in a folder, and their links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\S+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. file_name: what its first line, a comment, calls it; None where it is not a file."""

    language: str
    text: str
    file_name: str | None


def blocks_of(page: Path) -> list[Block]:
    found = []
    for language, text in _BLOCK.findall(page.read_text()):
        name = _FILE_NAME.match(text)
        found.append(Block(language, text, name[1] if name else None))
    return found


def write_files(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.text)


def reader_environment(python: Path = Path(sys.executable), path: Path | None = None) -> dict[str, str]:
    """A reader's shell, in which `python` and the commands beside it are found. path: of further modules."""
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # for small models on a busy machine
    }
    environment.pop("MKL_CBWR", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return environment


def run_blocks(
    page: Path, folder: Path, *, python: Path = Path(sys.executable), path: Path | None = None, seconds: int = 110
) -> list[str]:
    """Does what a reader of `page` does in `folder`: writes the files, runs the commands, compares what they print with
    the text blocks behind them, in which "..." stands for anything. Returns what each command printed.

    python, path: see `reader_environment`. seconds: that a block may take.
    """
    write_files(page, folder)
    outputs: list[str] = []
    for block in blocks_of(page):
        if block.file_name is not None:
            continue
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=reader_environment(python, path),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
            assert done.returncode == 0, f"{page.name}:\n{block.text}\n{done.stdout}"
            assert "Warning" not in done.stdout, done.stdout
            outputs.append(done.stdout)
        elif block.language == "text":
            check_output(block.text, outputs[-1])
        else:
            raise AssertionError(f"{page.name}: nobody runs this block:\n{block.text}")
    return outputs


def check_output(expected: str, printed: str) -> None:
    """Each line of `expected` is a line of `printed`, in order; "..." stands for anything."""
    lines = iter(printed.splitlines())
    for wanted in expected.splitlines():
        pattern = ".*".join(re.escape(part) for part in wanted.split("..."))
        assert any(re.fullmatch(pattern, line) for line in lines), f"no line {wanted!r} in\n{printed}"
