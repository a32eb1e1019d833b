"""What relaxed recovery costs: runs killed with their dense state behind, recovered relaxed, beside those never cut.

    cd benchmarks && python -m relaxed [--seeds 8] [--only criteo_8k,...] [--quick]

Writes report.md, results.json and a plot. A run that was stopped goes on where it was: seeds that results.json has are
not trained again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

import report_page

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
CRITEO = Path(os.environ.get("HOLDFAST_CRITEO", os.path.relpath(ROOT.parent / "shared/data/criteo_8k")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m relaxed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8, help="of each workload, from 0")
    parser.add_argument("--only", help="workloads, by name, between commas")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 60 steps, two seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time, each on one thread")
    parser.add_argument("--criteo", type=Path, default=CRITEO, help="the folder of train.tsv, valid.tsv and test.tsv")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on memory (tmpfs)")
    parser.add_argument("--report-dir", type=Path, help="default: runs/bench/DATE-relaxed")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    # Here, because every process that trains is forked from one that this one starts.
    from larger.one import prepare_process

    prepare_process(1)
    from relaxed.processes import Processes
    from relaxed.record import Record
    from relaxed.report import write_report
    from relaxed.trial import run_trial
    from relaxed.workloads import workloads

    known = workloads(arguments.criteo, quick=arguments.quick)
    names = arguments.only.split(",") if arguments.only else [workload.name for workload in known]
    if unknown := [name for name in names if name not in {workload.name for workload in known}]:
        sys.exit(f"no workload {unknown[0]}; there are {', '.join(workload.name for workload in known)}")
    wanted = [workload for workload in known if workload.name in names]
    seeds = range(2 if arguments.quick else arguments.seeds)
    directory = arguments.report_dir
    if directory is None:
        # Not reports/recovery/relaxed: a run takes the seeds that its folder has for done.
        directory = ROOT / "runs/bench" / f"{datetime.now(UTC):%Y-%m-%d}-relaxed"
    directory.mkdir(parents=True, exist_ok=True)
    record = Record(directory / "results.json", wanted, memory=arguments.memory)
    began = time.monotonic()
    missing = [(workload, seed) for seed in seeds for workload in wanted if not record.has(workload.name, seed)]
    failed = []
    processes = Processes(arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as jobs:
        running = {jobs.submit(run_trial, *each, arguments.memory, processes): each for each in missing}
        for number, done in enumerate(as_completed(running), 1):
            workload, seed = running[done]
            said = f"[{time.monotonic() - began:5.0f} s] {number} of {len(missing)}: {workload.name}, seed {seed}"
            if (error := done.exception()) is not None:
                failed.append(f"{workload.name}, seed {seed}: {error}")
                said += " FAILED"
            else:
                record.add(done.result())
            print(said, file=sys.stderr, flush=True)
    write_report(record, wanted, directory)
    print(report_page.page_of(directory), file=sys.stderr)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
