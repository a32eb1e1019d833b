"""ScratchPipe's comparison (Kwon and Rhu, ISCA 2022), run: caches that keep, look back and look forward.

    cd benchmarks && python -m scratchpipe [--quick] [--only skew,cache,dim,lookups,durable]

holdfast's own engine over the host's memory behind a link, as a dial declares it ([pool.dial]: PCIe 3.0, a way for
each direction), beside a declared V100 ([device.dial]): timing only, nothing is learned. systems.py says which run each
system is and how it differs from the paper's; batches.py, how the paper's shape is scaled. Each cell is a process of
its own; a record is added to, so a run may be made in parts. Writes report.md, results.json and a picture. Exit status
1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import machine
import report_page
from scratchpipe.batches import TABLES, Drawn, Workload
from scratchpipe.cells import SECTIONS, Cell, cells
from scratchpipe.report import complaints, write_report
from scratchpipe.simulated import accelerator_of, library_ms, missed_rows, predicted_s, ways_of
from scratchpipe.systems import MODES, WINDOW, Log, log_bandwidth, run_toml, scratchpad_rows

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
WARMUP, STEPS = 4, 16  # batches, after those that fill a cache
AFTER = 1 + WINDOW  # them: as long as time is taken, there are batches to look forward to
_LONGEST_S, _MOST_STRETCH = 12.0, 100.0
_MOST_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scratchpipe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one workload, five systems; writes to runs/bench")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS) + "; none of them: the report alone"
    )
    parser.add_argument("--missing", action="store_true", help="only cells that the record has not")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no cell begins later; --missing goes on")
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"), help="where pools lie; faster than declared")
    parser.add_argument(
        "--stretch", type=float, help="of all declared times; default: as much as a workload's time allows"
    )
    parser.add_argument("--report-dir", type=Path)
    arguments, began = parser.parse_args(), time.monotonic()
    default = ROOT / "runs/bench/papers/scratchpipe" if arguments.quick else BENCHMARKS / "reports/papers/scratchpipe"
    directory: Path = arguments.report_dir or default
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}, "library": {}}
    for cell in cells(tuple(filter(None, arguments.only.split(","))), quick=arguments.quick):
        if time.monotonic() - began > arguments.seconds or (arguments.missing and cell.name in record["cells"]):
            continue
        found = record["cells"][cell.name] = _measured(
            cell, arguments.medium, arguments.stretch or _stretch(cell.workload)
        )
        record["library"][cell.workload.name] = library_ms(cell.workload)
        record["machine"] = machine.describe(arguments.medium, ROOT)
        print(f"{cell.name}: {found['batch_ms']:.2f} ms, {found['predicted_ms']:.2f} predicted", file=sys.stderr)
        path.write_text(json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")
    write_report(record, directory)
    print(report_page.read(directory))
    if missed := complaints(record):
        sys.exit("\n".join(missed))


@cache
def _source(workload: Workload, fill: int) -> Drawn:
    return Drawn(lookups=workload.lookups, exponent=workload.exponent, fill=fill, batches=WARMUP + STEPS + AFTER)


@cache
def _stretch(workload: Workload) -> float:
    """With which the straw man, the slowest that has a cache to fill, takes so long: the more, the less two cores' own
    work shows. It is that of all systems."""
    mode, accelerator = MODES["straw"], accelerator_of(workload)
    unique = _source(workload, workload.fill_batches).unique_rows()
    log_bytes_per_s = log_bandwidth(workload, Log.WRITE_BACK, unique, missed_rows(workload, static=False))
    batch_s = predicted_s(mode, ways_of(workload, mode, accelerator, unique, log_bytes_per_s))
    return min(_MOST_STRETCH, round(_LONGEST_S / (batch_s * (workload.fill_batches + WARMUP + STEPS)), 1))


def _measured(cell: Cell, medium: Path, stretch: float) -> dict[str, Any]:
    """In unstretched time of a full batch, beside what the schedule comes to."""
    workload, mode = cell.workload, MODES[cell.mode]
    fill = 0 if mode.in_place or mode.keeps else workload.fill_batches
    source, accelerator = _source(workload, fill), accelerator_of(workload)
    unique = source.unique_rows()
    missed = missed_rows(workload, static=mode.keeps)
    log_bytes_per_s = log_bandwidth(workload, cell.log, unique, missed)
    text = run_toml(
        workload,
        mode,
        accelerator,
        rows=scratchpad_rows(workload, mode, source),
        log_bytes_per_s=log_bytes_per_s,
        stretch=stretch,
        fill=fill,
        batches=WARMUP + STEPS + AFTER,
    )
    others = machine.others_busy(1.0)["cpus"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(text)
        command = [sys.executable, "-m", "scratchpipe.one", "--run", str(run), "--directory", str(medium)]
        if mode.keeps:
            keep = Path(folder) / "keep.npy"
            np.save(keep, [source.hottest(table, workload.cached_rows) for table in range(TABLES)])
            command += ["--keep", str(keep)]
        command += ["--warmup", str(fill + WARMUP), "--steps", str(STEPS)]
        done = subprocess.run(
            command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, check=True, timeout=_MOST_SECONDS
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    ways = ways_of(workload, mode, accelerator, unique, log_bytes_per_s)
    return {
        "batch_ms": measured["batch_ms"] / stretch,
        "each_ms": [round(each / stretch, 3) for each in measured["each_ms"]],
        "stage_ms": {stage: round(length / stretch, 4) for stage, length in measured["stage_ms"].items()},
        "counts": measured["counts"],
        "cpu_ms": measured["cpu_ms"] / stretch,
        "unique_rows": unique,
        "predicted_missed_rows": missed,
        "fetch_ms": 1e3 * ways.fetch_s,
        "write_ms": 1e3 * ways.write_s,
        "train_ms": 1e3 * ways.train_s,
        "predicted_ms": 1e3 * predicted_s(mode, ways),
        "stretch": stretch,
        "others_cpus": others,
        "run": text,
    }


if __name__ == "__main__":
    main()
