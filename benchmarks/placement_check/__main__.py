"""Does `holdfast plan` tell how long a step takes? Predicts steps, trains them, and compares.

    cd benchmarks && python -m placement_check [--quick] [--only "PART OF A NAME;..."]

Probes disk and memory once, counts the ids of every configuration, predicts its step, and trains it with the systems of
``larger``, each in a process of its own. Writes report.md and results.json. Exit status 1 where a prediction is off by
more than a quarter, with a line that says which. Six minutes, four with --quick (shorter windows, six configurations).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from larger.one import prepare_process

THREADS = 2
BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
_QUICK_CONFIGURATIONS = ("in place", "log store, kaggle, scratchpad", "log store, kaggle, a fifth", "uniform ids")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m placement_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter windows, six configurations")
    parser.add_argument("--only", help="configurations whose names hold one of these, between semicolons")
    parser.add_argument("--disk", type=Path, default=ROOT / "runs/larger", help="a directory on the disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on memory (tmpfs)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine, each time")
    parser.add_argument("--report-dir", type=Path, help="default: reports/DATE-placement; runs/bench/... if partial")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    # What is predicted here is measured in processes that are prepared likewise.
    prepare_process(THREADS)
    import machine
    from larger.runner import Options, Runner
    from placement_check.configurations import CONFIGURATIONS
    from placement_check.prediction import Predictor
    from placement_check.report import Outcome, write_report

    wanted = arguments.only.split(";") if arguments.only else _QUICK_CONFIGURATIONS if arguments.quick else ("",)
    chosen = [each for each in CONFIGURATIONS if any(part in each.name for part in wanted)]
    if not chosen:
        sys.exit(f"no such configuration; there are: {'; '.join(each.name for each in CONFIGURATIONS)}")
    options = Options(
        quick=True,  # small tables
        sections=(),
        workloads=(),
        disk=arguments.disk.absolute(),
        memory=arguments.memory.absolute(),
        limits_memory=False,
    )
    runner = Runner(options)
    outcomes = []
    with runner.directories() as (disk, memory):
        predictor = Predictor(disk, memory)
        for configuration in chosen:
            run = configuration.run()
            if arguments.quick:
                run = replace(run, steps=run.steps // 2)
            source = runner.source(run.workload, run.num_batches)
            machine.wait_until_idle(arguments.patience)
            predicted = predictor.predict(configuration, source)
            machine.wait_until_idle(arguments.patience)
            measured = runner.measure(configuration.name, run)
            others = runner.record()["busy"][-1]["cpus"]
            outcome = Outcome(name=configuration.name, predicted=predicted, measured=measured, others_cpus=others)
            print(outcome.line, file=sys.stderr, flush=True)
            outcomes.append(outcome)
            runner.drop_ids()
    directory = arguments.report_dir
    if directory is None:
        partial = arguments.quick or arguments.only
        parent = ROOT / "runs/bench" if partial else BENCHMARKS / "reports"
        directory = parent / f"{datetime.now(UTC):%Y-%m-%d}-placement"
    directory.mkdir(parents=True, exist_ok=True)
    record = runner.record()
    record |= {"predicted": {each.name: asdict(each.predicted) for each in outcomes}, "hosts": predictor.record()}
    text = json.dumps(record, indent=1, default=str).replace(f"{ROOT}/", "")
    (directory / "results.json").write_text(text + "\n")
    write_report(outcomes, record["machine"], directory)
    print((directory / "report.md").read_text())
    if complaints := [complaint for each in outcomes if (complaint := each.complaint)]:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
