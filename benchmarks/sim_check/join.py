"""Puts parts of a check together that were run one after the other (``--only``), each on a quiet machine.

    cd benchmarks && python -m sim_check.join DIR DIR ... [--report-dir DIR]

Each DIR has a part's results.json. Of a configuration that several parts have, the first counts. Writes what a whole
run writes, with its exit status.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast_lab.sim.here import Loop
from placement_check.comparison import BENCHMARKS, finish
from sim_check.configurations import CONFIGURATIONS
from sim_check.outcome import WORST_BAR, Prediction, SimOutcome, complaint_of_all
from sim_check.report import write_report

_BY_CONFIGURATION = ("commands", "results", "predicted", "others_cpus")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sim_check.join", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--report-dir", type=Path, default=BENCHMARKS / "reports/predictions/sim-check")
    arguments = parser.parse_args()
    record = joined([json.loads((part / "results.json").read_text()) for part in arguments.parts])
    outcomes = outcomes_of(record)
    arguments.report_dir.mkdir(parents=True, exist_ok=True)
    (arguments.report_dir / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    write_report(outcomes, record, arguments.report_dir)
    finish(outcomes, arguments.report_dir, *complaint_of_all(outcomes))


def joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of all. Ends the process where they are of several machines."""
    first = records[0]
    here = [{**each["machine"], "holdfast_commit": ""} for each in records]
    if any(machine != here[0] for machine in here):
        sys.exit("the parts are of several machines")
    commits = dict.fromkeys(each["machine"]["holdfast_commit"] for each in records)
    record = {
        **first,
        "machine": {**first["machine"], "holdfast_commit": ", ".join(commits)},
        "minutes": sum(each["minutes"] for each in records),
        "busy": [used for each in records for used in each["busy"]],
        "hosts": [each["hosts"] for each in records],
    }
    for key in _BY_CONFIGURATION:
        found = {name: value for each in reversed(records) for name, value in each[key].items()}
        record[key] = {name: found[name] for name in dict.fromkeys(name for each in records for name in each[key])}
    return record


def outcomes_of(record: dict[str, Any]) -> list[SimOutcome]:
    """In the order of a whole run."""
    found = []
    for name in (each.name for each in CONFIGURATIONS if each.name in record["results"]):
        prediction = _prediction(record["predicted"][name])
        found.append(
            SimOutcome(
                name=name,
                prediction=prediction,
                predicted_ms=prediction.ms,
                measured=record["results"][name],
                others_cpus=record["others_cpus"][name],
                bar=WORST_BAR,
            )
        )
    return found


def _prediction(plain: dict[str, Any]) -> Prediction:
    """What a report shows of it; its costs stay in the record."""
    return Prediction(**{**plain, "costs": None, "loop": Loop(**plain["loop"])})


if __name__ == "__main__":
    main()
