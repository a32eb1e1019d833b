"""The device path on a GPU: kernels, transfers, and whole steps, each beside what the machine allows.

    make bench-gpu PYTHON=python3                           # on a machine with a GPU, 8 minutes at most
    cd benchmarks && python -m gpu --device cpu --smoke     # shows that everything runs, and nothing else
    cd benchmarks && python -m gpu --only "steps of mlperf"

Each part runs in a process of its own. One that fails, or has no time left, is reported as that. Writes report.md and
results.json; prints a table last. Exit status 1 where something failed, whether bars are met or not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import report_page
from gpu.parts import DEVICE, all_parts
from gpu.process import Part, Settings, run_part
from gpu.report import with_what_was_measured_before, write_report
from holdfast.state.reproducibility import prepare_environment

_BENCHMARKS = Path(__file__).parents[1]
_SECONDS = 440.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: shows that everything runs")
    parser.add_argument("--only", default="", help="parts by name, with ; between them, or the beginning of one")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all parts together")
    parser.add_argument("--medium", type=Path, default=Path("/dev/shm"), help="where pools are made, on memory")
    parser.add_argument(
        "--keep", type=Path, metavar="RESULTS", help="an earlier results.json: what it has beside stays"
    )
    parser.add_argument("--out", type=Path, default=None, help="where the report goes")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    prepare_environment()
    if given.device == "cpu":
        # Optimizers import it, for seconds, in every part. It may touch CUDA, which is not to be used before a fork.
        importlib.import_module("torch._dynamo")
    settings = Settings(device=given.device, smoke=given.smoke, medium=given.medium)
    wanted = [name.strip() for name in given.only.split(";") if name.strip()]
    of_machine, *others = all_parts()  # bars need the machine's limits, whatever else is measured
    parts = [part for part in others if not wanted or any(part.name.startswith(name) for name in wanted)]
    if not parts:
        sys.exit(f"--only {given.only!r}: there is {', '.join(part.name for part in others)}")
    parts.insert(0, of_machine)
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        # What earlier parts have left over is for those that come next.
        kept = sum(later.seconds for later in parts[number + 1 :])
        seconds = max(0.0, given.seconds - (time.monotonic() - began) - kept)
        results |= _run(part, settings, seconds)
        if why := results[DEVICE].get("failed"):
            sys.exit(f"nothing can be measured: {why}")
    today = datetime.now(UTC)
    record = {
        "date": today.isoformat(timespec="seconds"),
        "settings": {"device": given.device, "smoke": given.smoke, "parts": [part.name for part in parts]},
        "minutes": (time.monotonic() - began) / 60,
        "machine": machine.describe(given.medium, Path(tempfile.gettempdir())),
        "results": results,
    }
    if given.keep is not None:
        record = with_what_was_measured_before(record, json.loads(given.keep.read_text()))
    is_whole = given.device == "cuda" and not given.smoke and not wanted
    folder = _BENCHMARKS / "reports/gpu" if is_whole else _BENCHMARKS.parent / "runs/bench/gpu"
    directory = given.out or folder
    table = write_report(directory, record)
    print(f"\nwrote {report_page.page_of(directory)} and results.json\n")
    print("\n".join(table))
    sys.exit(1 if any("failed" in result for result in results.values()) else 0)


def _run(part: Part, settings: Settings, seconds: float) -> dict[str, dict[str, Any]]:
    print(f"== {part.name} ({seconds:.0f} s)", flush=True)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-", dir=settings.medium) as directory:
        for key, result in run_part(part, settings, Path(directory), seconds):
            found[key] = result
            state = next((f"{name}: {result[name]}" for name in ("failed", "left_out") if name in result), "measured")
            print(f"{key}: {state}, {result.get('took_s', 0.0):.1f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
