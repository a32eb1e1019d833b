"""TrainingCXL's evaluation (Kwon et al., IEEE Micro 43(2), 2023) as real runs on dialled media, beside the simulator.

    cd benchmarks && python -m trainingcxl [--models rm1,rm4] [--systems pmem,cxl] [--record FILE]

Trains RM1 to RM4 in the paper's six configurations with holdfast's own switches: rows, logs, recovery's protocol and
dense states are real, the media wait for what they are declared to take ([pool.dial]), and the dense part waits for a
declared RTX 3090 instead of being computed ([device.dial]): timing only, nothing is learned. All clocks of a run are
stretched by one factor, so that two cores' own work is small beside declared times. Each cell is a process of its own;
a record is added to, so a run may be made in parts. Writes report.md, results.json and pictures. Exit status 1 where a
bar is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import report_page
from trainingcxl.models import SHAPES, Shape
from trainingcxl.report import complaints, write_report
from trainingcxl.simulated import accelerator_of, simulated
from trainingcxl.systems import CONFIGURATIONS, RELAXED_INTERVAL, Configuration, run_toml

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
STRETCH = 50.0
SSD_STRETCH = 4.0  # a batch takes a second as it is
NEAR_STRETCH = 200.0  # a batch's declared times are as short as this machine's copies of the parameters
WARMUP, STEPS = 3, RELAXED_INTERVAL
RELAXED_WARMUP = 2 * RELAXED_INTERVAL + 1  # no page of either slot of the parameters is new to what is timed
NEAR_STEPS = 4 * STEPS  # of the systems that are a few percent apart, whose batches are short
SSD_STEPS = 3
_MOST_SECONDS = 600
_BATCHES_KEPT = 4  # of spans, for pictures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trainingcxl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES) + "; none of them: the report alone"
    )
    parser.add_argument("--systems", default=",".join(CONFIGURATIONS), help="of " + ", ".join(CONFIGURATIONS))
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"), help="where pools lie; faster than declared")
    parser.add_argument(
        "--stretch",
        type=float,
        help=f"of all declared times; default: {STRETCH:g}, near memory {NEAR_STRETCH:g}, of an SSD {SSD_STRETCH:g}",
    )
    parser.add_argument("--record", type=Path, help="results.json to add to; default: the report's own")
    parser.add_argument("--report-dir", type=Path, default=BENCHMARKS / "reports/papers/trainingcxl")
    arguments = parser.parse_args()
    arguments.report_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.record or arguments.report_dir / "results.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    for model in filter(None, arguments.models.split(",")):
        for system in arguments.systems.split(","):
            cell = _cell(SHAPES[model], CONFIGURATIONS[system], arguments)
            record["cells"][f"{model}/{system}"] = cell
            print(f"{model} {system}: {cell['batch_ms']:.2f} ms", file=sys.stderr)
            record["machine"] = machine.describe(arguments.medium, ROOT)
            path.write_text(json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")
    _simulate(record)
    path.write_text(json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")
    write_report(record, arguments.report_dir)
    print(report_page.read(arguments.report_dir))
    if missed := complaints(record):
        sys.exit("\n".join(missed))


def _cell(shape: Shape, configuration: Configuration, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one run measured, in unstretched time, and what the simulator says."""
    stretch = arguments.stretch or _stretch_of(configuration)
    steps = SSD_STEPS if configuration.block else NEAR_STEPS if configuration.near else STEPS
    warmup = RELAXED_WARMUP if configuration.relaxed else WARMUP
    accelerator = accelerator_of(shape)
    text = run_toml(shape, configuration, accelerator, stretch, warmup + steps + 1)
    others = machine.others_busy(1.0)["cpus"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(text)
        command = [sys.executable, "-m", "trainingcxl.one", "--run", str(run), "--directory", str(arguments.medium)]
        command += ["--warmup", str(warmup), "--steps", str(steps)]
        done = subprocess.run(
            command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, check=True, timeout=_MOST_SECONDS
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    return {
        "batch_ms": measured["batch_ms"] / stretch,
        "each_ms": [each / stretch for each in measured["each_ms"]],
        "stage_ms": {stage: length / stretch for stage, length in measured["stage_ms"].items()},
        "dial": measured["dial"],
        "cpu_s": measured["cpu_s"],
        "verbs": _first_batches(measured["verbs"], measured["each_ms"], stretch),
        "background": _first_batches(measured["background"], measured["each_ms"], stretch),
        "stretch": stretch,
        "accelerator_ms": 1e3 * accelerator.total_s,
        "modules": configuration.medium(shape).modules,
        "run": text,
        "others_cpus": others,
    }


def _stretch_of(configuration: Configuration) -> float:
    if configuration.block:
        return SSD_STRETCH
    return NEAR_STRETCH if configuration.near else STRETCH


def _first_batches(spans: list[tuple[str, float, float]], each_ms: list[float], stretch: float) -> list[Any]:
    """What a picture of two batches shows, unstretched."""
    end_of_all = sum(each_ms[:_BATCHES_KEPT])
    return [
        (stage, round(begin / stretch, 5), round(end / stretch, 5)) for stage, begin, end in spans if begin < end_of_all
    ]


def _simulate(record: dict[str, Any]) -> None:
    """Puts the simulator's figures beside those that were measured."""
    for name, cell in record["cells"].items():
        model, _, system = name.partition("/")
        shape = SHAPES[model]
        predicted = simulated(shape, CONFIGURATIONS[system], accelerator_of(shape))
        cell["simulated_ms"] = 1e3 * predicted.batch_s
        cell["simulated_stage_ms"] = {stage: 1e3 * length for stage, length in predicted.stage_s.items()}


if __name__ == "__main__":
    main()
