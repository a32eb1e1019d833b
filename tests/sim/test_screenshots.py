"""Pages as a reader sees them, light and dark, on a screen and on a phone: screenshots in a headless browser, which are
kept where HOLDFAST_SCREENSHOTS says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import Section, Table, breakdown_of, timeline_of
from holdfast_lab.sim.report.page import write_html

_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = os.environ.get("HOLDFAST_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
HEIGHT = 1300

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no headless browser: install chromium, or set HOLDFAST_BROWSER"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, library = tmp_path_factory.mktemp("page"), read_library()
    runs = {name: library.run(name, "rm2") for name in ("ssd", "pcie", "cxl")}
    stacks = [breakdown_of(run, library.system(name), model="RM2", measured_ms=5.0) for name, run in runs.items()]
    table = Table(header=("a name", "a number"), rows=[("CXL", 4.8), ("PCIe", 9.2)])
    drawn = (
        figures.batch_breakdowns(folder / "times.svg", stacks, title="Where a batch's time goes"),
        figures.timelines(
            folder / "timeline.svg", [timeline_of(runs["cxl"], library.system("cxl"))], title="Two batches"
        ),
    )
    write_html(folder / "page.html", "A page", [Section(title="Times", text="Words.", figures=drawn, tables=(table,))])
    return folder / "page.html"


def shot(page: Path, folder: Path, name: str, *, width: int, dark: bool) -> NDArray:
    """Red, green and blue of [HEIGHT, width], 0 to 1."""
    path = folder / f"{name}.png"
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--window-size={width},{HEIGHT}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--screenshot={path}", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert path.exists(), done.stderr
    if kept := os.environ.get("HOLDFAST_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, Path(kept) / path.name)
    return imread(path)[:, :, :3]


@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_and_figures_stand_out_from_the_ground_of_the_theme(page, tmp_path, width, dark):
    seen = shot(page, tmp_path, f"page-{'dark' if dark else 'light'}-{width}", width=width, dark=dark)
    grey = seen.mean(axis=2)
    ground = grey[5, 5]
    assert ground < 0.15 if dark else ground > 0.95
    assert 0.03 < (abs(grey - ground) > 0.3).mean() < 0.5
    others = grey[abs(grey - ground) > 0.05]
    assert (others > 0.8).any() if dark else (others < 0.2).any()  # words at the far end of the scale
    white = (seen > 0.98).all(axis=2).mean()
    assert white < 0.01 if dark else white > 0.5  # no white ground behind a figure
    assert (abs(grey[:, width - 4 :] - ground) < 0.1).mean() > 0.9  # nothing sticks out at the side
