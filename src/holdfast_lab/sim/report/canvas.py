"""How figures look and how they are kept: plain axes, the same colours everywhere, the picture and a CSV side by side.

A picture is a PNG, or an SVG whose text and lines have the colours of the theme that it is seen in, light or dark.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.data.output import check_output, whole_file
from holdfast.errors import ConfigError
from holdfast_lab.sim.report.content import Cell
from holdfast_lab.sim.report.exposure import OTHER, WAITING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL, MEDIUM, TITLE = 8.0, 9.0, 10.0  # points
TEXT_COLOR, BAND_COLOR = "#444444", "#9a9a9a"
LINE_COLORS = ("#2f6f9f", "#d98c3f", "#5b8c5a", "#b05c5c", "#8a6fa8", "#7fb3d3", "#9a9a9a", "#d9b13f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PART_COLORS: Mapping[str, str] = {
    "bottom MLP forward": "#7fb3d3",
    "top MLP": "#2f6f9f",
    "bottom MLP backward": "#bcd4e4",
    "lookup": "#a3c79b",
    "update": "#5b8c5a",
    "cache": "#8a6fa8",
    "transfer": "#d9b13f",
    "row log": "#b05c5c",
    "MLP log": "#d9a09a",
    OTHER: "#777777",
    WAITING: "#dddddd",
}
_ROLE_COLORS: Mapping[str, str] = {
    "gpu": "#2f6f9f",
    "host": "#8a6fa8",
    "logic": "#a3c79b",
    "tables": "#5b8c5a",
    "link": "#d9b13f",
}
_OTHER_COLORS = ("#b05c5c", "#7fb3d3", "#d9a09a", "#d98c3f", "#9a9a9a", "#bcd4e4", "#777777")
_DPI = 144
_THEME = """<style>
:root { --text: #1f2328; --pale: #57606a; --ground: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --pale: #9da7b1; --ground: #0d1117; } }
text { fill: var(--text); }
</style>
"""
_THEMED = {"#000000": "var(--text)", TEXT_COLOR: "var(--pale)", "#ffffff": "var(--ground)"}
_DECADES = 1.2  # of values on an axis, from which it is logarithmic
_LONG_DECADES = 3.0  # of an axis, from which only its decades are named


def role_colors(roles: Iterable[str]) -> dict[str, str]:
    """A colour for each device; those that only a user's system has take the others in turn."""
    others = [role for role in roles if role not in _ROLE_COLORS]
    return {**_ROLE_COLORS, **{role: _OTHER_COLORS[n % len(_OTHER_COLORS)] for n, role in enumerate(others)}}


def plain_figure(width: float, height: float) -> Figure:
    """Empty, width and height in inches. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("figures need matplotlib: pip install 'holdfast[sim]'") from error
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")


def figure_with_axes(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure = plain_figure(width, height)
    axes = figure.add_subplot()
    plain(axes, title)
    return figure, axes


def plain(axes: Axes, title: str, size: float = TITLE) -> None:
    """Without a box around them; the title over their left end."""
    axes.set_title(title, fontsize=size, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=SMALL)


def legend_aside(axes: Axes) -> None:
    """To the right of the axes."""
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def legend_below(axes: Axes, handles: Sequence[Artist]) -> None:
    """Under the axes of a figure, which stays narrow so."""
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=SMALL, frameon=False)


def scale(axes: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> bool:
    """Makes an axis logarithmic where its values span decades; says whether it is."""
    spans = len(values) > 1 and min(values) > 0 and math.log10(max(values) / min(values)) >= _DECADES
    if spans:
        logarithmic(axes, axis)
    return spans


def logarithmic(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Ticks at 1, 2 and 5 of every decade where there is room, at the decades elsewhere, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    drawn = axes.xaxis if axis == "x" else axes.yaxis
    low, high = drawn.get_data_interval()
    is_short = math.log10(high / low) < _LONG_DECADES
    drawn.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,)))
    drawn.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    drawn.set_minor_formatter(NullFormatter())


def short_number(value: float) -> str:
    """As 200, 0.05, 30k, 25G."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:.0e}"


def save(figure: Figure, path: Path, header: Sequence[str], rows: Iterable[Sequence[Cell]], *, overwrite: bool) -> Path:
    """The figure as `path`, a PNG or SVG, and the rows beside it."""
    check_output(path, overwrite=overwrite)
    write_csv(path.with_suffix(".csv"), header, rows, overwrite=overwrite)
    with whole_file(path, overwrite=overwrite) as partial:
        if path.suffix == ".svg":
            partial.write_text(_svg_of(figure, path.stem), encoding="utf-8")
        else:
            figure.savefig(partial, format="png")
    return path


def _svg_of(figure: Figure, name: str) -> str:
    """Without a ground of its own, in the theme's colours. name: different figures on a page have different ones."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    for color, themed in _THEMED.items():
        drawn = drawn.replace(color, themed)
    drawn = re.sub(r"(?s)\s*<metadata>.*?</metadata>", "", drawn)
    tag, _, rest = drawn.partition(">")
    return f"{tag}>\n{_THEME}{rest}"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Cell]], *, overwrite: bool) -> None:
    """Numbers with all their digits; nothing where a value is not known."""
    with whole_file(path, overwrite=overwrite) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
