"""What `holdfast.` offers."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import holdfast

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_every_name_that_it_offers_is_there() -> None:
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_it_says_its_version() -> None:
    assert holdfast.__version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]


def test_another_name_is_an_attribute_error_that_says_it() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Pol'"):
        holdfast.Pol  # noqa: B018
