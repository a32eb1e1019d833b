"""The page of the simulator's files has every key that they may have, and the example of one's own system works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from holdfast_lab.sim.device import Compute, Fabric, Link, Memory, Processor, Rate
from holdfast_lab.sim.model import Model, TableGroup
from holdfast_lab.sim.system import Cache, Does, Stage, System
from pages import ROOT

FILES = (ROOT / "docs/SIMULATOR_FILES.md").read_text(encoding="utf-8")
KEYS = {key for row in re.findall(r"(?m)^\| (`.*?) \|", FILES) for key in re.findall(r"`(\w+)`", row)}
DECLARED = (Compute, Memory, Link, Processor, Rate, Fabric, Model, TableGroup, System, Stage, Cache)
MOST_LINES = 20


@pytest.mark.parametrize("declared", DECLARED)
def test_every_key_of_a_file_is_on_the_page(declared: type) -> None:
    missing = [field.name for field in fields(declared) if field.name not in KEYS]
    assert not missing


def test_every_kind_of_work_is_on_the_page_and_no_key_is_that_does_not_exist() -> None:
    kinds = set(get_args(Does))
    assert kinds <= KEYS
    assert KEYS - kinds == {field.name for declared in DECLARED for field in fields(declared)} | {"does"}


def test_a_reader_has_four_gpus_and_an_expander_in_twenty_lines(tmp_path: Path) -> None:
    page = (ROOT / "docs/SIMULATOR.md").read_text(encoding="utf-8")
    script = re.search(r"## Your own system\n.*?```bash\n(.*?)```", page, re.DOTALL)
    assert script is not None
    assert len(script[1].splitlines()) <= MOST_LINES
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script[1]],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert 'tables = "big-expander"  # mine, over expander: "cxl-expander", ' in ran.stdout
    assert re.search(r"4 GPUs, 1 TB at 64 GB/s with deeprecsys-rm1: \d+\.\d+ ms per batch", ran.stdout)
    assert re.search(r"gpu +rtx-3090-x4 ", ran.stdout) and re.search(r"tables +big-expander ", ran.stdout)
