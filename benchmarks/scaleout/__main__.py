"""Several ranks on one machine: speed, cost of committing, bytes on the wire, restart; beside TorchRec.

    cd benchmarks && python -m scaleout [--quick] [--only speed,overlap,commit,wire,peers,restart]

Two cores: a rank is pinned to one. Writes report.md and results.json; exit status 1 where a bar is not met or a
measurement failed. The peers need .venv-peers (make bench makes it); counting bytes needs root (a network namespace).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report_page
from machine import describe, wait_until_idle
from scaleout.launch import RanksFailed, plain_command, pool_directory, ranks_command, run_ranks
from scaleout.report import write_report
from scaleout.restart import measure_restart
from scaleout.turns import in_turns

_FOLDER = Path(__file__).parents[1]
_PEERS = _FOLDER.parent / ".venv-peers" / "bin" / "python"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scaleout", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps; writes to runs/bench")
    parser.add_argument("--only", default="speed,overlap,commit,wire,peers,restart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine, each time")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    rounds = 1 if given.quick else given.rounds

    def calm(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        is_idle = wait_until_idle(given.patience)
        result = measure()
        shown = {
            name: part["median_ms"] for name, part in result.items() if isinstance(part, dict) and "median_ms" in part
        }
        print(shown or {name: result.get(name) for name in ("median_ms", "total")}, "idle" if is_idle else "busy")
        return {**result, "was_idle": is_idle}

    sections: dict[str, Callable[[], Any]] = {
        "speed": lambda: [_speed(given.quick, calm) for _ in range(rounds)],
        "overlap": lambda: [_overlap(given.quick, calm) for _ in range(rounds)],
        "commit": lambda: [_commit(given.quick, calm) for _ in range(rounds)],
        "wire": lambda: _wire(calm),
        "peers": lambda: [_peers(given.quick, calm) for _ in range(rounds)],
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
    folder = _FOLDER / "reports/scaleout" if is_whole else _FOLDER.parent / "runs" / "bench" / "scaleout"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    met = write_report(folder, results)
    print(f"wrote {report_page.page_of(folder)}")
    sys.exit(0 if met and not results["failures"] else 1)


def _speed(quick: bool, calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """In turns: one process on one core; a group of one, of two (a core each), of four (two on each core)."""
    options = ["--steps", "150" if quick else "500", "--warmup", "50", "--batches", "20", "--fill"]
    with ExitStack() as stack:
        commands: dict[str, tuple[list[str], Path | None]] = {
            "plain": plain_command(options, stack.enter_context(pool_directory("memory")))
        }
        for count in (1, 2, 4):
            directory = stack.enter_context(pool_directory("memory"))
            commands[f"ranks_{count}"] = ranks_command(count, options, directory)
        return calm(lambda: in_turns(commands, _FOLDER))


def _overlap(quick: bool, calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """In turns, one trainer and one memory rank, a core each: one batch at a time, and the next one's rows captured
    while this one trains; also without what trainers do for memory ranks."""
    options = ["--memory-ranks", "1", "--steps", "150" if quick else "400", "--warmup", "50", "--batches", "20"]
    ways = {"one": [], "two": ["--capture-ahead"], "one, sorted by the memory rank": ["--plain-ids"]}
    halves = {f"{name}, bf16": [*ways[name], "--dtype", "bf16"] for name in ("one", "two")}
    found: dict[str, Any] = {}
    for several in (ways, halves):  # apart: who is stopped for as long as all of them start would be given up
        with ExitStack() as stack:
            commands: dict[str, tuple[list[str], Path | None]] = {}
            for name, way in several.items():
                directory = stack.enter_context(pool_directory("memory"))
                commands[name] = ranks_command(2, [*options, "--fill", *way], directory)
            found |= calm(lambda commands=commands: in_turns(commands, _FOLDER))
    return found


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
    few = ["--steps", "20", "--warmup", "0", "--batches", "10", "--gloo"]
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


def _peers(quick: bool, calm: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """In turns: two ranks, a core each, and TorchRec's DistributedModelParallel on the same; with either optimizer."""
    ours = ["--steps", "150" if quick else "500", "--warmup", "50", "--batches", "20", "--fill"]
    found: dict[str, Any] = {}
    for optimizer in ("rowwise_adagrad", "sgd"):
        theirs = ["--shape", "rm1", "--ranks", "2", "--optimizer", optimizer, "--batches", "20", "--warmup", "20"]
        theirs += ["--steps", "60" if quick else "150" if optimizer == "rowwise_adagrad" else "400"]
        with pool_directory("memory") as directory:
            both = calm(
                lambda directory=directory, optimizer=optimizer, theirs=theirs: in_turns(
                    {
                        "holdfast": ranks_command(2, [*ours, "--optimizer", optimizer], directory),
                        "torchrec": ([str(_PEERS), "-m", "peers.dmp", *theirs], None),
                    },
                    _FOLDER,
                )
            )
        found[f"holdfast_{optimizer}"] = both["holdfast"]
        torchrec = both["torchrec"]
        found[f"torchrec_{optimizer}"] = {**torchrec, "median_ms": torchrec["median"]["step_ms"]}
    return found


if __name__ == "__main__":
    main()
