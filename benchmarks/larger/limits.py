"""What this disk reaches, whoever asks: by ``fio`` where it is installed, else by holdfast's own probe.

All with O_DIRECT on one file that was written in full first: a hole costs the disk nothing to read.

A mix of I/O is not drawn by percentages, of which fio knows whole ones only: a merge's requests are a few in ten
thousand, and most of the bytes. Each kind is a job of its own that makes as many requests as were made of it, all at
once, and the mix takes as long as the last of them.
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
_MERGE_DEPTHS = (2, 4, 16)  # how much of the disk merging takes from fetching at a time: what is best, differs
_SECTOR_BYTES, _PAGE_BYTES, _PIECE_BYTES = 512, 4096, 1 << 20
_FILE = "fio-file"
_DEEP: dict[str, object] = {"iodepth": _QUEUE_DEPTH, "numjobs": _NUM_JOBS}
_RANDOM: dict[str, object] = {"randrepeat": 1, "norandommap": 1, "random_generator": "tausworthe64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """I/O requests of one kind. kind: ``read`` or ``write``; num_bytes: of one, the mean."""

    kind: str
    num_bytes: float
    count: float

    @property
    def whole_sectors(self) -> int:
        """Bytes of one as a disk takes it."""
        return max(1, round(self.num_bytes / _SECTOR_BYTES)) * _SECTOR_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """I/O requests as a system made them in so many seconds: ``fetches``, and what merging makes beside them."""

    seconds: float
    fetches: Requests
    merging: tuple[Requests, ...]


class Disk:
    """Measures in ``directory``. file_bytes: of the file that is read, about as large as the tables' home."""

    def __init__(self, directory: Path, *, file_bytes: int, seconds: float) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._seconds = seconds
        self.has_fio = shutil.which("fio") is not None

    def limits(self) -> dict[str, Any]:
        """reads_512_per_s, reads_4096_per_s, write_bytes_per_s, fdatasync_s (median), and ``by``: what measured it; by
        fio also read_cpu_s, see `_read_cpu_s`."""
        if not self.has_fio:
            return self._probe()
        write_bytes_per_s = self._fill()
        (sync,) = self._fio({"sync": {"rw": "write", "bs": _PAGE_BYTES, "fdatasync": 1, "ioengine": "psync",
                                      "iodepth": 1, "time_based": 1, "runtime": self._seconds}})  # fmt: skip
        try:
            return {
                "by": f"fio {_fio_version()}, io_uring, direct, {_NUM_JOBS} jobs of queue depth {_QUEUE_DEPTH}",
                "file_bytes": self._file_bytes,
                "reads_512_per_s": self._random_reads_per_s(_SECTOR_BYTES),
                "reads_4096_per_s": self._random_reads_per_s(_PAGE_BYTES),
                "read_cpu_s": self._read_cpu_s(),
                "write_bytes_per_s": write_bytes_per_s,
                "fdatasync_s": sync["sync"]["lat_ns"]["percentile"]["50.000000"] * 1e-9,
            }
        finally:
            self._file.unlink(missing_ok=True)

    def mixed(self, mix: Mix) -> dict[str, Any]:
        """Requests per second, reads and writes together, of that mix: ``per_s``, the most of a few attempts, which
        ``by_depth`` has by the depth of merging's queues; ``by``, ``mix``."""
        if not self.has_fio:
            found = self._probe()
            slowest = min(found["reads_512_per_s"], found["reads_4096_per_s"])
            return {"per_s": slowest, "by": f"{found['by']}; random reads, the writes not told apart", "mix": {}}
        self._fill()
        try:
            by_depth = {str(depth): self._mixed_per_s(mix, depth) for depth in _MERGE_DEPTHS}
            by = f"fio {_fio_version()}"
            return {"per_s": max(by_depth.values()), "by_depth": by_depth, "by": by, "mix": asdict(mix)}
        finally:
            self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self._directory / _FILE

    def _fill(self) -> float:
        """Writes the whole file; bytes per second until all is durable."""
        (job,) = self._fio({"write": {"rw": "write", "bs": _PIECE_BYTES, "iodepth": 8, "end_fsync": 1}})
        return float(job["write"]["io_bytes"] / (job["job_runtime"] * 1e-3))

    def _random_reads_per_s(self, num_bytes: int) -> float:
        options = {"rw": "randread", "bs": num_bytes, "group_reporting": 1, "time_based": 1, "runtime": self._seconds}
        (job,) = self._fio({"reads": options | _DEEP | _RANDOM})
        return float(job["read"]["iops"])

    def _read_cpu_s(self) -> float:
        """CPU seconds that a random read of a sector takes the thread that asks, the kernel's part in it included: many
        at a time, as a fetch asks, with the machine for itself. What interrupts and the kernel's workers take is not in
        it."""
        half = _QUEUE_DEPTH // 2
        options = {"rw": "randread", "bs": _SECTOR_BYTES, "time_based": 1, "runtime": self._seconds,
                   "iodepth": _QUEUE_DEPTH, "iodepth_batch": half, "iodepth_batch_complete_min": half}  # fmt: skip
        (job,) = self._fio({"reads": options | _RANDOM})
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return float(share / job["read"]["iops"])

    def _mixed_per_s(self, mix: Mix, merge_depth: int) -> float:
        """As many requests of each kind as the mix had in some seconds, over the time until all of them are done."""
        share = min(1.0, self._seconds / mix.seconds)

        def job_of(requests: Requests, num_jobs: int) -> dict[str, object]:
            num_bytes = requests.whole_sectors
            of_a_job = max(1, round(share * requests.count / num_jobs))
            return {"rw": f"rand{requests.kind}", "bs": num_bytes, "io_size": num_bytes * of_a_job} | _RANDOM

        jobs = {"fetches": job_of(mix.fetches, _NUM_JOBS) | _DEEP}
        for number, requests in enumerate(mix.merging):
            jobs[f"merging-{number}"] = job_of(requests, 1) | {"iodepth": merge_depth}
        done = self._fio(jobs)
        num_requests = sum(job[kind]["total_ios"] for job in done for kind in ("read", "write"))
        return float(num_requests / max(job["job_runtime"] for job in done) * 1e3)

    def _fio(self, jobs: dict[str, dict[str, object]]) -> list[dict[str, Any]]:
        """Runs the jobs side by side. Returns them as fio's JSON gives them."""
        command = ["fio", "--output-format=json", "--thread"]
        for name, options in jobs.items():
            every = {"filename": self._file, "size": self._file_bytes, "direct": 1, "ioengine": "io_uring"}
            command += [f"--name={name}", *(f"--{key}={value}" for key, value in (every | options).items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"fio: {done.stderr.strip()[-500:]}")
        # warnings may come before the object
        found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        return found

    def _probe(self) -> dict[str, Any]:
        from holdfast_lab.placement.probe import probe

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


def _fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()[4:]
