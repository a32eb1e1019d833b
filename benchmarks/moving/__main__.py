"""``python -m moving``, from benchmarks/: how fast a log store's rows move about, beside what its disk reaches.

Makes a pool of tables whose rows came in random order, so that rows with neighbouring numbers lie scattered at home,
and times each command of the command line as a process of its own, with nothing of the files in the page cache where
that can be emptied (root). Beside them: a plain copy past the page cache, reading and writing at the same time, and
reading alone. A command's rate is that of the rows' bytes, whatever it reads and writes for them, over its seconds
without those in which Python starts and imports. ``beside`` is a snapshot beside a run: by how much the run's steps
slow, and the snapshot's share of the disk, its rate over a copy's.

    python -m moving --disk DIR                        # 8 million rows of 264 bytes in 8 tables, 1% of them changed
    python -m moving --disk DIR --tables 1             # in one table
    python -m moving --disk DIR --only snapshot,since  # the pool and its first snapshot are made, and these
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

_ROOT = Path(__file__).parents[2]
_PIECE_BYTES = 8 << 20
_ROWS_AT_ONCE = 100_000
_BATCH = 8000
VERBS = ("verify", "snapshot", "since", "restore", "restore_since", "export", "import", "digest", "beside")
_ALONE_SECONDS = 15.0

_CONFIG = """
[data.synthetic]
num_samples = 100_000_000
rows = {table_rows}
num_dense = 3

[embedding]
dim = 64
optimizer = "rowwise_adagrad"
lr = 0.05

[model]
bottom = [8, 64]
top = [8, 1]

[optimizer]
name = "sgd"
lr = 0.01

[pool]
medium = "block"
log_bytes = {log_bytes}
scratchpad_bytes = 268_435_456

[train]
batch_size = {batch}
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8_000_000, help="that are touched; tables have a quarter more")
    parser.add_argument("--tables", type=int, default=8, help="that have the rows, as many each")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the rows that changed since the snapshot")
    parser.add_argument("--log-bytes", type=int, default=256 << 20)
    parser.add_argument("--disk", type=Path, default=_ROOT / "runs", help="on the disk: DISK/moving is the pool's")
    parser.add_argument("--only", default=",".join(VERBS), help=f"of {', '.join(VERBS)}")
    parser.add_argument("--keep", action="store_true", help="the pool stays, and is used again")
    return parser.parse_args()


def _drop_page_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def _stream(path: Path, num_bytes: int, *, writing: bool) -> None:
    """All of a file, one piece at a time, past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY
    piece = mmap.mmap(-1, _PIECE_BYTES)
    fd = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        for offset in range(0, num_bytes, _PIECE_BYTES):
            if writing:
                os.pwritev(fd, [piece], offset)
            else:
                os.preadv(fd, [piece], offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _seconds(*work: Callable[[], None]) -> float:
    """Of all at the same time."""
    threads = [threading.Thread(target=one) for one in work]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def disk_rates(directory: Path, num_bytes: int = 2 << 30) -> dict[str, float]:
    """Bytes a second of reading alone, and of a copy: as many bytes read and written meanwhile."""
    source, copies = directory / "rate-source", [directory / f"rate-copy-{i}" for i in range(2)]
    half = num_bytes // 2
    try:
        _stream(source, num_bytes, writing=True)
        read_s = _seconds(*[lambda: _stream(source, num_bytes, writing=False)])
        copy_s = _seconds(
            lambda: _stream(source, num_bytes, writing=False),
            lambda: _stream(copies[0], half, writing=True),
            lambda: _stream(copies[1], half, writing=True),
        )
    finally:
        for path in (source, *copies):
            path.unlink(missing_ok=True)
    return {"read": num_bytes / read_s, "copy": num_bytes / copy_s}


def _command(*words: object) -> dict[str, Any]:
    """Runs holdfast with these words; its seconds, and what it asked of the disk."""
    _drop_page_cache()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "holdfast", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "read_mb": round((after.ru_inblock - before.ru_inblock) * 512 / 1e6),
        "written_mb": round((after.ru_oublock - before.ru_oublock) * 512 / 1e6),
        "peak_memory_mb": round(after.ru_maxrss / 1024),  # of the largest command so far
    }


class _Run:
    """A run that trains the pool until it is stopped. Context manager."""

    def __init__(self, config: Path, pool: Path, metrics: Path) -> None:
        self._metrics = metrics
        words = ["train", config, "--pool", pool, "--metrics", metrics, "--set", "train.steps=1000000"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._metrics.unlink(missing_ok=True)

    def steps(self) -> int:
        """Taken so far."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the run ended by itself, with status {self._process.returncode}")
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def rate(self, work: Callable[[], object]) -> float:
        """Steps a second while something is done."""
        steps, began = self.steps(), time.perf_counter()
        work()
        return (self.steps() - steps) / (time.perf_counter() - began)


