"""ScratchPipe (Kwon and Rhu, ISCA 2022) on hardware of its time, over skew, cache, row and bag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.sim.library import Library
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import Line, Section, Table

HARDWARE = "scratchpipe-v100"
MODEL = "deeprecsys-rm1"
SYSTEMS = ("dram", "scratchpipe-static", "scratchpipe-lru", "scratchpipe")
NO_ROOM = "does not fit"
SKEW = "Zipf's exponent"
_SWEEPS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    SKEW: (f"models.{MODEL}.zipf_exponent", (0.6, 0.8, 0.9, 1.05, 1.2)),
    "rows in the cache": ("systems.*.cache.share", (0.02, 0.05, 0.1, 0.2)),
    "elements of a row": (f"models.{MODEL}.dim", (16, 32, 64, 128)),
    "ids of a table and sample": (f"models.{MODEL}.lookups", (1, 20, 80, 160)),
}
_TWENTY_IDS = {f"models.{MODEL}.lookups": 20}
_HEAD = ("DRAM", "static", "LRU", "look forward", "DRAM over look forward")


def sweeps_table(library: Library) -> Table:
    on_hardware = library.system(HARDWARE).devices
    systems = {
        name: replace(each, devices={role: on_hardware[role] for role in each.devices})
        for name, each in ((name, library.system(name)) for name in SYSTEMS)
    }
    here = replace(library, systems={**library.systems, **systems}).changed(_TWENTY_IDS)
    rows = []
    for varied, (key, values) in _SWEEPS.items():
        for value in values:
            changed = here.changed({key: value})
            cells = [milliseconds(changed, name, MODEL) for name in systems]
            fits = cells[-1] != NO_ROOM
            rows.append((varied, f"{value:g}", *cells, f"{float(cells[0]) / float(cells[-1]):.1f}" if fits else ""))
    return Table(header=("varied", "at", *_HEAD), rows=rows)


def skew_figure(path: Path, sweeps: Table, *, overwrite: bool = False) -> Path:
    of_skew = [[str(cell) for cell in row[1:]] for row in sweeps.rows if row[0] == SKEW]
    shown = [line(name, of_skew, column) for column, name in enumerate(_HEAD[:-1], start=1)]
    title = "A batch, a tenth of the rows cached"
    return figures.lines(path, shown, title=title, x_name=SKEW, y_name="ms", overwrite=overwrite)


def section(directory: Path, sweeps: Table, *, overwrite: bool) -> Section:
    """sweeps: of `sweeps_table`."""
    return Section(
        title="ScratchPipe",
        text=f"Kwon and Rhu, ISCA 2022: a scratchpad in the GPU's memory that looks forward, on a V100 ({HARDWARE}), "
        f"{MODEL} with 20 ids a table and sample, a tenth of the rows cached, Zipf's exponent 1.05; one thing at a "
        "time. Beside it rows in DRAM alone, the hottest rows in the GPU for good, and a cache that looks back. A "
        "scratchpad that is smaller than its window does not fit.",
        tables=(replace(sweeps, title="ms a batch"),),
        figures=(skew_figure(directory / "scratchpipe.svg", sweeps, overwrite=overwrite),),
    )


def milliseconds(library: Library, system: str, model: str) -> str:
    """Of a batch, in words."""
    try:
        return f"{library.run(system, model).batch_s * 1e3:.1f}"
    except (ConfigError, DoesNotFit):  # a cache that is too small for its window is refused, too
        return NO_ROOM


def line(label: str, rows: list[list[str]], column: int) -> Line:
    """What there is of a column, over the first one."""
    there = [row for row in rows if row[column] != NO_ROOM]
    return Line(label=label, x=[float(row[0]) for row in there], y=[float(row[column]) for row in there])
