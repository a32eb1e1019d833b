"""Measures what the tiers of this machine do: its DRAM, and the medium under a directory; and what rows of a pool there
cost its CPU (`row_probe.py`). Half a minute in all.

- Memory: copies with all threads of torch (the rate counts a copied byte twice, as read and as written, so that it
  serves for both bandwidths of a tier), random gathers of 64-byte rows, and the latency of reads that each wait for
  the one before (a chain through memory, less the same chain within the cache).
- Block medium: writes past the page cache (O_DIRECT) in large pieces, closed by one fdatasync; random reads of one
  sector and of 4 KiB from many threads; sequential reads; and small writes with fdatasync, one by one. The threads are
  Python's: a drive that is faster than they can ask is understated. What is read was just written, and a drive or the
  host of a virtual machine may have it in a cache: then reads are overstated.
- The file that is written has no name (O_TMPFILE, or unlinked at once), so nothing stays behind, however this ends. It
  takes at most 1 GiB and at most a quarter of the free space, and is allocated before it is written. Pools take as much
  after it; where there is not so much room, costs are not measured.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.pools.machine import available_bytes
from holdfast.train.observe import Advance
from holdfast_lab.placement import row_probe
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.tiers import Tier

NUM_STEPS = 8 + row_probe.NUM_STEPS
"""How often the progress of `probe` is told 1."""
NUM_LOG_STEPS = 4

_MAX_FILE_BYTES = 1 << 30
_MIN_FILE_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
_PAGE_BYTES = 4096
_SECTOR_BYTES = 512
_LINE_BYTES = 64
_CHAIN_STEP = 6_364_136_223_846_793_005  # Knuth's; odd, and 1 modulo 4: a chain through every slot
_MEMORY_BYTES = 256 << 20
_NUM_READERS = 64
_NUM_STREAMS = 4
_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """The tiers, fastest first, what a reader of the numbers should know, and what rows cost the CPU (None: there was
    no room for pools)."""

    tiers: tuple[Tier, ...]
    notes: tuple[str, ...]
    host: Host | None


def probe(directory: Path, *, on_step: Advance, file_bytes: int = _MAX_FILE_BYTES) -> Probe:
    """Measures DRAM and the medium of `directory`. file_bytes: to be written there at a time, at most; below
    row_probe.POOL_BYTES costs are not measured.

    Raises ConfigError where there is no such directory or no room in it, and OSError as the medium gives it.
    """
    free_bytes, size = _room_in(directory, file_bytes)
    free_memory = available_bytes()
    buffer_bytes = max(_MIN_FILE_BYTES, min(_MEMORY_BYTES, free_memory // 8))
    dram = _measure_memory(torch.empty(buffer_bytes, dtype=torch.uint8), "dram", "dram", free_memory, on_step=on_step)
    notes = ["Measured by `holdfast tiers probe`. Prices and endurance cannot be measured: add them."]
    medium, note = _measure_medium(directory, size, buffer_bytes, free_bytes, on_step)
    notes.append(note)
    host = None
    if min(file_bytes, free_bytes // 4) >= row_probe.POOL_BYTES:
        host = row_probe.probe_rows(directory, "log" if medium.kind == "block" else "in_place", on_step=on_step)
    else:
        notes.append(
            f"No [host], so no step is predicted: for that the probe writes {row_probe.POOL_BYTES:,} bytes, at most a "
            "quarter of what is free."
        )
        on_step(row_probe.NUM_STEPS)
    return Probe((dram, medium), tuple(notes), host)


def _measure_medium(
    directory: Path, size: int, buffer_bytes: int, free_bytes: int, on_step: Advance
) -> tuple[Tier, str]:
    """A file of `size` bytes there, or of `buffer_bytes` where it is memory; four steps. And what to know of it."""
    file_system = _file_system(directory)
    with _nameless_file(directory) as file:
        os.posix_fallocate(file, 0, _MIN_FILE_BYTES)
        if file_system not in ("tmpfs", "ramfs", "devtmpfs") and _set_direct(file):
            os.posix_fallocate(file, 0, size)
            return _measure_block(file, size, file_system, free_bytes, on_step)
        size = min(size, buffer_bytes)
        os.posix_fallocate(file, 0, size)
        with mmap.mmap(file, size) as mapping:
            view = torch.frombuffer(mapping, dtype=torch.uint8)
            medium = _measure_memory(view, file_system, "byte", free_bytes, on_step=on_step)
            del view  # the mapping cannot be closed while it is looked at
    note = (
        f"{file_system} reads past no page cache (no O_DIRECT), so it is measured as byte-addressable memory. "
        "Where it lies in DRAM, both share the same bytes: lower one capacity."
    )
    return medium, note


def probe_log_tier(directory: Path, *, on_step: Advance) -> Probe:
    """The medium of a directory that is to have row logs alone, NUM_LOG_STEPS steps. Raises what `probe` raises."""
    free_bytes, size = _room_in(directory, _MAX_FILE_BYTES)
    medium, note = _measure_medium(directory, size, _MEMORY_BYTES, free_bytes, on_step)
    return Probe((replace(medium, name=f"log-{medium.name}", directory=directory.absolute()),), (note,), None)


def _room_in(directory: Path, file_bytes: int) -> tuple[int, int]:
    """What is free, and what of it a probe takes. Raises ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory")
    free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    size = min(file_bytes, free_bytes // 4) // _PIECE_BYTES * _PIECE_BYTES
    if size < _MIN_FILE_BYTES:
        raise ConfigError(
            f"{directory}: {free_bytes:,} bytes are free, and a probe takes a quarter of them: at least "
            f"{4 * _MIN_FILE_BYTES:,} are needed"
        )
    return free_bytes, size


def _measure_memory(
    buffer: torch.Tensor, name: str, kind: Literal["dram", "byte"], capacity_bytes: int, *, on_step: Advance
) -> Tier:
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    buffer.fill_(1)
    on_step(1)
    copies_per_s = _rate(lambda: target.copy_(source))
    on_step(1)
    num_rows = half // _LINE_BYTES
    rows = source[: num_rows * _LINE_BYTES].view(torch.float32).view(num_rows, _LINE_BYTES // 4)
    order = torch.from_numpy(np.random.default_rng(0).integers(0, num_rows, 1 << 18))
    gathered = torch.empty(len(order), _LINE_BYTES // 4)
    gathers_per_s = _rate(lambda: torch.index_select(rows, 0, order, out=gathered))
    on_step(1)
    latency_ns = max(1.0, _chain_ns(buffer) - _chain_ns(torch.empty(1 << 14, dtype=torch.uint8)))
    on_step(1)
    bandwidth = float(round(2 * half * copies_per_s))
    return Tier(
        name=name,
        kind=kind,
        capacity_bytes=capacity_bytes,
        read_bandwidth_bytes_per_s=bandwidth,
        write_bandwidth_bytes_per_s=bandwidth,
        read_latency_ns=round(latency_ns, 1),
        access_granularity_bytes=_LINE_BYTES,
        random_reads_per_s=float(round(gathers_per_s * len(order))),
    )


def _chain_ns(buffer: torch.Tensor) -> float:
    """Nanoseconds from one slot of a chain through the buffer to the next."""
    num_slots = 1 << ((buffer.numel() // 8).bit_length() - 1)
    slots = buffer[: 8 * num_slots].numpy().view(np.int64)
    numbers = np.arange(num_slots, dtype=np.uint64)
    numbers *= np.uint64(_CHAIN_STEP)
    numbers += np.uint64(1)
    numbers &= np.uint64(num_slots - 1)
    slots[:] = numbers.view(np.int64)
    chain = slots.data
    place, num_hops = 0, 400_000
    begin = time.perf_counter_ns()
    for _ in range(num_hops):
        place = chain[place]
    return (time.perf_counter_ns() - begin) / num_hops


def _measure_block(file: int, size: int, name: str, capacity_bytes: int, on_step: Advance) -> tuple[Tier, str]:
    write_bandwidth, size = _write_bandwidth(file, size)
    on_step(1)
    sync_ns = _sync_ns(file, size)
    on_step(1)
    granularity = _SECTOR_BYTES if _reads(file, _SECTOR_BYTES) else _PAGE_BYTES
    read_bandwidth = _reads_per_s(file, size, _PIECE_BYTES, _NUM_STREAMS) * _PIECE_BYTES
    latency_ns = 1e9 / _reads_per_s(file, size, granularity, 1)
    on_step(1)
    small = _reads_per_s(file, size, granularity, _NUM_READERS)
    pages = small if granularity == _PAGE_BYTES else _reads_per_s(file, size, _PAGE_BYTES, _NUM_READERS)
    on_step(1)
    tier = Tier(
        name=name,
        kind="block",
        capacity_bytes=capacity_bytes,
        read_bandwidth_bytes_per_s=float(round(read_bandwidth)),
        write_bandwidth_bytes_per_s=float(round(write_bandwidth)),
        read_latency_ns=float(round(latency_ns)),
        access_granularity_bytes=granularity,
        random_reads_per_s=float(round(small)),
        sync_latency_ns=float(round(sync_ns)),
    )
    note = (
        f"{name}: {small:,.0f} random reads/s of {granularity} bytes, {pages:,.0f} of {_PAGE_BYTES}, within "
        f"{size:,} bytes just written (a drive's or a host's cache may hold them)."
    )
    return tier, note


def _write_bandwidth(file: int, size: int) -> tuple[float, int]:
    """Bytes/s of large writes side by side until all are durable, and how many bytes the file then begins with.

    Stops at `size`, or when it has taken long enough."""
    with _aligned(_PIECE_BYTES) as piece:
        piece.write(os.urandom(_PIECE_BYTES))  # what a drive cannot compress away

        def write(stream: int, is_over: Callable[[], bool]) -> int:
            pieces = 0
            for offset in range(stream * _PIECE_BYTES, size, _NUM_STREAMS * _PIECE_BYTES):
                os.pwritev(file, [piece], offset)
                pieces += 1
                if is_over():
                    break
            return pieces

        begin = time.perf_counter()
        pieces = _in_threads(_NUM_STREAMS, write, seconds=3 * _SECONDS)
        os.fdatasync(file)
        seconds = time.perf_counter() - begin
    return sum(pieces) * _PIECE_BYTES / seconds, _NUM_STREAMS * min(pieces) * _PIECE_BYTES


def _sync_ns(file: int, size: int) -> float:
    """The median time of a write of one page and its fdatasync."""
    times: list[int] = []
    with _aligned(_PAGE_BYTES) as page:
        end = time.perf_counter() + _SECONDS
        offset = 0
        while not times or (time.perf_counter() < end and len(times) < 1000):
            begin = time.perf_counter_ns()
            os.pwritev(file, [page], offset)
            os.fdatasync(file)
            times.append(time.perf_counter_ns() - begin)
            offset = (offset + _PAGE_BYTES) % size
    return statistics.median(times)


def _reads(file: int, num_bytes: int) -> bool:
    """Whether the medium takes direct reads of this size."""
    try:
        with _aligned(num_bytes) as buffer:
            return os.preadv(file, [buffer], num_bytes) == num_bytes
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _reads_per_s(file: int, size: int, num_bytes: int, num_threads: int) -> float:
    """Direct reads of `num_bytes` at random multiples of it, from several threads."""

    def read(thread: int, is_over: Callable[[], bool]) -> int:
        places = np.random.default_rng(thread).integers(0, size // num_bytes, 4096) * num_bytes
        offsets = places.tolist()
        done = 0
        with _aligned(num_bytes) as buffer:
            while not done or not is_over():  # a thread may get its turn when the time is over
                os.preadv(file, [buffer], offsets[done % len(offsets)])
                done += 1
        return done

    begin = time.perf_counter()
    done = sum(_in_threads(num_threads, read, seconds=_SECONDS))
    return done / (time.perf_counter() - begin)


def _in_threads(count: int, work: Callable[[int, Callable[[], bool]], int], *, seconds: float) -> list[int]:
    """What `work(thread, is_over)` returned in each thread. An error in one ends all; so does Ctrl-C."""
    stop = threading.Event()
    end = time.perf_counter() + seconds
    results = [0] * count
    errors: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            results[thread] = work(thread, lambda: stop.is_set() or time.perf_counter() > end)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(thread,), daemon=True) for thread in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return results


def _rate(work: Callable[[], object]) -> float:
    """How often a second; the first time is not counted."""
    work()
    count = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < _SECONDS / 2:
        work()
        count += 1
    return count / elapsed


@contextmanager
def _nameless_file(directory: Path) -> Iterator[int]:
    """A new file in `directory` that is gone when it is closed."""
    try:
        file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        file, path = tempfile.mkstemp(prefix=".holdfast-probe-", dir=directory)
        Path(path).unlink()
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _aligned(num_bytes: int) -> Iterator[mmap.mmap]:
    """Memory that begins at a page, as O_DIRECT wants it."""
    with mmap.mmap(-1, num_bytes) as memory:
        yield memory


def _set_direct(file: int) -> bool:
    """Turns O_DIRECT on; False where the file system does not have it."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        return _reads(file, _PAGE_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _file_system(directory: Path) -> str:
    """Its type in the kernel's words; "file" where that cannot be told."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "file"
