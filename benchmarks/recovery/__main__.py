"""How long does recovery take? A line through the log's size, flat in the tables'.

    cd benchmarks && python -m recovery [--quick]

Of both stores: a run fills its log with steps whose dense state is not durable (the most that recovery can have to
undo) and kills itself; another process opens the pool. First over log sizes, with one table; then over table sizes,
with one log. Writes report.md, results.json and a picture; exit status 1 where the points are not on a line, or where
the table's size shows. Six minutes; one with --quick.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import report_page
from markdown_table import markdown_table
from recovery import plots
from recovery.figures import LEAST_R_SQUARED, MOST_SPREAD, Line, Point, line_through, spread

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
ROW_BYTES = 68  # 16 floats and an Adagrad sum
LOG_MIB = (64, 128, 256, 512, 1024)
TABLE_ROWS = (1 << 22, 1 << 24, 1 << 26, 1 << 28)
FIXED_LOG_MIB = 256
FIXED_TABLE_ROWS = 1 << 24


@dataclass(frozen=True, slots=True)
class Store:
    name: str
    medium: str
    directory: Path


def measure(store: Store, table_rows: int, log_mib: int, rounds: int) -> Point:
    seconds = []
    used = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=store.directory, prefix="holdfast-recovery-") as directory:
            filled = _one("fill", store, Path(directory) / "pool", table_rows, log_mib)
            opened = _one("open", store, Path(directory) / "pool", table_rows, log_mib)
        if opened["clean"] or opened["rows_step"] != filled["steps"] or opened["step"] != 0:
            raise SystemExit(f"{store.name}: that was no recovery to step 0: {filled}, {opened}")
        seconds.append(opened["seconds"])
        used = filled["used_log_bytes"]
    point = Point(table_rows * ROW_BYTES, used, tuple(seconds))
    print(
        f"{store.name}: log {used / 2**20:.0f} MiB, table {point.table_bytes / 2**30:.1f} GiB: {point.median:.3f} s",
        file=sys.stderr,
        flush=True,
    )
    return point


def _one(mode: str, store: Store, pool: Path, table_rows: int, log_mib: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "recovery.one", mode, str(pool), "--medium", store.medium]
    command += ["--table-rows", str(table_rows), "--log-bytes", str(log_mib << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{store.name}: {mode} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, the smaller half of the sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=ROOT / "runs/recovery", help="a directory on the disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on memory (tmpfs)")
    parser.add_argument("--report-dir", type=Path, help="default: reports/recovery; runs/bench/recovery if quick")
    return parser.parse_args()


def _report(
    over_logs: dict[str, list[Point]], over_tables: dict[str, list[Point]], lines: dict[str, Line]
) -> Iterator[str]:
    yield "# How long recovery takes"
    yield ""
    yield "A run fills its log with steps whose dense state is not durable, and is killed; opening the pool rolls them"
    yield "back. Medians of the rounds."
    yield ""
    yield "![recovery time](recovery.png)"
    yield ""
    for name, points in over_logs.items():
        line = lines[name]
        yield f"## {name}"
        yield ""
        yield (
            f"{line.fixed_s * 1e3:.0f} ms + the log at {line.bytes_per_s / 2**30:.2f} GiB/s (R² {line.r_squared:.3f}; "
            f"bar {LEAST_R_SQUARED}). Over table sizes with one log: slowest / fastest {spread(over_tables[name]):.2f} "
            f"(bar {MOST_SPREAD})."
        )
        yield ""
        yield from markdown_table(
            ["log used", "table", "seconds", "rounds"],
            (
                [
                    f"{point.log_bytes / 2**20:.0f} MiB",
                    f"{point.table_bytes / 2**30:.2f} GiB",
                    f"{point.median:.3f}",
                    ", ".join(f"{seconds:.3f}" for seconds in point.seconds),
                ]
                for point in (*points, *over_tables[name])
            ),
        )


def main() -> None:
    arguments = _arguments()
    rounds = 1 if arguments.quick else arguments.rounds
    arguments.disk.mkdir(parents=True, exist_ok=True)
    stores = (Store("in place, tmpfs", "memory", arguments.memory), Store("log store, disk", "block", arguments.disk))
    cut = 3 if arguments.quick else len(LOG_MIB)
    machine.wait_until_idle(60)
    busy = machine.others_busy()
    over_logs = {s.name: [measure(s, FIXED_TABLE_ROWS, mib, rounds) for mib in LOG_MIB[:cut]] for s in stores}
    over_tables = {s.name: [measure(s, rows, FIXED_LOG_MIB, rounds) for rows in TABLE_ROWS[:cut]] for s in stores}
    lines = {name: line_through(points) for name, points in over_logs.items()}

    directory = arguments.report_dir
    if directory is None:
        directory = (ROOT / "runs/bench" if arguments.quick else BENCHMARKS / "reports") / "recovery"
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine.describe(arguments.memory, arguments.disk),
        "busy": busy,
        "over_logs": {name: [asdict(point) for point in points] for name, points in over_logs.items()},
        "over_tables": {name: [asdict(point) for point in points] for name, points in over_tables.items()},
    }
    (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    plots.recovery(directory / "recovery.png", over_logs, over_tables, lines)
    text = "\n".join(_report(over_logs, over_tables, lines))
    report_page.write(directory, text)
    print(text)
    complaints = [
        f"{name}: the points are not on a line, R² {line.r_squared:.3f}"
        for name, line in lines.items()
        if line.r_squared < LEAST_R_SQUARED
    ]
    complaints += [
        f"{name}: the table's size shows, slowest / fastest {spread(points):.2f}"
        for name, points in over_tables.items()
        if spread(points) > MOST_SPREAD
    ]
    if not any(arguments.disk.iterdir()):
        shutil.rmtree(arguments.disk)
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
