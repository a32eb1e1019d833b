"""Small runs for the tests of the command line: a configuration file, and the command in this process or in its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.admin.digest import PoolDigest, digest_pool
from holdfast.pools.read_only import at_rest
from holdfast.state.reproducibility import prepare_environment

prepare_environment()  # before any test computes; the command does it for itself

CONFIG = """
[data.synthetic]
num_samples = 640
rows = [50, 7, 400]
num_dense = 3

[validation]
num_samples = 200

[embedding]
dim = 4
optimizer = "rowwise_adagrad"
lr = 0.05

[model]
bottom = [8, 4]
top = [8, 1]

[optimizer]
name = "adam"
lr = 0.01

[train]
batch_size = 32
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Commands:
    """`holdfast` in this process, in a directory with a configuration `run.toml`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.config = root / "run.toml"
        self.config.write_text(CONFIG)
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: object) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        self._capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self._capfd.readouterr()
        return Result(code, captured.out, captured.err)

    def train(self, pool: str = "pool", *arguments: object) -> Result:
        return self("train", self.config, "--pool", self.root / pool, *arguments)

    def digest(self, pool: str = "pool") -> PoolDigest:
        return pool_digest(self.root / pool)


def pool_digest(directory: Path) -> PoolDigest:
    with at_rest(directory) as (reader, _):
        return digest_pool(reader)


def start(*arguments: object) -> subprocess.Popen[str]:
    """`holdfast` as a process of its own."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
