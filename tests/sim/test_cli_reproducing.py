"""`holdfast sim paper`, `calibrate` and `sensitivity` as a user meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast import cli
from holdfast_lab.sim.facts import read_facts


def code_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", "sim", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_calibrate_fits_every_free_parameter(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of(monkeypatch, "calibrate", "--leave-out", "rm2", "--leave-out", "rm3", "--json") == 0
    plain = json.loads(capfd.readouterr().out)
    free = {each.name: each for each in read_facts().free}
    assert set(plain["parameters"]) == set(free)
    for name, found in plain["parameters"].items():
        assert found["value"] == free[name].fitted(found["sigmas"])
    assert 0 < plain["errors"]["fitted"] < plain["errors"]["left_out"]


def test_a_model_that_the_paper_has_not_cannot_be_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of(monkeypatch, "calibrate", "--leave-out", "kaggle") != 0
    assert "'kaggle' is none of rm1, rm2, rm3, rm4" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["paper", "sensitivity"])
def test_a_report_that_is_there_already_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    page = tmp_path / "index.html"
    page.write_text("mine")
    assert code_of(monkeypatch, command, "-o", tmp_path) == 1
    assert "index.html is there already" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
