"""ScratchPipe and MTrainS on the page of `sim paper`: the tables of their own pages, drawn."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import pytest

from holdfast_lab.sim.library import Library, read_library
from holdfast_lab.sim.report import mtrains, scratchpipe
from holdfast_lab.sim.report.content import Table
from holdfast_lab.sim.report.page import write_html

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library() -> Library:
    return read_library()


def table_of(page: str, name: str) -> Table:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None
    header, _, *rows = (
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in found[1].strip().splitlines()
    )
    return Table(header=header, rows=rows)


def test_a_node_is_that_of_the_example() -> None:
    assert mtrains.NODE.read_bytes() == (ROOT / "examples/tiers.toml").read_bytes()


def test_nodes_by_target_are_those_of_the_page(library: Library) -> None:
    assert mtrains.targets_table(library) == table_of("MTRAINS.md", "mtrains targets")


def test_nodes_of_other_models_are_those_of_the_page(library: Library) -> None:
    assert mtrains.models_table(library) == table_of("MTRAINS.md", "mtrains models")


@pytest.mark.thorough
def test_sweeps_are_those_of_the_page(library: Library) -> None:
    assert scratchpipe.sweeps_table(library) == table_of("SCRATCHPIPE.md", "scratchpipe sweeps")


def test_both_have_a_figure_and_their_tables_on_one_page(library: Library, tmp_path: Path) -> None:
    sweeps, targets = table_of("SCRATCHPIPE.md", "scratchpipe sweeps"), table_of("MTRAINS.md", "mtrains targets")
    models = table_of("MTRAINS.md", "mtrains models")
    sections = [
        scratchpipe.section(tmp_path, sweeps, overwrite=False),
        mtrains.section(tmp_path, targets, mtrains.nodes_table(library), models, overwrite=False),
    ]
    write_html(tmp_path / "page.html", "Two papers", sections)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 2
    for row in (*sweeps.rows, *targets.rows, *models.rows):
        assert "".join(f"<td>{escape(str(cell))}</td>" for cell in row) in page
    drawn = (tmp_path / "scratchpipe.csv").read_text(encoding="utf-8")
    assert all(name in drawn for name in sweeps.header[2:-1])
