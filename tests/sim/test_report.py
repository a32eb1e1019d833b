"""Figures and pages: what they show is what was simulated, and a page needs nothing but itself."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.machine import Run, Span
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import (
    Energy,
    Line,
    Prediction,
    Section,
    Table,
    breakdown_of,
    energy_of,
    timeline_of,
)
from holdfast_lab.sim.report.exposure import WAITING, exposed_by_part_s, exposed_s
from holdfast_lab.sim.report.page import number_words, write_html
from holdfast_lab.sim.report.text import stage_letters, timeline_lines

LIBRARY = read_library()
EVIL = "</title><script>alert('x')</script><img src=\"http://example.org/x.png\">&"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_of(system: str, spans: list[tuple[int, str, float, float]], batch_s: float, steady: range) -> Run:
    declared = LIBRARY.system(system)
    return Run(
        system=declared.title,
        batch_s=batch_s,
        joules_per_batch=0.0,
        joules_by_role={},
        busy_s={},
        stage_s={},
        spans=[Span(batch, stage, begin_s, begin_s, end_s) for batch, stage, begin_s, end_s in spans],
        steady=steady,
    )


@pytest.mark.parametrize("system", sorted(LIBRARY.systems))
@pytest.mark.parametrize("model", ["rm1", "rm4"])
def test_a_stack_sums_to_the_batch(system: str, model: str) -> None:
    run = LIBRARY.run(system, model)
    bar = breakdown_of(run, LIBRARY.system(system), model=model)
    assert bar.batch_ms == pytest.approx(run.batch_s * 1e3, rel=1e-9)
    assert all(value > 0 for value in bar.parts_ms.values())


def test_an_instant_belongs_to_compute_before_memory_before_logs() -> None:
    spans = [
        span
        for batch in range(3)
        for span in (
            (batch, "bottom_forward", 10.0 * batch, 10.0 * batch + 2),
            (batch, "lookup", 10.0 * batch + 1, 10.0 * batch + 4),
            (batch, "log_rows", 10.0 * batch + 3, 10.0 * batch + 9),
            (batch, "log_network", 10.0 * batch + 9.5, 10.0 * batch + 10),
        )
    ]
    found = exposed_s(run_of("cxl-d", spans, 10.0, range(1, 2)), LIBRARY.system("cxl-d"))
    there = {stage: seconds for stage, seconds in found.items() if seconds > 0}
    assert there == {"bottom_forward": 2.0, "lookup": 2.0, "log_rows": 5.0, "log_network": 0.5, WAITING: 0.5}


def test_what_runs_of_other_batches_counts_in_the_batch_in_which_it_runs() -> None:
    spans = [
        (0, "update", 0, 2),
        (0, "log_rows", 2, 5),
        (1, "update", 5, 7),
        (1, "log_rows", 7, 10),
        (1, "lookup", 3, 4),
    ]
    spans += [(2, "lookup", 8, 9), (2, "update", 10, 12), (2, "log_rows", 12, 15)]
    found = exposed_by_part_s(run_of("cxl-d", spans, 5.0, range(1, 2)), LIBRARY.system("cxl-d"))
    assert found == {"update": 2.0, "lookup": 1.0, "row log": 2.0}


def test_a_timeline_shows_whole_batches_one_after_the_other() -> None:
    run, system = LIBRARY.run("cxl-d", "rm1"), LIBRARY.system("cxl-d")
    timeline = timeline_of(run, system, batches=2)
    for stage in system.active:
        lanes = {bar.lane for bar in timeline.bars if bar.stage == stage}
        for lane in lanes:
            shown = [bar for bar in timeline.bars if bar.stage == stage and bar.lane == lane]
            ahead = 2 if stage == "doorbell" else 0  # ids are there before their batch begins
            assert [bar.batch for bar in shown] == [ahead, ahead + 1]
            assert all(bar.end_ms - bar.begin_ms == pytest.approx(run.stage_s[stage] * 1e3) for bar in shown)
            assert shown[1].begin_ms - shown[0].begin_ms == pytest.approx(run.batch_s * 1e3)
    assert timeline.ends_ms == pytest.approx((run.batch_s * 1e3, 2 * run.batch_s * 1e3))


def test_a_relaxed_lookup_is_drawn_as_the_next_batchs() -> None:
    timeline = timeline_of(LIBRARY.run("cxl", "rm1"), LIBRARY.system("cxl"), batches=1)
    assert {bar.batch for bar in timeline.bars if bar.stage == "lookup"} == {1}
    assert {bar.batch for bar in timeline.bars if bar.stage == "update"} == {0}
    letters = stage_letters(list(LIBRARY.system("cxl").active))
    shown = "".join(timeline_lines(timeline, letters, 5.0)[1:])
    assert letters["lookup"].lower() in shown.replace("tables", "").replace("gpu", "").replace("logic", "")
    assert letters["update"] in shown


def test_stages_that_overlap_on_a_device_have_lanes_of_their_own() -> None:
    shared = LIBRARY.changed({"devices.pmem-module.parallelism": 4, "devices.near-memory-logic.parallelism": 4})
    system = shared.system("cxl-d")
    stages = dict(system.stages)
    stages["log_rows"] = replace(stages["log_rows"], after=("lookup",))
    wide = replace(system, stages=stages)
    run = shared.run(wide, "rm1")
    timeline = timeline_of(run, wide, batches=1)
    assert len(timeline.lanes) > len(timeline_of(LIBRARY.run("cxl-d", "rm1"), system).lanes)
    for lane in timeline.lanes:
        bars = sorted((bar for bar in timeline.bars if bar.lane == lane), key=lambda bar: bar.begin_ms)
        assert all(a.end_ms <= b.begin_ms + 1e-9 for a, b in pairwise(bars))


def test_figures_come_with_all_their_numbers(tmp_path: Path) -> None:
    systems = ("pmem", "cxl-d", "cxl")
    runs = {name: LIBRARY.run(name, "rm1") for name in systems}
    bars = [breakdown_of(runs[n], LIBRARY.system(n), model="RM1", measured_ms=5.0) for n in systems]
    figures.batch_breakdowns(tmp_path / "times.png", bars, title="times")
    for row, bar in zip(rows_of(tmp_path / "times.csv"), bars, strict=True):
        parts = {
            name: float(row[name]) for name in row if name.endswith("_ms") and name not in ("batch_ms", "paper_ms")
        }
        assert sum(parts.values()) == pytest.approx(float(row["batch_ms"]))
        assert float(row["batch_ms"]) == pytest.approx(bar.batch_ms)
        assert float(row["paper_ms"]) == 5.0

    energy = [energy_of(run, model="RM1") for run in runs.values()]
    figures.energies(tmp_path / "energy.png", energy, relative_to="PMEM", title="energy")
    for row, run in zip(rows_of(tmp_path / "energy.csv"), runs.values(), strict=True):
        assert float(row["joules"]) == pytest.approx(run.joules_per_batch)
        assert float(row["ratio"]) == pytest.approx(run.joules_per_batch / runs["pmem"].joules_per_batch)
        assert row["paper_ratio"] == ""

    shown = [timeline_of(runs[name], LIBRARY.system(name)) for name in systems]
    figures.timelines(tmp_path / "timelines.png", shown, title="timelines")
    assert len(rows_of(tmp_path / "timelines.csv")) == sum(len(timeline.bars) for timeline in shown)

    points = [Prediction(label="a", group="fitted", simulated=2.0, measured=1.0)]
    figures.parity(tmp_path / "parity.png", points, title="parity")
    assert float(rows_of(tmp_path / "parity.csv")[0]["error"]) == 1.0

    lines = [
        Line(label="a", x=[1, 10, 100], y=[1, 2, 3], low=[0.5, 1, 2], high=[2, 3, 4]),
        Line(label="b", x=[1], y=[2]),
    ]
    figures.lines(tmp_path / "lines.png", lines, title="lines", x_name="x", y_name="y", marked_x=5.0)
    assert rows_of(tmp_path / "lines.csv")[1] == {"line": "a", "x": "10", "y": "2", "low": "1", "high": "3"}
    assert rows_of(tmp_path / "lines.csv")[3] == {"line": "b", "x": "1", "y": "2", "low": "", "high": ""}
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 10


def test_an_svg_has_the_colours_of_the_theme_and_no_ground_of_its_own(tmp_path: Path) -> None:
    run = LIBRARY.run("cxl", "rm1")
    figures.timelines(tmp_path / "t.svg", [timeline_of(run, LIBRARY.system("cxl"))], title=EVIL)
    text = (tmp_path / "t.svg").read_text()
    assert "prefers-color-scheme: dark" in text and "stroke: var(--text)" in text
    drawn = text[text.index("</style>") :]
    assert not re.search(r"#000000|#ffffff|#444444", drawn)
    assert "<script" not in drawn and "&lt;script&gt;" in drawn


def test_svgs_on_a_page_share_no_names_and_scroll_where_there_is_no_room(tmp_path: Path) -> None:
    run = LIBRARY.run("cxl", "rm1")
    shown = [timeline_of(run, LIBRARY.system("cxl"))]
    paths = [figures.timelines(tmp_path / f"{name}.svg", shown, title="") for name in ("a", "b")]
    names = [set(re.findall(r'id="([hpm][0-9a-f]{10})"', path.read_text())) for path in paths]
    assert names[0] and not names[0] & names[1]
    write_html(tmp_path / "page.html", "page", [Section(title="Both", figures=tuple(paths))])
    text = (tmp_path / "page.html").read_text()
    assert text.count('<figure class="wide"') == text.count("<svg ") == 2
    assert re.search(r"svg \{[^}]*min-width: 29rem", text) and re.search(r"\.wide \{ overflow-x: auto", text)


def test_a_stack_that_would_flatten_the_others_is_cut_and_says_its_height(tmp_path: Path) -> None:
    runs = {name: LIBRARY.run(name, "rm2") for name in ("ssd", "pcie", "cxl-d", "cxl")}
    bars = [breakdown_of(run, LIBRARY.system(name), model="RM2") for name, run in runs.items()]
    assert bars[0].batch_ms > 100 * bars[1].batch_ms
    figures.batch_breakdowns(tmp_path / "t.svg", bars, title="")
    text = (tmp_path / "t.svg").read_text()
    heights = [float(n) for n in re.findall(r">(\d+\.?\d*)</text>", text)]
    assert f">{bars[0].batch_ms:.1f}</text>" in text
    assert max(h for h in heights if h != round(bars[0].batch_ms, 1)) < 3 * bars[1].batch_ms


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    lines = [Line(label="a", x=[1, 10, 100], y=[1, 2, 3])]
    for name in ("first", "second"):
        figures.lines(tmp_path / f"{name}.png", lines, title="lines", x_name="x", y_name="y")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_a_figure_replaces_nothing_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "lines.png"
    path.write_text("mine")
    lines = [Line(label="a", x=[1, 2], y=[1, 2])]
    with pytest.raises(ConfigError, match="is there already"):
        figures.lines(path, lines, title="", x_name="x", y_name="y")
    assert [each.name for each in tmp_path.iterdir()] == ["lines.png"]
    figures.lines(path, lines, title="", x_name="x", y_name="y", overwrite=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_energies_without_what_they_relate_to_are_refused(tmp_path: Path) -> None:
    bars = [Energy(model="RM1", system="CXL", joules={"gpu": 1.0})]
    with pytest.raises(ConfigError, match="relative to 'PMEM': there are none of it with model 'RM1'"):
        figures.energies(tmp_path / "energy.png", bars, relative_to="PMEM", title="")


class Page(HTMLParser):
    """What of a page is markup, and what is text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "style")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def page(tmp_path: Path) -> tuple[str, Page]:
    figure = tmp_path / "a<b.png"
    figures.lines(figure, [Line(label="a", x=[1, 2], y=[1, 2])], title=EVIL, x_name=EVIL, y_name="y")
    table = Table(title=EVIL, header=("name", EVIL), rows=[(EVIL, 12345.678), ("none", None)])
    sections = [
        Section(title=EVIL, text=f"First.\n\n{EVIL}", tables=(table,), figures=(figure,)),
        Section(title="Second"),
    ]
    write_html(tmp_path / "page.html", EVIL, sections)
    text = (tmp_path / "page.html").read_text()
    return text, Page(text)


def test_a_page_refers_to_nothing_outside_of_itself(page: tuple[str, Page]) -> None:
    text, parsed = page
    assert sorted(link.split(",")[0] for link in parsed.links) == ["#s0", "#s1", "data:image/png;base64"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    assert "prefers-color-scheme: dark" in style


def test_nothing_of_what_is_shown_becomes_markup(page: tuple[str, Page]) -> None:
    text, parsed = page
    assert "script" not in parsed.tags
    assert parsed.tags.count("img") == 1
    assert "<script" not in text
    assert parsed.words.count(EVIL) == 8


def test_a_page_has_its_numbers_in_four_digits(page: tuple[str, Page]) -> None:
    assert "12,346" in page[1].words
    pairs = {4.81234: "4.812", 0.73541: "0.7354", 100.0: "100", 0.0: "0", -2.5: "-2.5", 1e-7: "1.000e-07", 3: "3"}
    for value, words in pairs.items():
        assert number_words(value) == words


def test_a_table_whose_rows_do_not_fit_its_header_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        Table(header=("a", "b"), rows=[("only one",)])
