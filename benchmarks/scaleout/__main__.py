"""Several ranks on one machine: speed, cost of committing, bytes on the wire, restart; beside TorchRec.

    cd benchmarks && python -m scaleout [--quick] [--only speed,commit,wire,peers,restart]

Two cores: a rank is pinned to one. Writes report.md and results.json; exit status 1 where a bar is not met or a
measurement failed. The peers need .venv-peers (make bench makes it); counting bytes needs root (a network namespace).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe, wait_until_idle
from scaleout.launch import RanksFailed, run_plain, run_ranks
from scaleout.report import write_report
from scaleout.restart import measure_restart

_FOLDER = Path(__file__).parents[1]
_PEERS = _FOLDER.parent / ".venv-peers" / "bin" / "python"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scaleout", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps; writes to runs/bench")
    parser.add_argument("--only", default="speed,commit,wire,peers,restart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine, each time")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    steps = ["--steps", "30" if given.quick else "80", "--warmup", "15", "--batches", "20", "--fill"]
    rounds = 1 if given.quick else given.rounds

    def calm(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        is_idle = wait_until_idle(given.patience)
        result = measure()
        print(json.dumps({name: result.get(name) for name in ("median_ms", "total")}), "idle" if is_idle else "busy")
        return {**result, "was_idle": is_idle}

    sections: dict[str, Callable[[], Any]] = {
        "speed": lambda: [_speed(steps, calm) for _ in range(rounds)],
        "commit": lambda: [_commit(given.quick, calm) for _ in range(rounds)],
        "wire": lambda: _wire(calm),
        "peers": lambda: [_peers(steps, calm) for _ in range(rounds)],
        "restart": lambda: [calm(lambda: measure_restart(4)) for _ in range(rounds)],
    }
    results: dict[str, Any] = {"machine": describe(Path("/dev/shm"), Path("/tmp")), "failures": {}}
    for name in given.only.split(","):
        print(f"== {name}")
        try:
            results[name] = sections[name]()
        except (RanksFailed, subprocess.CalledProcessError, OSError) as error:
            results["failures"][name] = str(error)
            print(error, file=sys.stderr)
    is_whole = not given.quick and set(given.only.split(",")) == set(sections)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    folder = _FOLDER / "reports" / f"{today}-scaleout" if is_whole else _FOLDER.parent / "runs" / "bench" / "scaleout"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    met = write_report(folder / "report.md", results)
    print(f"wrote {folder / 'report.md'}")
    sys.exit(0 if met and not results["failures"] else 1)


def _speed(steps: list[str], calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """One process on one core; a group of one, of two (a core each), of four (two on each core)."""
    return {
        "plain": calm(lambda: run_plain(steps)),
        **{f"ranks_{count}": calm(lambda count=count: run_ranks(count, steps)) for count in (1, 2, 4)},
    }


def _commit(quick: bool, calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Committing by turns of 20 steps, within one run."""
    options = ["--steps", "160" if quick else "400", "--warmup", "40", "--batches", "20", "--fill", "--turns", "20"]
    result = calm(lambda: run_ranks(2, options))
    by_turn: dict[bool, list[float]] = {True: [], False: []}
    for ms, commits in zip(result["step_ms"], result["commits"], strict=True):
        by_turn[commits].append(ms)
    on, off = statistics.median(by_turn[True]), statistics.median(by_turn[False])
    return {"on_ms": on, "off_ms": off, "cost": on / off - 1, "was_idle": result["was_idle"]}


def _wire(calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    few = ["--steps", "20", "--warmup", "0", "--batches", "10"]
    schemes = {
        "whole tables, 2 ranks": (2, []),
        "split tables, 2 ranks": (2, ["--split"]),
        "whole tables, 4 ranks": (4, []),
        "split tables, 4 ranks": (4, ["--split"]),
        "whole tables, 1 trainer, 1 memory rank": (2, ["--memory-ranks", "1"]),
        "whole tables, 2 trainers, 2 memory ranks": (4, ["--memory-ranks", "2"]),
        "split tables, 2 trainers, 2 memory ranks": (4, ["--memory-ranks", "2", "--split"]),
        "kaggle, split tables, 2 ranks": (2, ["--split", "--shape", "kaggle"]),
    }
    return {
        name: calm(lambda count=count, more=more: run_ranks(count, [*few, *more], apart=True))["wire"]
        for name, (count, more) in schemes.items()
    }


def _peers(steps: list[str], calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Beside TorchRec's DistributedModelParallel, two ranks, a core each; with either optimizer."""
    found: dict[str, Any] = {}
    for optimizer in ("rowwise_adagrad", "sgd"):
        found[f"holdfast_{optimizer}"] = calm(lambda kind=optimizer: run_ranks(2, [*steps, "--optimizer", kind]))
        found[f"torchrec_{optimizer}"] = calm(lambda kind=optimizer: _torchrec(kind))
    return found


def _torchrec(optimizer: str) -> dict[str, Any]:
    command = [str(_PEERS), "-m", "peers.dmp", "--shape", "rm1", "--ranks", "2", "--optimizer", optimizer]
    command += ["--batches", "20"]
    done = subprocess.run(command, cwd=_FOLDER, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**said, "median_ms": said["median"]["step_ms"], "mean_ms": said["mean"]["step_ms"]}


if __name__ == "__main__":
    main()
