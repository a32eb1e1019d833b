"""Files that go past the page cache hold what was written, wherever it begins and ends, and where they cannot."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.files import direct
from holdfast.files.direct import DirectReader, DirectWriter
from holdfast.files.recycled import recycled

_WINDOW = 3 * 4096  # a few blocks, so that files have many of them


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_WINDOW_BYTES", _WINDOW)


@pytest.fixture(params=["direct", "not at all", "not from the first request on"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On file systems that go past the page cache, that refuse to, and that open files and refuse requests."""
    real_open, real_read, real_write = os.open, os.preadv, os.pwrite
    refusing: set[int] = set()

    def opened(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if request.param == "direct" or not flags & os.O_DIRECT:
            fd = real_open(name, flags, *rest, **more)
            refusing.discard(fd)
            return fd
        if request.param == "not at all":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(name))
        fd = real_open(name, flags & ~os.O_DIRECT, *rest, **more)
        refusing.add(fd)
        return fd

    def request_of(real: Any) -> Any:
        def asked(fd: int, *rest: Any) -> Any:
            if fd in refusing:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, *rest)

        return asked

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", request_of(real_read))
    monkeypatch.setattr(os, "pwrite", request_of(real_write))
    return tmp_path / "file"


def _bytes(num_bytes: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def _written(path: Path, begin: int, data: np.ndarray[Any, np.dtype[np.uint8]], pieces: list[int]) -> None:
    with DirectWriter(path, begin) as out:
        done = 0
        for piece in pieces:
            out.write(data[done : done + piece])
            done += piece
        out.write(data[done:])


@pytest.mark.parametrize("begin", [0, 1, 4095, 4096, 4097, 5 * 4096 + 17])
@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 2 * _WINDOW, 7 * _WINDOW + 5])
def test_what_is_written_from_anywhere_on_is_there_and_the_rest_is_as_it_was(
    path: Path, begin: int, num_bytes: int
) -> None:
    before = _bytes(begin + num_bytes + 9000, seed=2)
    path.write_bytes(before.tobytes())
    data = _bytes(num_bytes)
    _written(path, begin, data, [3, 4096, 0, _WINDOW])
    before[begin : begin + num_bytes] = data
    assert path.read_bytes() == before.tobytes()


@pytest.mark.parametrize("begin", [0, 1, 4095, 4096, 4 * _WINDOW + 17])
@pytest.mark.parametrize("piece", [1000, 4096, _WINDOW, 5 * _WINDOW + 3])
def test_a_file_is_read_in_pieces_of_any_size_from_anywhere_on(path: Path, begin: int, piece: int) -> None:
    data = _bytes(9 * _WINDOW + 77)
    path.write_bytes(data.tobytes())
    with DirectReader(path, begin) as file:
        found = []
        while len(part := file.read(piece)):
            found.append(part)
        assert len(file.read(piece)) == 0
    assert all(len(part) == piece for part in found[:-1])
    assert np.array_equal(np.concatenate(found), data[begin:])


def test_nothing_is_read_behind_the_end(path: Path) -> None:
    path.write_bytes(b"short")
    with DirectReader(path, 100) as file:
        assert len(file.read(10)) == 0
    path.write_bytes(b"")
    with DirectReader(path) as file:
        assert len(file.read(10)) == 0


def test_parts_of_a_file_that_share_blocks_are_written_beside_each_other(path: Path) -> None:
    """As the tensors of an export are, whose places in the file no block knows."""
    sizes = [100, 5000, 3 * _WINDOW + 1, 7, 2 * _WINDOW, 4096, 11]
    begins = [13 + sum(sizes[:i]) for i in range(len(sizes))]
    parts = [_bytes(size, seed) for seed, size in enumerate(sizes)]
    path.write_bytes(b"x" * 13)
    with ExitStack() as stack:
        outs = [stack.enter_context(DirectWriter(path, begin)) for begin in begins]
        for step in range(0, max(sizes), 1000):
            for out, part in zip(outs, parts, strict=True):
                out.write(part[step : step + 1000])
    assert path.read_bytes() == b"x" * 13 + np.concatenate(parts).tobytes()


@given(
    begin=st.integers(0, 20_000),
    pieces=st.lists(st.integers(0, 40_000), max_size=6),
    read_from=st.integers(0, 20_000),
    reads=st.lists(st.integers(1, 60_000), max_size=6),
)
def test_any_writes_and_reads_give_the_file(begin: int, pieces: list[int], read_from: int, reads: list[int]) -> None:
    data = _bytes(sum(pieces))
    with TemporaryDirectory() as directory:
        path = Path(directory, "file")
        path.write_bytes(bytes(begin))
        _written(path, begin, data, pieces)
        whole = bytes(begin) + data.tobytes()
        assert path.read_bytes() == whole
        with DirectReader(path, read_from) as file:
            at = read_from
            for count in reads:
                assert file.read(count).tobytes() == whole[at : at + count]
                at += count


def test_a_disk_that_is_full_is_said_by_the_writer_and_no_thread_stays() -> None:
    threads = threading.active_count()
    with pytest.raises(OSError, match="No space left") as raised:
        _written(Path("/dev/full"), 0, _bytes(10 * _WINDOW), [_WINDOW] * 9)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/dev/full")
    assert threading.active_count() == threads


def test_a_block_that_ends_badly_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")

    def interrupted() -> None:
        with DirectWriter(path) as out:
            out.write(_bytes(100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b""


def test_what_was_read_stays_while_more_is(tmp_path: Path) -> None:
    data = _bytes(40 * _WINDOW)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    with DirectReader(path) as file:
        parts = [file.read(1000) for _ in range(len(data) // 1000)]
    assert np.array_equal(np.concatenate(parts), data[: len(parts) * 1000])


def _lengths() -> Iterator[int]:
    yield from (0, 1, 2 << 20, (2 << 20) + 1, 9 << 20)


def test_memory_is_used_again_when_no_view_of_it_lives() -> None:
    for num_bytes in _lengths():
        first = recycled(num_bytes)
        assert first.shape == (num_bytes,)
        place = first.ctypes.data
        view = first[: num_bytes // 2].view(np.uint8)[::2]
        del first
        other = recycled(num_bytes)
        assert other.ctypes.data != place
        del other, view
        assert place in {piece.ctypes.data for piece in [recycled(num_bytes) for _ in range(8)]}


def test_threads_never_share_memory() -> None:
    def work(number: int) -> bool:
        kept = []
        for turn in range(200):
            piece = recycled(1000)
            piece[:] = (number + turn) % 251
            kept.append((piece, (number + turn) % 251))
            kept = kept[-3:]
            if any((piece != value).any() for piece, value in kept):
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
