"""The pages that are generated are those that the code gives."""

from __future__ import annotations

import runpy

import pytest

from pages import ROOT


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    pages: dict[str, str] = runpy.run_path(str(ROOT / "docs/reference.py"))["pages"]()
    return pages


@pytest.mark.parametrize("name", ["API.md", "CONFIG.md"])
def test_a_generated_page_says_what_the_code_says(name: str, generated: dict[str, str]) -> None:
    assert (ROOT / "docs" / name).read_text() == generated[name], f"docs/{name} is not what the code says: `make docs`"


def test_every_generated_page_is_compared(generated: dict[str, str]) -> None:
    assert sorted(generated) == ["API.md", "CONFIG.md"]
