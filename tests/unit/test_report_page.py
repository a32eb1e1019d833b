"""The pages of the benchmarks' reports: each benchmark replaces what is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import report_page


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    for name in ("larger/tiers", "larger/outsiders", "bench"):
        (tmp_path / "reports" / name).mkdir(parents=True)
    return tmp_path / "reports"


def write(reports: Path, name: str, text: str) -> None:
    report_page.write(reports / name, text, reports)


def test_a_folder_within_a_reports_has_a_part_of_its_page(reports: Path) -> None:
    write(reports, "larger", "# Larger\n\n![steps](steps.svg)\n")
    write(
        reports,
        "larger/tiers",
        "# Tiers\n\n## How\n\n![steps](steps.svg), [all](../results.json), [x](http://x/y.md)\n",
    )
    assert report_page.page_of(reports / "larger/tiers", reports) == reports / "larger/report.md"
    assert [path.name for path in (reports / "larger/tiers").iterdir()] == []
    assert (reports / "larger/report.md").read_text() == (
        "# Larger\n\n![steps](steps.svg)\n\n<!-- part: tiers -->\n## tiers\n\n### Tiers\n\n#### How\n\n"
        "![steps](tiers/steps.svg), [all](results.json), [x](http://x/y.md)\n<!-- end of tiers -->\n"
    )
    assert report_page.read(reports / "larger/tiers", reports).startswith("## tiers\n\n### Tiers\n")
    assert report_page.read(reports / "larger", reports).endswith("(steps.svg)\n")


@pytest.mark.parametrize(
    "order", [["larger", "larger/tiers", "larger/outsiders"], ["larger/outsiders", "larger/tiers", "larger"]]
)
def test_whatever_is_written_again_replaces_its_own_and_nothing_else(order: list[str], reports: Path) -> None:
    for name in order:
        write(reports, name, f"# {name}, first\n")
    first = (reports / "larger/report.md").read_text()
    for name in reversed(order):
        write(reports, name, f"# {name}, again, of `\\1` <!-- and more -->\n")
        write(reports, name, f"# {name}, again, of `\\1` <!-- and more -->\n")
    page = (reports / "larger/report.md").read_text()
    assert page == first.replace("first", "again, of `\\1` <!-- and more -->")
    assert page.count("again") == 3 and page.startswith("# larger, again")


def test_elsewhere_every_folder_has_a_page(reports: Path, tmp_path: Path) -> None:
    directory = tmp_path / "runs/larger/tiers"
    directory.mkdir(parents=True)
    report_page.write(directory, "# Tiers\n", reports)
    assert (directory / "report.md").read_text() == "# Tiers\n" == report_page.read(directory, reports)
