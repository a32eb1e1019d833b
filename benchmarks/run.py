"""`make bench`: holdfast beside its peers, side by side in one run; writes a dated report.

    python benchmarks/run.py [--quick] [--only table1,ablation,...] [--shapes kaggle,...] [--rounds 3]

Rounds are interleaved: each goes once through all measurements, every other one backwards, so that drift of the machine
hits all alike; the report gives medians over rounds. Each measurement is a process of its own, and alone. After the
first round, peers that are more than 15% behind the best of their kind are not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import report_page
from measurements import BENCHMARKS, ROOT, SECTIONS, SHAPES, Measurement, Settings, measurements_of
from report import Results, write_report

_FAR_BEHIND = 1.15


def _settings() -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: kaggle, one round, a few steps")
    parser.add_argument("--only", help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--shapes", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--disk", type=Path, default=ROOT / "runs/bench", help="on the disk that is reported beside it")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-peers/bin/python")
    parser.add_argument("--build", type=Path, default=ROOT / "build/bench", help="with libbare.so and kernels_bench")
    parser.add_argument("--report-dir", type=Path, help="default: reports/bench; runs/bench/bench if partial")
    arguments = parser.parse_args()
    sections = tuple(arguments.only.split(",")) if arguments.only else SECTIONS
    shapes = tuple(arguments.shapes.split(",")) if arguments.shapes else (SHAPES[:1] if arguments.quick else SHAPES)
    for what, given, known in (("section", sections, SECTIONS), ("shape", shapes, SHAPES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"no {what} {unknown[0]}; there are {', '.join(known)}")
    for path in (arguments.python, arguments.peers_python, arguments.build / "libbare.so"):
        if not path.exists():
            parser.error(f"{path} is missing: `make bench` makes it")
    settings = Settings(
        quick=arguments.quick,
        rounds=arguments.rounds or (1 if arguments.quick else 3),
        shapes=shapes,
        sections=sections,
        medium=arguments.medium,
        disk=arguments.disk.absolute(),
        python=arguments.python.absolute(),
        peers_python=arguments.peers_python.absolute(),
        build=arguments.build.absolute(),
    )
    return settings, arguments.report_dir


def _parse_kernels_bench(text: str) -> dict[str, Any]:
    """Its lines as {optimizer: {verb: ms}}."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        if found := re.match(r"(\w+)\s+(sgd|rowwise_adagrad)\s+unique\s+(\d+)\s(.*?)\sms\b", line):
            verbs = {name: float(ms) for name, ms in re.findall(r"(\w+)\s+([\d.]+)", found[4])}
            result[found[2]] = verbs | {"unique": int(found[3])}
    if not result:
        raise ValueError("kernels_bench printed no result")
    return result


def _run(measurement: Measurement) -> dict[str, Any]:
    """The measurement's result, or {"error": what it said}."""
    if measurement.makes is not None:
        shutil.rmtree(measurement.makes, ignore_errors=True)
        measurement.makes.mkdir(parents=True)
    try:
        done = subprocess.run(
            measurement.command,
            cwd=BENCHMARKS,
            capture_output=True,
            text=True,
            timeout=measurement.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {measurement.timeout_s} s"}
    finally:
        if measurement.cleanup is not None:
            shutil.rmtree(measurement.cleanup, ignore_errors=True)
    if done.returncode != (-9 if measurement.dies else 0):
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}"}
    try:
        parsed: dict[str, Any] = (
            _parse_kernels_bench(done.stdout) if measurement.parse == "kernels_bench" else json.loads(done.stdout)
        )
    except ValueError as error:
        return {"error": f"{error}: {done.stdout[-500:]}"}
    return parsed


def _far_behind(plan: list[Measurement], results: dict[str, list[dict[str, Any]]]) -> set[str]:
    """Keys of the peers that need no further round."""
    step_ms: dict[tuple[str, str, bool], dict[str, float]] = {}
    for measurement in plan:
        for result in results.get(measurement.key, [])[:1]:
            if measurement.peer is not None and "error" not in result:
                step_ms.setdefault(measurement.peer, {})[measurement.key] = statistics.median(result["step_ms"])
    return {
        key for of_kind in step_ms.values() for key, ms in of_kind.items() if ms > _FAR_BEHIND * min(of_kind.values())
    }


def _measure(settings: Settings) -> dict[str, Any]:
    plan = measurements_of(settings)
    results: dict[str, list[dict[str, Any]]] = {}
    busy: list[dict[str, Any]] = []
    left_out: set[str] = set()
    begin = time.monotonic()
    for number in range(settings.rounds):
        in_order = [m for m in plan if number < m.rounds and m.key not in left_out]
        if number % 2 == 1:
            # backwards, but what a measurement leaves for the next comes before it
            in_order = _reversed_keeping_pairs(in_order)
        for place, measurement in enumerate(in_order, 1):
            others = machine.others_busy()
            started = time.monotonic()
            result = _run(measurement)
            results.setdefault(measurement.key, []).append(result)
            busy.append({"key": measurement.key, "round": number, **others})
            now = time.monotonic()
            failed = f" FAILED: {result['error'].splitlines()[-1]}" if "error" in result else ""
            print(
                f"[{now - begin:5.0f} s] round {number + 1}/{settings.rounds}, {place}/{len(in_order)}: "
                f"{measurement.key} ({now - started:.1f} s; others used {others['cpus']:.2f} CPUs before){failed}",
                file=sys.stderr,
                flush=True,
            )
        if number == 0:
            left_out = _far_behind(plan, results)
    return {
        "settings": {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": (time.monotonic() - begin) / 60,
        "machine": machine.describe(settings.medium, settings.disk),
        "busy": busy,
        "left_out_after_round_1": sorted(left_out),
        "commands": {measurement.key: measurement.command for measurement in plan},
        "results": results,
    }


def _reversed_keeping_pairs(plan: list[Measurement]) -> list[Measurement]:
    groups: list[list[Measurement]] = []
    for measurement in plan:
        if measurement.cleanup is not None and groups:
            groups[-1].append(measurement)
        else:
            groups.append([measurement])
    return [measurement for group in reversed(groups) for measurement in group]


def main() -> None:
    settings, report_dir = _settings()
    partial = settings.quick or settings.sections != SECTIONS or settings.shapes != SHAPES
    if report_dir is None:
        report_dir = (ROOT / "runs/bench" if partial else BENCHMARKS / "reports") / "bench"
    settings.disk.mkdir(parents=True, exist_ok=True)
    report_dir.mkdir(parents=True, exist_ok=True)
    record = _measure(settings)
    # Paths of the checkout are said from its root: the report is of the project, not of a machine.
    text = json.dumps(record, indent=1, default=str).replace(f"{ROOT}/", "")
    (report_dir / "results.json").write_text(text + "\n")
    main_plot = write_report(Results(record), report_dir)
    if main_plot is not None and not partial:
        shutil.copy(main_plot, ROOT / "docs/benchmark.png")
    print(report_page.page_of(report_dir), file=sys.stderr)
    failed = [key for key, rounds in record["results"].items() if any("error" in result for result in rounds)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
