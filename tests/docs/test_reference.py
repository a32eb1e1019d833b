"""The pages that are generated are those that the code gives."""

from __future__ import annotations

import runpy

import pytest

from pages import ROOT

PAGES = runpy.run_path(str(ROOT / "docs/reference.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_says_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name], f"docs/{name} is not what the code says: run `make docs`"
