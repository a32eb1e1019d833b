"""Tables larger than memory: holdfast's log store beside DRAM, mapped files and RocksDB, in one run.

    cd benchmarks && python -m larger [--quick] [--only roofline,caches,...] [--workloads kaggle,...]

Each measurement is a process of its own (``larger.one``), and alone. Writes report.md, results.json and plots.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import report_page
from larger.report import write_report
from larger.runner import SECTIONS, THREADS, Options, Runner
from larger.sections import WORKLOADS

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent


def _options() -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m larger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test of minutes: small tables, a few steps")
    parser.add_argument("--only", help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--workloads", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--disk", type=Path, default=ROOT / "runs/larger", help="a directory on the disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on memory (tmpfs)")
    parser.add_argument("--no-memory-limit", action="store_true", help="where there are no memory control groups")
    parser.add_argument(
        "--threads", type=int, default=THREADS, help="that train; with fewer, cores are left for the rest"
    )
    parser.add_argument("--report-dir", type=Path, help="default: reports/larger; runs/bench/larger if partial")
    arguments = parser.parse_args()
    sections = tuple(arguments.only.split(",")) if arguments.only else SECTIONS
    workloads = tuple(arguments.workloads.split(",")) if arguments.workloads else WORKLOADS
    for what, given, known in (("section", sections, SECTIONS), ("workload", workloads, WORKLOADS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"no {what} {unknown[0]}; there are {', '.join(known)}")
    options = Options(
        quick=arguments.quick,
        sections=sections,
        workloads=workloads,
        disk=arguments.disk.absolute(),
        memory=arguments.memory.absolute(),
        limits_memory=not arguments.no_memory_limit,
        threads=arguments.threads,
    )
    return options, arguments.report_dir


def main() -> None:
    options, directory = _options()
    whole = (options.sections, options.workloads, options.threads) == (SECTIONS, WORKLOADS, THREADS)
    partial = options.quick or not whole
    if directory is None:
        directory = (ROOT / "runs/bench" if partial else BENCHMARKS / "reports") / "larger"
    directory.mkdir(parents=True, exist_ok=True)
    runner = Runner(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # as Ctrl-C: gigabytes of files are removed
    try:
        runner.run()
    finally:  # an hour's measurements are worth keeping, whatever ended them
        record = runner.record()
        # Paths of the checkout are said from its root: the report is of the project, not of a machine.
        text = json.dumps(record, indent=1, default=str).replace(f"{ROOT}/", "")
        (directory / "results.json").write_text(text + "\n")
        write_report(record, directory)
        print(report_page.page_of(directory), file=sys.stderr)
    if failed := [key for key, result in record["results"].items() if "error" in result]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
