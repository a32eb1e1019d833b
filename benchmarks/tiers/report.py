"""The report of `python -m tiers`: tables, and a picture of the steps."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report_page
from machine import in_words
from markdown_table import markdown_table

if TYPE_CHECKING:
    from tiers.__main__ import Cell, Side

BAR, PREDICTION_BAR = 1.3, 0.2
_MIB = 1 << 20
_HEAD = (
    "`cd benchmarks && python -m tiers`. Scratchpad, log and victim cache as `holdfast plan --apply` sizes them for "
    "the same DRAM; three tiers have a declared device (a dial over tmpfs) of half the tables' bytes, for rows that "
    "leave the scratchpad and, where the plan has it so, for the log. In turns, each in a process of its own; ms of a "
    "step are means of a window in steady state. Ratios are of a round's neighbours."
)


def write_report(cells: list[Cell], record: dict[str, Any], directory: Path) -> None:
    """report.md and steps.svg in `directory`."""
    machine, device = record["machine"], record["probed"]["device"]
    reads, writes = (device[f"{way}_bandwidth_bytes_per_s"] / 1e9 for way in ("read", "write"))
    lines = [
        "# Three tiers beside two",
        "",
        _HEAD,
        "",
        f"{in_words(machine)}; holdfast {machine['holdfast_commit']}.",
        f"Device: {device['name']}, {reads:.1f} GB/s read, {writes:.1f} written, {device['read_latency_ns']:.0f} ns.",
        "",
        *markdown_table(
            ["workload", "two, ms", "three, ms", f"three over two (bar {BAR})", "two, predicted", "three, predicted"],
            [_cells(cell) for cell in cells],
        ),
        f"Predictions in brackets off by more than {PREDICTION_BAR:.0%} miss their bar.",
        "",
        "Where a step's rows came from, and what is made durable where (of the last round):",
        "",
        *markdown_table(
            ["workload", "tiers", "scratchpad", "victims", "log", "hit rate", "from victims", "from the log",
             "from home", "nowhere yet", "limited by"],
            [_sources(cell.name, tiers, getattr(cell, tiers)) for cell in cells for tiers in ("two", "three")],
        ),
    ]  # fmt: skip
    if cells:
        _draw(cells, directory / "steps.svg")
        lines += ["![steps](steps.svg)", ""]
    report_page.write(directory, "\n".join(lines))


def _cells(cell: Cell) -> list[str]:
    ratio = statistics.median(cell.ratios)
    return [
        cell.name,
        *(" ".join(f"{ms:.1f}" for ms in side.ms) for side in (cell.two, cell.three)),
        f"{ratio:.2f} ({min(cell.ratios):.2f} to {max(cell.ratios):.2f})",
        *(f"{side.settings.step.ms:.1f} ({side.error:+.0%})" for side in (cell.two, cell.three)),
    ]


def _sources(name: str, words: str, side: Side) -> list[str]:
    measured = side.measured[-1]
    steps = measured["steps"]
    traffic = {what: count / steps for what, count in measured["traffic"].items()}
    touched = traffic["rows_hit"] + traffic["rows_missed"]
    at_home = traffic["rows_fetched"] - traffic["rows_from_log"]
    of_settings = side.settings
    return [
        name,
        words,
        f"{of_settings.scratchpad_bytes / _MIB:.0f} MiB",
        f"{of_settings.victim_bytes / _MIB:.0f} MiB",
        f"{of_settings.log_bytes / _MIB:.0f} MiB" + (" (device)" if of_settings.log_directory else ""),
        f"{traffic['rows_hit'] / touched:.1%}",
        f"{traffic['rows_from_victims']:,.0f}",
        f"{traffic['rows_from_log']:,.0f}",
        f"{at_home:,.0f}",
        f"{traffic['rows_initial']:,.0f}",
        of_settings.step.limited_by,
    ]


def _draw(cells: list[Cell], path: Path) -> None:
    from matplotlib.figure import Figure

    from plain_axes import plain

    figure = Figure(figsize=(7, 0.7 + 0.6 * len(cells)))
    axes = figure.subplots()
    plain(axes)
    for place, cell in enumerate(cells):
        for offset, side, colour in ((-0.2, cell.two, "#9aa5b1"), (0.2, cell.three, "#2f6f9f")):
            axes.barh(place + offset, statistics.median(side.ms), height=0.36, color=colour)
            axes.plot(side.settings.step.ms, place + offset, "k|", markersize=12)
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step: two tiers (grey), three (blue); predicted: |")
    figure.savefig(path, bbox_inches="tight")
