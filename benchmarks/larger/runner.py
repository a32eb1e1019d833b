"""Runs measurements, each once, in a process of its own, with everything they need before and after."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from larger.limits import Disk, Mix
from larger.turns import FAILURES, Child, Turns, error_result
from larger.workload import FileOfBatches, Workload, make_workload, write_ids

_BENCHMARKS = Path(__file__).parents[1]
_ROUNDS = 10
THREADS = 2
_ALLOWANCE_BYTES = {"kaggle": 704 << 20, "rm1": 960 << 20, "rm3": 1024 << 20}
_ADDRESS_BYTES = 6  # of a row, at most: docs/RESULTS.md has what it takes
SECTIONS = ("limits", "roofline", "caches", "new_tables", "outsiders", "commit", "amplification", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and where. limits_memory: whether what is not all in DRAM runs within a
    limit (see memory_limit_of). threads: that train."""

    quick: bool
    sections: tuple[str, ...]
    workloads: tuple[str, ...]
    disk: Path
    memory: Path
    limits_memory: bool
    threads: int = THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of a system. num_batches: distinct ones; steps, warmup: at least (see turns.py); fill: whether
    its memory has to be full first; scratchpad_bytes: None for a tenth of the tables. window, capture_ahead: as in
    TrainConfig. new_tables: see systems.Settings. log_in_memory: the row log lies in the directory on memory.
    victim_bytes: of a victim cache there. log_dial, victim_dial, dial: presets that their media, and the pool's, are
    made as slow as."""

    system: str
    workload: Workload
    num_batches: int
    steps: int
    warmup: int
    log_bytes: int
    max_warmup_s: float
    fill: bool = True
    scratchpad_bytes: int | None = None
    window: int = 8
    capture_ahead: bool = False
    new_tables: bool = False
    log_in_memory: bool = False
    log_dial: str | None = None
    victim_bytes: int = 0
    victim_dial: str | None = None
    dial: str | None = None


class Runner:
    """Keeps what was measured by key, so that sections may ask for the same measurement."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.results: dict[str, dict[str, Any]] = {}
        self._busy: list[dict[str, Any]] = []
        self._commands: dict[str, list[str]] = {}
        self._ids: dict[tuple[Workload, int], Path] = {}
        self._begin = time.monotonic()
        self._root = Path()
        self._memory_root = Path()

    def run(self) -> None:
        """All sections."""
        from larger import sections

        with self.directories():
            for name in SECTIONS:
                if name in self.options.sections:
                    getattr(sections, name)(self)

    @contextmanager
    def directories(self) -> Iterator[tuple[Path, Path]]:
        """On the disk and on memory: what is measured within lies there, and nothing of it stays."""
        self.options.disk.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-larger-", dir=self.options.disk) as root,
            tempfile.TemporaryDirectory(prefix="holdfast-larger-", dir=self.options.memory) as memory_root,
        ):
            self._root, self._memory_root = Path(root), Path(memory_root)
            yield self._root, self._memory_root

    def record(self) -> dict[str, Any]:
        """What was measured so far, and on what."""
        return {
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.options).items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "minutes": (time.monotonic() - self._begin) / 60,
            "machine": machine.describe(self.options.memory, self.options.disk),
            "busy": self._busy,
            "commands": self._commands,
            "results": self.results,
        }

    def disk(self, file_bytes: int) -> Disk:
        """For its limits, measured on a file of that size."""
        return Disk(self._root, file_bytes=file_bytes, seconds=1.0 if self.options.quick else 10.0)

    def once(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of ``key``; measured when it is first asked for. An error is a result: {"error": what it said}."""
        if key not in self.results:
            others = machine.others_busy()
            started = time.monotonic()
            try:
                result = measure()
            except FAILURES as error:
                result = error_result(error)
            self._keep(key, result, others, started)
        return self.results[key]

    def _keep(self, key: str, result: dict[str, Any], others: dict[str, Any], started: float) -> None:
        self.results[key] = result
        self._busy.append({"key": key, **others})
        now, failed = time.monotonic(), result.get("error", "").strip().splitlines()
        self._say(
            f"{key} ({now - started:.1f} s; others used {others['cpus']:.2f} CPUs before)"
            f"{f' FAILED: {failed[-1]}' if failed else ''}"
        )

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._begin:5.0f} s] {what}", file=sys.stderr, flush=True)

    def measure(self, key: str, run: Run) -> dict[str, Any]:
        """A window of steps in steady state; see measure.py."""
        self.side_by_side({key: run})
        return self.results[key]

    def measure_again(self, key: str, run: Run) -> dict[str, Any]:
        """As `measure`, also where there is a result already."""
        self.results.pop(key, None)
        return self.measure(key, run)

    def side_by_side(self, runs: dict[str, Run]) -> None:
        """The same of several, in turns; see turns.py. What was measured before is not measured again."""
        missing = {key: run for key, run in runs.items() if key not in self.results}
        if not missing:
            return
        others, started = machine.others_busy(), time.monotonic()
        directories = {key: self._directory(run) for key, run in missing.items()}
        try:
            found = Turns({key: run.steps for key, run in missing.items()}, self._say).take(
                lambda key: self._start(key, missing[key], directories[key], "--turns"),
                _ROUNDS if len(missing) > 1 else 1,
            )
        finally:
            for directory in directories.values():
                shutil.rmtree(directory)
        for key, result in found.items():
            self._keep(key, result, others, started)

    def mixed(self, key: str, mix: Mix, file_bytes: int) -> dict[str, Any]:
        """What the disk reaches at that mix."""
        return self.once(key, lambda: self.disk(file_bytes).mixed(mix))

    def crash(self, run: Run) -> None:
        """Results ``recovery/die`` and ``recovery/open``: a run that kills itself with its log full, and opening it."""
        directory = self._directory(run)

        def result_of(mode: str, expected_status: int) -> None:
            key = f"recovery/{mode}"
            self.once(
                key, lambda: self._start(key, run, directory, "--mode", mode).finish(expected_status=expected_status)
            )

        result_of("die", -signal.SIGKILL)
        if "error" not in self.results["recovery/die"]:
            result_of("open", 0)
        shutil.rmtree(directory)

    def source(self, workload: Workload, num_batches: int) -> FileOfBatches:
        """Its batches, drawn when they are first asked for."""
        path = self._ids.get((workload, num_batches))
        if path is None:
            path = self._memory_root / f"ids-{len(self._ids)}"
            write_ids(workload, path, num_batches)
            self._ids[workload, num_batches] = path
        return FileOfBatches(workload, path)

    def drop_ids(self) -> None:
        """Gives back the memory that drawn batches take."""
        for path in self._ids.values():
            path.unlink()
        self._ids.clear()

    def _start(self, key: str, run: Run, directory: Path, *more: str) -> Child:
        self.source(run.workload, run.num_batches)
        self._commands[key] = [*self._command(run, directory), *more]
        return Child(self._commands[key], _BENCHMARKS)

    def _directory(self, run: Run) -> Path:
        return Path(tempfile.mkdtemp(dir=self._memory_root if run.system == "dram" else self._root))

    def _command(self, run: Run, directory: Path) -> list[str]:
        workload = run.workload
        scratchpad_bytes = run.scratchpad_bytes or scratchpad_of(workload)
        limit = memory_limit_of(workload) if self.options.limits_memory else 0
        # Outsiders have more than the scratchpad to fill: all that they may use.
        fill_bytes = 2 * memory_limit_of(workload) if run.system in ("mmap", "rocksdb") else scratchpad_bytes
        return [
            sys.executable, "-m", "larger.one", "--system", run.system, "--workload", workload.name,
            *(("--quick",) if self.options.quick else ()), "--uniform-share", str(workload.uniform_share),
            "--directory", str(directory), "--ids", str(self._ids[workload, run.num_batches]),
            "--scratchpad-bytes", str(scratchpad_bytes), "--log-bytes", str(run.log_bytes),
            "--memory-limit", str(0 if run.system == "dram" else limit), "--steps", str(run.steps),
            "--warmup", str(run.warmup), "--max-warmup-s", str(run.max_warmup_s),
            "--fill-bytes", str(fill_bytes if run.fill and run.system != "dram" else 0), "--window", str(run.window),
            "--threads", str(self.options.threads),
            *(("--capture-ahead",) if run.capture_ahead else ()), *(("--new-tables",) if run.new_tables else ()),
            *(("--log-directory", str(self._memory_root)) if run.log_in_memory else ()),
            *(("--victim-bytes", str(run.victim_bytes), "--victim-directory", str(self._memory_root))
              if run.victim_bytes else ()),
            *(("--victim-dial", run.victim_dial) if run.victim_dial else ()),
            *(("--log-dial", run.log_dial) if run.log_dial else ()), *(("--dial", run.dial) if run.dial else ()),
        ]  # fmt: skip


def scratchpad_of(workload: Workload) -> int:
    """Bytes: a tenth of the tables."""
    return workload.table_bytes // 10


def memory_limit_of(workload: Workload) -> int:
    """Bytes: the scratchpad, where each row lies at home, and what network, batches and loader take beside it, with
    room for a store's own indexes and merges. Mapped files take 183, 432, 688 MiB of the latter; what they leave of it
    serves them as page cache."""
    return scratchpad_of(workload) + workload.num_rows * _ADDRESS_BYTES + _ALLOWANCE_BYTES[workload.shape.name]


def workload_of(runner: Runner, name: str, *, uniform_share: float | None = None) -> Workload:
    return make_workload(name, quick=runner.options.quick, uniform_share=uniform_share)
