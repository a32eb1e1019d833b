"""Many processes of the zoo, and which of their digests differ.

    python tests/numerics/zoo/zoo_runs.py --precision fp32 --threads 2 --squares 0 1
    python tests/numerics/zoo/zoo_runs.py --as-intel ...    # MKL takes the processor for one of Intel's, and what can
                                                            # go wrong in its first calls does (first_calls_shim.cpp)
    python tests/numerics/zoo/zoo_runs.py --report FILE ... # what the file says to be done is not done again, so that
                                                            # hours can be taken in parts

Every process is a fresh interpreter. Of 768, each of the 256 combinations of layer and optimizer runs in 48; each
optimizer is the first that a process sees in 48, each layer in 48 (zoo_script.py says how). That a process goes through
16 combinations instead of one makes this hours and not days: a combination that does not come first finds done what
those before it called, which are others in every process. Processes come in squares: 48 that have the same 16
combinations, each of them first in three. Digests are compared within a square, so squares of several machines may
stand in one report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

NUM_OPTIMIZERS = 16  # of zoo_script.py, which is not imported: the processes must be fresh, this one stays small
HERE = Path(__file__).parent
SCRIPT = HERE / "zoo_script.py"
SHIM = HERE.parent / "first_calls_shim.cpp"
PARTS = ("rows", "parameters", "optimizer", "random numbers")


@dataclass(frozen=True)
class Case:
    precision: str  # fp32, bf16, compile
    num_threads: int
    layer: str
    optimizer: str


@dataclass
class Findings:
    """Digests of each case, and the numbers of the processes that printed them."""

    digests: dict[Case, dict[tuple[str, ...], list[int]]] = field(default_factory=lambda: defaultdict(dict))
    num_processes: int = 0

    def differing(self) -> list[str]:
        """A sentence for each case that ended in more than one way, with two processes that show it."""
        return [_sentence(case, found) for case, found in self.digests.items() if len(found) > 1]

    def summary(self) -> str:
        runs = [sum(map(len, found.values())) for found in self.digests.values()]
        least = min(runs, default=0)
        return (
            f"{len(self.digests)} combinations, {self.num_processes} fresh processes, {sum(runs)} runs, "
            f"each combination in {least} to {max(runs, default=0)}; {len(self.differing())} combinations differ"
        )


def _sentence(case: Case, found: dict[tuple[str, ...], list[int]]) -> str:
    most, *others = sorted(found.items(), key=lambda item: -len(item[1]))
    odd, numbers = others[-1]
    parts = [part for part, one, other in zip(PARTS, most[0], odd, strict=True) if one != other]
    command = f"zoo_script.py {case.precision} {case.num_threads}"
    return (
        f"{case.layer} with {case.optimizer}, {case.precision}, {case.num_threads} threads: {', '.join(parts)} in "
        f"{sum(len(of) for _, of in others)} of {sum(map(len, found.values()))} processes; "
        f"compare {command} {most[1][0]} with {command} {numbers[0]}"
    )


def run_zoo(processes: Iterable[tuple[str, int, int]], *, at_once: int, shim: Path | None = None) -> Findings:
    """processes: precision, number of threads, and number of each."""
    findings = Findings()

    def run(process: tuple[str, int, int]) -> tuple[tuple[str, int, int], list[str]]:
        return process, _lines(*process, shim)

    with ThreadPoolExecutor(at_once) as pool:
        for (precision, num_threads, number), lines in pool.map(run, processes):
            for line in lines:
                layer, optimizer, found = json.loads(line)
                digests = findings.digests[Case(precision, num_threads, layer, optimizer)]
                digests.setdefault(tuple(found[part] for part in PARTS), []).append(number)
            findings.num_processes += 1
    return findings


def numbers(squares: Iterable[int], turns: int) -> list[int]:
    """Of processes: of each of the 16 sets of combinations, `turns` that have the same."""
    return [turn * NUM_OPTIMIZERS + (square + turn) % NUM_OPTIMIZERS for square in squares for turn in range(turns)]


def _lines(precision: str, num_threads: int, number: int, shim: Path | None) -> list[str]:
    variables = {**os.environ, "MKL_CBWR": "AUTO,STRICT"}
    # Compiled code is kept between processes; what differs between them is how it is run.
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "holdfast-zoo-compiled"))
    if shim is not None:
        variables |= {"LD_PRELOAD": str(shim), "FIRST_CALLS_AS_INTEL": "1", "FIRST_CALLS_SLOWLY": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning:__main__", str(SCRIPT), precision]
    process = subprocess.run(
        [*command, str(num_threads), str(number)], env=variables, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise RuntimeError(f"zoo_script.py {precision} {num_threads} {number}: {process.stderr}")
    return process.stdout.splitlines()


def build_shim(directory: Path) -> Path:
    """What stands before MKL's functions (first_calls_shim.cpp)."""
    library = directory / "first_calls_shim.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", str(library), str(SHIM), "-ldl"], check=True)
    return library


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="fresh processes of the zoo, and which of their digests differ")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "compile"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=48, help="fresh processes for each combination")
    parser.add_argument("--squares", type=int, nargs="+", default=range(16), help="of 16 combinations each, of 16")
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--as-intel", action="store_true")
    parser.add_argument("--report", type=Path, help="a line for each square; squares that have one are left out")
    given = parser.parse_args(arguments)
    done = given.report.read_text() if given.report is not None and given.report.exists() else ""
    differing: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        shim = build_shim(Path(directory)) if given.as_intel else None
        for precision, num_threads, square in itertools.product(given.precision, given.threads, given.squares):
            label = f"{precision}, {num_threads} threads{', as Intel' if shim else ''}, square {square}: "
            if label in done:
                continue
            processes = [(precision, num_threads, number) for number in numbers([square], given.turns)]
            findings = run_zoo(processes, at_once=given.at_once, shim=shim)
            differing += findings.differing()
            lines = "\n  ".join([label + findings.summary(), *findings.differing()])
            print(lines, flush=True)
            if given.report is not None:
                with given.report.open("a") as report:
                    report.write(lines + "\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