def _beside(config: Path, pool: Path, snapshot: Path) -> dict[str, Any]:
    """A snapshot of a pool that a run trains."""
    with _Run(config, pool, pool.with_name("metrics.jsonl")) as run:
        while run.steps() < 20:
            time.sleep(0.5)
        time.sleep(_ALONE_SECONDS)  # its scratchpad warms
        before = run.rate(lambda: time.sleep(_ALONE_SECONDS))
        taken: dict[str, Any] = {}
        beside = run.rate(lambda: taken.update(_command("snapshot", pool, snapshot)))
        after = run.rate(lambda: time.sleep(_ALONE_SECONDS))
    alone = (before + after) / 2
    rates = {"steps_per_s": [round(each, 2) for each in (before, beside, after)]}
    return taken | rates | {"slows_by": round(1 - beside / alone, 2)}


def _make_pool(config: Path, pool: Path, num_rows: int, table_rows: list[int]) -> None:
    """num_rows: that are touched, of each table."""
    from holdfast.files.config import read_config
    from holdfast.run.assembly import assemble
    from holdfast.run.sections import RunConfig

    run = read_config(RunConfig, config)
    random = np.random.default_rng(1)
    with assemble(run, pool) as trainer:
        for number, end in enumerate(table_rows):
            order = random.permutation(end)[:num_rows].astype(np.uint64)
            for first in range(0, num_rows, _ROWS_AT_ONCE):
                rows = order[first : first + _ROWS_AT_ONCE]
                weights = random.random((len(rows), 64), np.float32)
                state = random.random(len(rows), np.float32)
                trainer.pool.core.import_rows(number, rows, weights.view(np.uint8).reshape(-1), state)
        trainer.recover()


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool to move, in a directory of its own, and where it is moved to."""

    directory: Path
    num_rows: int
    num_tables: int
    log_bytes: int

    @property
    def rows_of_each(self) -> int:
        return self.num_rows // self.num_tables

    @property
    def row_bytes(self) -> int:
        return self.rows_of_each * self.num_tables * (64 * 4 + 4)

    def at(self, name: str) -> Path:
        return self.directory / name

    def make(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        table_rows = [self.rows_of_each * 5 // 4] * self.num_tables
        self.at("run.toml").write_text(
            _CONFIG.format(table_rows=table_rows, log_bytes=self.log_bytes, batch=_BATCH // self.num_tables)
        )
        if not self.at("pool").exists():
            _make_pool(self.at("run.toml"), self.at("pool"), self.rows_of_each, table_rows)
            self.train(1)

    def train(self, steps: int) -> None:
        _command("train", self.at("run.toml"), "--pool", self.at("pool"), "--set", f"train.steps={steps}")

    def remove(self, *names: str) -> None:
        for name in names:
            path = self.at(name)
            with suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def moved(self, verbs: Sequence[str], changed: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each verb, and what its command took. changed: share of the rows, before `since`."""
        pool, full, since, restored, exported, imported = map(self.at, _MADE)
        self.remove(*_MADE[1:])
        words: dict[str, list[object]] = {
            "verify": ["verify", pool],
            "digest": ["digest", pool],
            "snapshot": ["snapshot", pool, full],
            "restore": ["restore", full, restored],
            "export": ["export", pool, exported],
            "import": ["import", exported, self.at("run.toml"), "--pool", imported],
            "since": ["snapshot", pool, since, "--since", full],
            "restore_since": ["restore", since, restored],
        }
        for verb in verbs:
            if verb == "since":
                self.train(1 + round(changed * self.num_rows * 5 // 4 / _BATCH))
            yield verb, _command(*words[verb])
            if verb in ("restore", "import"):
                self.remove(restored.name, imported.name, *([exported.name] if verb == "import" else []))
        self.remove(*_MADE[1:])


_MADE = ("pool", "full", "changed", "restored", "rows.safetensors", "imported")


def _measure(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    verbs = [verb for verb in VERBS if verb in given.only.split(",")]
    alone = [verb for verb in verbs if verb != "beside"]
    pool = _Pool(directory / "large", given.rows, given.tables, given.log_bytes)
    small = _Pool(directory / "small", 1000, given.tables, given.log_bytes)
    found: dict[str, Any] = {"row_mb": round(pool.row_bytes / 1e6), "page_cache_dropped": _drop_page_cache()}
    for each in (pool, small):
        each.make()
    found["starting_s"] = {verb: taken["seconds"] for verb, taken in small.moved(alone, given.changed)}
    found["disk_mb_per_s"] = {what: round(rate / 1e6) for what, rate in disk_rates(directory).items()}

    def rated(verb: str, taken: dict[str, Any], starting_s: float) -> dict[str, Any]:
        limit = "read" if verb in ("verify", "digest") else "copy"
        rate = pool.row_bytes / (taken["seconds"] - starting_s) / 1e6
        return taken | {"mb_per_s": round(rate), f"of_{limit}": round(rate / found["disk_mb_per_s"][limit], 2)}

    for verb, taken in pool.moved(alone, given.changed):
        found[verb] = taken if verb == "since" else rated(verb, taken, found["starting_s"][verb])
        print(verb, json.dumps(found[verb]), file=sys.stderr, flush=True)
    if "beside" in verbs:
        taken = _beside(pool.at("run.toml"), pool.at("pool"), pool.at("full"))
        found["beside"] = rated("beside", taken, found["starting_s"].get("snapshot", 0))
        pool.remove("full")
    return found


def main() -> None:
    given = _arguments()
    directory = given.disk / "moving"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        found = _measure(given, directory)
    finally:
        if not given.keep:
            shutil.rmtree(directory)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
