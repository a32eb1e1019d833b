"""``python -m larger.one``, from benchmarks/: one measurement in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from larger.systems import Settings, System
    from larger.workload import FileOfBatches, Workload

SYSTEMS = ("dram", "look_forward", "lru", "static", "mmap", "rocksdb")
MODES = ("steady", "die", "open")
_SETTLING_STEPS = 3
PACKAGES = Path(__file__).parents[2] / "build/larger"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m larger.one", description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--mode", choices=MODES, default="steady", help="die, open: of recovery")
    parser.add_argument("--workload", choices=["kaggle", "rm1", "rm3", "uniform", "wide"], required=True)
    parser.add_argument("--uniform-share", type=float, help="of the ids; default: the workload's")
    parser.add_argument("--quick", action="store_true", help="small tables")
    parser.add_argument("--directory", type=Path, required=True, help="of the pool or the files")
    parser.add_argument("--ids", type=Path, required=True, help="the batches, as write_ids wrote them")
    parser.add_argument("--scratchpad-bytes", type=int, required=True)
    parser.add_argument("--log-bytes", type=int, required=True)
    parser.add_argument("--log-directory", type=Path, help="of the row log; default: the pool's")
    parser.add_argument("--log-dial", help="a preset that its medium is made as slow as")
    parser.add_argument("--dial", help="likewise of the pool's medium")
    parser.add_argument("--victim-bytes", type=int, default=0, help="of a victim cache; 0: none")
    parser.add_argument("--victim-directory", type=Path, help="of it; default: the machine's memory")
    parser.add_argument("--victim-dial", help="a preset that it is made as slow as")
    parser.add_argument("--memory-limit", type=int, default=0, help="bytes of a memory control group; 0: none")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--capture-ahead", action="store_true")
    parser.add_argument("--new-tables", action="store_true", help="none of whose rows was ever written")
    parser.add_argument("--dense-interval", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--turns",
        action="store_true",
        help="when steady, print a line; then take as many steps as each line of the input says, and print a line",
    )
    parser.add_argument("--warmup", type=int, default=20, help="steps, at least")
    parser.add_argument("--max-warmup-s", type=float, default=300.0)
    parser.add_argument("--fill-bytes", type=int, default=0, help="to be fetched before anything is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="where rocksdict is installed")
    return parser.parse_args()


def _workload(arguments: argparse.Namespace) -> tuple[Workload, FileOfBatches, Settings]:
    from holdfast import LogMedium, VictimCache
    from holdfast_lab.placement.dial_probe import dial_of
    from larger.systems import Settings
    from larger.workload import FileOfBatches, make_workload

    workload = make_workload(arguments.workload, quick=arguments.quick, uniform_share=arguments.uniform_share)
    log_dial, dial, victim_dial = (
        None if given is None else dial_of(given)
        for given in (arguments.log_dial, arguments.dial, arguments.victim_dial)
    )
    victims = None
    if arguments.victim_bytes:
        victims = VictimCache(bytes=arguments.victim_bytes, directory=arguments.victim_directory, dial=victim_dial)
    settings = Settings(
        directory=arguments.directory,
        scratchpad_bytes=arguments.scratchpad_bytes,
        log_bytes=arguments.log_bytes,
        cache=arguments.system,
        window=arguments.window,
        dense_interval=arguments.dense_interval,
        capture_ahead=arguments.capture_ahead,
        new_tables=arguments.new_tables,
        log=LogMedium(directory=arguments.log_directory, dial=log_dial),
        victims=victims,
        dial=dial,
    )
    return workload, FileOfBatches(workload, arguments.ids), settings


def make_system(
    name: str, workload: Workload, source: FileOfBatches, settings: Settings, packages: Path = PACKAGES
) -> System:
    """One of SYSTEMS. packages: where rocksdict is installed."""
    from larger.outsiders import make_outsider
    from larger.systems import Holdfast

    if name in ("mmap", "rocksdb"):
        return make_outsider(name, workload, source, settings, packages)
    return Holdfast(workload, source, settings, in_memory=name == "dram")


def _measure(arguments: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    import torch

    from larger.measure import Measurement, Warmup, fill_log_and_die, time_opening, warm_up
    from larger.memory_limit import MemoryLimit
    from larger.systems import Holdfast, open_pool

    workload, source, settings = _workload(arguments)
    if arguments.mode == "open":
        torch.optim.SGD([torch.zeros(1)], lr=0.01)  # PyTorch imports its compiler here; imports do not count
        return time_opening(lambda: open_pool(workload, source, settings))
    # Joined before tables are made: what is left in memory of making them counts, and is the first to go.
    limit = MemoryLimit(arguments.memory_limit) if arguments.memory_limit else None
    try:
        system = make_system(arguments.system, workload, source, settings, arguments.packages)
        if arguments.mode == "die":
            assert isinstance(system, Holdfast), "an outsider has no log to fill"
            fill_log_and_die(system, arguments.log_bytes, say)
        warmup = Warmup(
            min_steps=arguments.warmup,
            max_seconds=arguments.max_warmup_s,
            fill_bytes=arguments.fill_bytes,
            log_bytes=arguments.log_bytes,
        )
        warm = warm_up(system, warmup, workload.row_bytes)
        measurement = Measurement(system)
        if arguments.turns:
            say(warm)
            for line in sys.stdin:
                say({"ms": measurement.turn(int(line), _SETTLING_STEPS)})
        else:
            measurement.turn(arguments.steps, 0)
        result = warm | measurement.result()
        system.close()
        return result | {"memory": limit.facts() if limit else None, "num_batches": source.num_batches}
    finally:
        if limit:
            limit.leave()


def _versions() -> dict[str, str]:
    import numpy as np
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def _print(result: dict[str, Any], arguments: argparse.Namespace, output: TextIO) -> None:
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    json.dump({"config": config, "versions": _versions()} | result, output)
    output.write("\n")
    output.flush()


def prepare_process(num_threads: int) -> None:
    """Before torch is imported: its threads, and the environment that it reads then."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    from holdfast.state.reproducibility import keep_freed_memory, prepare_environment

    prepare_environment()
    keep_freed_memory()
    import torch

    from holdfast import _core

    torch.set_num_threads(num_threads)
    _core.set_num_threads(num_threads)


def main() -> None:
    arguments = _arguments()
    prepare_process(arguments.threads)
    output = os.fdopen(os.dup(1), "w")  # the JSON alone goes out
    os.dup2(2, 1)
    _print(_measure(arguments, lambda result: _print(result, arguments, output)), arguments, output)


if __name__ == "__main__":
    main()
