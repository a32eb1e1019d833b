"""The tutorial does what it says: every file and every command of it, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import ROOT, run_blocks

pytestmark = pytest.mark.thorough


@pytest.mark.timeout(300)  # on a busy machine
def test_a_reader_of_the_tutorial_ends_with_a_served_model(pool_root: Path) -> None:
    printed = "\n".join(run_blocks(ROOT / "docs/TUTORIAL.md", pool_root))
    resumed = [int(step) for step in re.findall(r"goes on after step (\d+)", printed)]
    assert resumed[0] >= 99
    assert resumed[1] == 0
    assert "goes on after step 0\n" in (pool_root / "killed.log").read_text()
    losses = re.findall(r"log-loss (\S+)", printed)
    assert len(losses) == 3
    assert len(set(losses)) == 1, f"resumed, undisturbed and served models differ: {losses}"
    assert float(losses[0]) < 0.62, "the model has learnt nothing"
