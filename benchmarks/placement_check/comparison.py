"""Predicts steps, trains them, and hands over both: what the checks of predictions have in common."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import machine
import report_page
from holdfast_lab.placement.step_time import StepInputs
from larger.runner import Options, Runner
from placement_check.configurations import Configuration
from placement_check.outcome import Outcome
from placement_check.prediction import Predictor

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent


_MOST_TRIES = 3
_FEW_CPUS = 0.1  # that others use beside what is timed

T = TypeVar("T")
AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)
MakeOutcome = Callable[[Configuration, StepInputs, dict[str, Any], float], AnyOutcome]
"""Of a configuration, what its step follows from, what was measured, and the CPUs that others used beside these."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `compare` and `report_directory`."""
    parser.add_argument("--quick", action="store_true", help="shorter windows, fewer configurations")
    parser.add_argument("--only", help="configurations whose names hold one of these, between semicolons")
    parser.add_argument("--disk", type=Path, default=ROOT / "runs/larger", help="a directory on the disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on memory (tmpfs)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine, each time")
    parser.add_argument("--report-dir", type=Path, help="default: reports/NAME; runs/bench/NAME if partial")


def choose(
    configurations: Sequence[Configuration], arguments: argparse.Namespace, quick: Sequence[str]
) -> list[Configuration]:
    """quick: parts of the names of those that --quick takes. Ends the process where --only names none."""
    wanted = arguments.only.split(";") if arguments.only else quick if arguments.quick else ("",)
    chosen = [each for each in configurations if any(part in each.name for part in wanted)]
    if not chosen:
        sys.exit(f"no such configuration; there are: {'; '.join(each.name for each in configurations)}")
    return chosen


def compare(
    chosen: Sequence[Configuration], arguments: argparse.Namespace, make: MakeOutcome[AnyOutcome]
) -> tuple[list[AnyOutcome], dict[str, Any]]:
    """The outcomes, and the record of everything that was measured."""
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
            if configuration.in_memory not in predictor.tiers:
                probe = partial(predictor.probed, in_memory=configuration.in_memory)
                predictor.tiers[configuration.in_memory], _ = _alone(probe, arguments.patience)
            inputs, others = _alone(partial(predictor.inputs, configuration, source), arguments.patience)
            measured, more = _alone(partial(runner.measure_again, configuration.name, run), arguments.patience)
            outcome = make(configuration, inputs, measured, max(others, more))
            print(outcome.line, file=sys.stderr, flush=True)
            outcomes.append(outcome)
            runner.drop_ids()
    return outcomes, runner.record() | {"hosts": predictor.record()}


def _alone(work: Callable[[], T], patience_s: float) -> tuple[T, float]:
    """What it gives, and the CPUs that others used meanwhile: of the first time that these were few, or of the quietest
    of some."""
    tried = []
    for _ in range(_MOST_TRIES):
        machine.wait_until_idle(patience_s)
        with machine.Beside() as beside:
            done = work()
        tried.append((done, beside.cpus))
        if beside.cpus <= _FEW_CPUS:
            break
    return min(tried, key=lambda each: each[1])


def report_directory(arguments: argparse.Namespace, name: str) -> Path:
    """The one that was asked for, or the benchmark's own, whose report is replaced."""
    directory: Path | None = arguments.report_dir
    if directory is None:
        is_partial = arguments.quick or arguments.only
        directory = (ROOT / "runs/bench" if is_partial else BENCHMARKS / "reports") / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def write_record(record: dict[str, Any], predicted: dict[str, Any], directory: Path) -> None:
    """results.json in `directory`. predicted: dataclasses by name."""
    record = record | {"predicted": {name: asdict(each) for name, each in predicted.items()}}
    text = json.dumps(record, indent=1, default=str).replace(f"{ROOT}/", "")
    (directory / "results.json").write_text(text + "\n")


def finish(outcomes: Sequence[Outcome], directory: Path, *more: str) -> None:
    """Prints the report; ends the process with status 1 where there is something to complain about."""
    print(report_page.read(directory))
    if complaints := [*(complaint for each in outcomes if (complaint := each.complaint)), *more]:
        sys.exit("\n".join(complaints))
