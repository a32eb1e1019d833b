"""What this disk reaches, whoever asks: by ``fio`` where it is installed, else by holdfast's own probe.

All with O_DIRECT on one file that was written in full first: a hole costs the disk nothing to read.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_QUEUE_DEPTH = 128
_NUM_JOBS = 2
_SECTOR_BYTES, _PAGE_BYTES, _PIECE_BYTES = 512, 4096, 1 << 20
_FILE = "fio-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """I/O requests as a system made them. Each list: (bytes of a request, how many)."""

    reads: tuple[tuple[int, float], ...]
    writes: tuple[tuple[int, float], ...]

    @property
    def read_percent(self) -> int:
        reads, writes = (sum(count for _, count in kind) for kind in (self.reads, self.writes))
        return round(100 * reads / (reads + writes)) if reads + writes else 100


class Disk:
    """Measures in ``directory``. file_bytes: of the file that is read, about as large as the tables' home."""

    def __init__(self, directory: Path, *, file_bytes: int, seconds: float) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._seconds = seconds
        self.has_fio = shutil.which("fio") is not None

    def limits(self) -> dict[str, Any]:
        """reads_512_per_s, reads_4096_per_s, write_bytes_per_s, fdatasync_s (median), and ``by``: what measured it."""
        if not self.has_fio:
            return self._probe()
        write_bytes_per_s = self._fill()
        sync = self._fio("write", bs=_PAGE_BYTES, fdatasync=1, ioengine="psync", iodepth=1)
        try:
            return {
                "by": f"fio {_fio_version()}, io_uring, direct, {_NUM_JOBS} jobs of queue depth {_QUEUE_DEPTH}",
                "file_bytes": self._file_bytes,
                "reads_512_per_s": self._random(Mix(reads=((_SECTOR_BYTES, 1),), writes=())),
                "reads_4096_per_s": self._random(Mix(reads=((_PAGE_BYTES, 1),), writes=())),
                "write_bytes_per_s": write_bytes_per_s,
                "fdatasync_s": sync["sync"]["lat_ns"]["percentile"]["50.000000"] * 1e-9,
            }
        finally:
            self._file.unlink(missing_ok=True)

    def mixed(self, mix: Mix) -> dict[str, Any]:
        """Requests per second, reads and writes together, of that mix: ``per_s``, ``by``, ``mix``."""
        if not self.has_fio:
            found = self._probe()
            slowest = min(found["reads_512_per_s"], found["reads_4096_per_s"])
            return {"per_s": slowest, "by": f"{found['by']}; random reads, the writes not told apart", "mix": {}}
        self._fill()
        try:
            return {"per_s": self._random(mix), "by": f"fio {_fio_version()}", "mix": asdict(mix)}
        finally:
            self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self._directory / _FILE

    def _fill(self) -> float:
        """Writes the whole file; bytes per second until all is durable."""
        job = self._fio("write", bs=_PIECE_BYTES, iodepth=8, end_fsync=1, timed=False)
        return float(job["write"]["io_bytes"] / (job["job_runtime"] * 1e-3))

    def _random(self, mix: Mix) -> float:
        """Requests per second."""
        kind = "randrw" if mix.reads and mix.writes else "randread" if mix.reads else "randwrite"
        split = f"{_split(mix.reads)},{_split(mix.writes)}"
        # each kind lies at multiples of its smallest size: home is written by whole pages
        smallest = [min((size for size, _ in some), default=_PAGE_BYTES) for some in (mix.reads, mix.writes)]
        align = ",".join(str(max(1, round(size / _SECTOR_BYTES)) * _SECTOR_BYTES) for size in smallest)
        options: dict[str, Any] = {"bssplit": split, "blockalign": align, "iodepth": _QUEUE_DEPTH}
        if kind == "randrw":
            options["rwmixread"] = mix.read_percent
        job = self._fio(kind, numjobs=_NUM_JOBS, group_reporting=1, norandommap=1, random_generator="tausworthe64",
                        **options)  # fmt: skip
        return float(job["read"]["iops"] + job["write"]["iops"])

    def _fio(self, kind: str, *, timed: bool = True, ioengine: str = "io_uring", **options: object) -> dict[str, Any]:
        """The one job of a run of fio, as its JSON gives it."""
        command = [
            "fio", "--name=job", f"--filename={self._file}", f"--size={self._file_bytes}", f"--rw={kind}", "--direct=1",
            f"--ioengine={ioengine}", "--output-format=json", "--randrepeat=1", "--thread",
            *(f"--{name}={value}" for name, value in options.items()),
            *(("--time_based", f"--runtime={self._seconds}") if timed else ()),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"fio: {done.stderr.strip()[-500:]}")
        # warnings may come before the object
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job

    def _probe(self) -> dict[str, Any]:
        from holdfast.placement.probe import probe

        found = probe(self._directory, on_step=lambda *_: None, file_bytes=self._file_bytes)
        tier = found.tiers[-1]
        pages = next((note for note in found.notes if "random reads/s" in note), "")
        return {
            "by": f"holdfast's probe (there is no fio here): {pages}",
            "file_bytes": self._file_bytes,
            "reads_512_per_s": tier.random_reads_per_s,
            "reads_4096_per_s": tier.random_reads_per_s,
            "write_bytes_per_s": tier.write_bandwidth_bytes_per_s,
            "fdatasync_s": tier.sync_latency_ns * 1e-9,
        }


def _split(requests: tuple[tuple[int, float], ...]) -> str:
    """fio's bssplit: bytes/percent, colon-separated, percents that sum to 100. Sizes are rounded to whole sectors."""
    sizes: dict[int, float] = {}
    for num_bytes, count in requests:
        size = max(1, round(num_bytes / _SECTOR_BYTES)) * _SECTOR_BYTES
        sizes[size] = sizes.get(size, 0.0) + count
    total = sum(sizes.values())
    percents = {size: round(100 * count / total) for size, count in sizes.items() if total}
    percents = {size: percent for size, percent in percents.items() if percent}
    if not percents:
        return f"{_PAGE_BYTES}/100"
    most = max(percents, key=lambda size: percents[size])
    percents[most] += 100 - sum(percents.values())
    return ":".join(f"{size}/{percent}" for size, percent in sorted(percents.items()))


def _fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()[4:]
