"""The simulator's page shows what the simulator says with its packaged values, and one command writes both."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.sim.facts import read_facts
from holdfast_lab.sim.library import PACKAGED, read_device, read_library, read_model, read_system
from pages import ROOT

PAGES = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("SIMULATOR", "SCRATCHPIPE", "MTRAINS")]
PAGE = PAGES[0]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/simulator.py"))


def test_every_table_that_is_simulated_in_seconds_is_the_one_on_the_page(script: dict[str, Any]) -> None:
    for name, table in script["quick_tables"](read_library(), read_facts()).items():
        assert script["with_table"](PAGE, name, table) == PAGE, f"the table {name}: `make simulator`"


def test_tables_that_rest_on_fits_are_of_the_library_as_it_is(script: dict[str, Any]) -> None:
    digest = script["digest_of"](read_library(), read_facts())
    for page in PAGES:
        assert f"<!-- fitted library: {digest} -->" in page, "a declaration has changed since the fit: `make simulator`"


def test_every_table_of_the_pages_has_a_maker(script: dict[str, Any]) -> None:
    names = [name for page in PAGES for name in re.findall(r"<!-- table (.*) -->", page)]
    made = [*script["SLOW_TABLES"], *script["QUICK_TABLES"], *script["SWEPT_TABLES"]]
    assert sorted(names) == sorted(made)


def test_every_free_parameter_has_a_line_of_its_own_that_a_fit_writes(script: dict[str, Any], tmp_path: Path) -> None:
    library = tmp_path / "library"
    shutil.copytree(PACKAGED, library)
    for free in read_facts().free:
        for key in free.keys:
            script["write_value"](library, key, 1.2345 * free.median)
    written = 1.2345 * 256
    assert read_model(library / "models/rm3.toml").batch_size == pytest.approx(written, rel=1e-3)
    assert read_model(library / "models/rm3.toml").tables[0].rows == pytest.approx(1.2345e6, rel=1e-3)
    assert read_device(library / "devices/pcie.toml").start_s == pytest.approx(1.2345 * 150e-6, rel=1e-3)
    system = read_system(library / "systems/cxl.toml", [library])
    assert system.stages["interaction_top"].calls == pytest.approx(1.2345 * 12, rel=1e-3)
    fitted = sum(text.count("# fitted") for text in (path.read_text() for path in library.rglob("*.toml")))
    assert fitted == sum(len(free.keys) for free in read_facts().free)
