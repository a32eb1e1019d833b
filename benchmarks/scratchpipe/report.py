"""Tables and the bar, from what was measured alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import report_page
from machine import in_words
from markdown_table import markdown_table
from scratchpipe.batches import BATCH, ROWS, SCALE, SKEWS, TABLES, Workload
from scratchpipe.cells import SWEEPS
from scratchpipe.plots import plot_times, times_as_long
from scratchpipe.systems import MODES, WINDOW, Log

BAR = 2.5  # over static, in the mean of the skews
PAPERS_MEAN = 2.8
_OPPONENTS = ("none", "static", "static-beside", "lru", "straw")
_LIBRARYS = ("static", "lru")  # in docs/SCRATCHPIPE.md's simulation, which has the host's memory, too
_DURABLE = ("static", "forward")
_NONE = "–"

Cells = Mapping[str, Mapping[str, Any]]


def over_static(cells: Cells) -> float | None:
    """How many times as long static takes, in the mean of the skews; None where one was not measured."""
    found = [times_as_long(cells, Workload(skew=skew), "static") for skew in SKEWS]
    there = [each for each in found if each is not None]
    return statistics.fmean(there) if len(there) == len(SKEWS) else None


def complaints(record: Mapping[str, Any]) -> list[str]:
    mean = over_static(record["cells"])
    if mean is None or mean >= BAR:
        return []
    return [f"look forward over static, mean of the skews: {mean:.2f} ×; the bar is {BAR} ×"]


def write_report(record: Mapping[str, Any], directory: Path) -> None:
    """report.md and its picture."""
    cells: Cells = record["cells"]
    machine = record["machine"]
    busiest = max(cell["others_cpus"] for cell in cells.values())
    plot_times(cells, directory / "times.png")
    mean = over_static(cells)
    verdict = "not measured" if mean is None else "met" if mean >= BAR else "**not met**"
    skews = {skew: Workload(skew=skew) for skew in SKEWS}
    lines = [
        "# ScratchPipe's comparison, run",
        "",
        (
            "**Timing only.** `cd benchmarks && python -m scratchpipe`. Rows, caches, logs and the protocol that makes "
            "each batch durable are holdfast's own and real; the host's memory behind PCIe 3.0 takes what it is "
            "declared to take (`[pool.dial]`, duplex), and training waits for a declared V100 (`[device.dial]`), its "
            f"rows in its own memory. A shape of the paper, {TABLES} tables of 10 million rows, batches of 2,048, is "
            f"scaled: {ROWS:,} rows a table, batches of {BATCH}, and each row takes the time of {SCALE}. All declared "
            f"times are stretched {_stretches(cells)} times, all systems of a workload alike; times here are divided "
            f"by that. Before a cell others used {busiest:.1f} CPUs at most. "
            "`scratchpipe/systems.py` says which run each system is, and how it differs from the paper's."
        ),
        "",
        (
            f"{in_words(machine)}; pools on {machine['medium']}; "
            f"holdfast {machine['holdfast_commit']}. Unless varied: 5 % of rows cached, rows of 128, 20 ids a table."
        ),
        "",
        *markdown_table(
            ["", "", "bar", "the paper", ""],
            [
                [
                    "look forward over static, mean of the skews",
                    _NONE if mean is None else f"{mean:.2f} ×",
                    f"≥ {BAR} ×",
                    f"{PAPERS_MEAN} ×",
                    verdict,
                ]
            ],
        ),
        (
            "How many times as long as looking forward a batch takes; by the declared figures' arithmetic; and by the "
            "simulator, where link, both memories and GPU are devices of their own (docs/SCRATCHPIPE.md):"
        ),
        "",
        *_ratios(record, skews),
        "DRAM-resident is the ceiling: less than 1 is what looking forward is still slower by.",
        "",
        "![](times.png)",
        "",
        "ms a batch, and by arithmetic:",
        "",
        *_milliseconds(cells, skews),
        "## Over cache, row and bag, at medium skew",
        "",
        *_sweeps(record),
        "## Durable every batch, at the link's price",
        "",
        (
            "Above, the log's declared bandwidth is such that a batch's log takes as long as the rows that it misses "
            "would, as the paper writes back a row that leaves. Here all rows of a batch cross to the log at the "
            "link's bandwidth, which is what being durable every batch costs over such a link:"
        ),
        "",
        *_durable(cells, skews),
        "## What limits it",
        "",
        (
            "A batch that nothing overlaps takes fetching + training + writing; one that is looked forward to takes "
            "the longest of them, so three times as fast is the most there is with as many rows missed, and only "
            "where all three take as long. Each alone, ms, at the default's figures:"
        ),
        "",
        *_parts(cells, skews),
        (
            "A static cache with a perfect profile misses the fewest rows that a cache of its size can of ids that are "
            f"drawn independently; a window of {WINDOW} and what it pushes out is looking forward's own. The paper's "
            "static cache trains its missed rows in the host's processor, for each id that comes and not for each "
            "different row; the dial declares a medium and no processor beside it, so that is not in the times here."
        ),
        "",
        "## What was measured",
        "",
        *_fidelity(cells),
    ]
    report_page.write(directory, "\n".join(lines))


def _cell(cells: Cells, workload: Workload, mode: str) -> Mapping[str, Any] | None:
    return cells.get(f"{workload.name}/{mode}")


def _ratio_text(cells: Cells, library: Mapping[str, Any], workload: Workload, mode: str) -> str:
    measured = times_as_long(cells, workload, mode)
    if measured is None:
        return _NONE
    by_arithmetic = _cell(cells, workload, mode)["predicted_ms"] / _cell(cells, workload, "forward")["predicted_ms"]  # type: ignore[index]
    text = f"**{measured:.2f}**; {by_arithmetic:.2f}"
    times = library.get(workload.name, {})
    if mode in _LIBRARYS and times.get(mode) and times.get("forward"):
        text += f"; {times[mode] / times['forward']:.2f}"
    return text


def _ratio_rows(record: Mapping[str, Any], workloads: Iterable[tuple[str, Workload]]) -> list[list[str]]:
    cells, library = record["cells"], record["library"]
    modes = ("dram", *_OPPONENTS)
    return [[name, *(_ratio_text(cells, library, workload, mode) for mode in modes)] for name, workload in workloads]


def _titles(modes: Iterable[str]) -> list[str]:
    return [MODES[mode].title for mode in modes]


def _ratios(record: Mapping[str, Any], skews: Mapping[str, Workload]) -> list[str]:
    rows = _ratio_rows(record, skews.items())
    means = ["mean"]
    for mode in ("dram", *_OPPONENTS):
        found = [times_as_long(record["cells"], workload, mode) for workload in skews.values()]
        there = [each for each in found if each is not None]
        means.append(f"**{statistics.fmean(there):.2f}**" if len(there) == len(found) else _NONE)
    return markdown_table(["", *_titles(("dram", *_OPPONENTS))], [*rows, means])


def _milliseconds(cells: Cells, skews: Mapping[str, Workload]) -> list[str]:
    rows = []
    for mode in MODES:
        of_mode = [_cell(cells, workload, mode) for workload in skews.values()]
        texts = [_NONE if cell is None else f"{cell['batch_ms']:.2f}, {cell['predicted_ms']:.2f}" for cell in of_mode]
        rows.append([MODES[mode].title, *texts])
    return markdown_table(["", *skews], rows)


def _sweeps(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for varied, workloads in SWEEPS.items():
        named = [(f"{varied} {getattr(workload, varied):g}", workload) for workload in workloads]
        rows += _ratio_rows(record, named)
    return markdown_table(["", *_titles(("dram", *_OPPONENTS))], rows)


def _durable(cells: Cells, skews: Mapping[str, Workload]) -> list[str]:
    rows = []
    for skew, workload in skews.items():
        of_skew = [cells.get(f"{workload.name}/{mode}/{Log.EVERY_ROW.value}") for mode in _DURABLE]
        forward = of_skew[-1]
        rows.append(
            [
                skew,
                *(
                    _NONE
                    if cell is None or forward is None
                    else f"{cell['batch_ms']:.2f} ms ({cell['batch_ms'] / forward['batch_ms']:.2f} ×)"
                    for cell in of_skew
                ),
            ]
        )
    return markdown_table(["", *_titles(_DURABLE)], rows)


def _parts(cells: Cells, skews: Mapping[str, Workload]) -> list[str]:
    rows = []
    for skew, workload in skews.items():
        for mode in ("static", "forward"):
            cell = _cell(cells, workload, mode)
            if cell is not None:
                parts = [f"{cell[part]:.2f}" for part in ("fetch_ms", "train_ms", "write_ms")]
                rows.append([f"{skew}, {MODES[mode].title}", *parts])
    return markdown_table(["", "fetching", "training", "writing"], rows)


def _stretches(cells: Cells) -> str:
    found = [cell["stretch"] for cell in cells.values()]
    return f"{min(found):g} to {max(found):g}"


def _fidelity(cells: Cells) -> list[str]:
    rows = []
    for name, cell in cells.items():
        counts, each = cell["counts"], cell["each_ms"]
        half = len(each) // 2
        fetched = counts.get("rows_missed")
        requests = counts.get("read_requests", 0.0)
        rows.append(
            [
                name,
                f"{cell['unique_rows']:.0f}",
                _NONE if fetched is None else f"{fetched:.0f}, {cell['predicted_missed_rows']:.0f}",
                f"{requests:.0f}",
                f"{statistics.fmean(each[:half]):.2f}, {statistics.fmean(each[half:]):.2f}",
                f"{1e3 * counts.get('late_s', 0.0) / cell['stretch']:.2f}",
                f"{cell['cpu_ms']:.2f}",
                f"{cell['others_cpus']:.1f}",
            ]
        )
    header = ["", "rows", "missed, simulated", "reads", "halves", "late", "CPU", "others"]
    return [
        (
            "Of a batch of the run: different rows; those that were missed, and the simulator's (sim/caches.py); reads "
            "of the medium, of which rows side by side share one; ms of both halves of what was timed; by how much "
            "real work was slower than declared, and CPU time, both ms of a full batch; and CPUs that others used "
            "before the run."
        ),
        "",
        *markdown_table(header, rows),
    ]
