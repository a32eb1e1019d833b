"""Where the blocks of text files begin and end: one pass over the files, so that any line can be reached at once later.

The pass reads at the disk's speed (it looks for line ends and takes a CRC, some 1 GB/s a core) and keeps a few numbers
per block. For a set of many hundreds of gigabytes, convert to Parquet, whose files carry such an index.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.data.tsv import FRONT_PAD_BYTES, count_samples, padded_buffer
from holdfast.data.unchanged import Unchanged, check_is_file
from holdfast.errors import DataError

Progress = Callable[[int, int], None]
"""Called now and then with what is done and what there is to do, in the unit that the function names."""

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 8 << 20
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines of a file: bytes ``[begin, end)`` of ``paths[file]``, from line ``first_line`` (from 1).

    num_samples: lines that are not empty. ends_file: whether the file's last line that is not empty is in here.
    """

    file: int
    begin: int
    end: int
    first_line: int
    num_samples: int
    ends_file: bool


@dataclass(frozen=True, slots=True)
class TextIndex:
    """Blocks of all files in order, each with at least one sample, and per file its size in bytes, the CRC-32 of them,
    and what notices that it is written from then on."""

    blocks: tuple[TextBlock, ...]
    file_sizes: tuple[int, ...]
    file_checksums: tuple[int, ...]
    files: tuple[Unchanged, ...]

    def check_unchanged(self, file: int, path: Path) -> None:
        """DataError where the file's bytes are not those that were indexed."""
        self.files[file].check(lambda: _checksum_of(path) == self.file_checksums[file])


def _checksum_of(path: Path) -> int:
    """Of a whole file, as an index has it. Raises OSError."""
    checksum = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def index_files(paths: tuple[Path, ...], *, block_lines: int, progress: Progress | None = None) -> TextIndex:
    """Index ``paths`` into blocks of ``block_lines`` lines. ``progress`` gets bytes.

    Raises ConfigError for a path that is no file, DataError for a file of gzip's, and (file and line) for a line of
    more than 1 MiB.
    """
    for path in paths:
        check_is_file(path)
        with path.open("rb") as stream:
            if stream.read(len(_GZIP)) == _GZIP:
                raise DataError(f"{path}: it is compressed by gzip, which is not read: unpack it (gunzip)")
    files = tuple(Unchanged(path) for path in paths)
    sizes = tuple(path.stat().st_size for path in paths)
    blocks: list[TextBlock] = []
    checksums: list[int] = []
    num_bytes_done = 0
    for file, path in enumerate(paths):
        file_blocks: list[TextBlock] = []
        checksum = 0
        for part, checksum_so_far, num_bytes in _scan(path, file, block_lines):
            file_blocks.extend(block for block in part if block.num_samples)
            checksum = checksum_so_far
            num_bytes_done += num_bytes
            if progress is not None:
                progress(num_bytes_done, sum(sizes))
        if file_blocks:
            last = file_blocks[-1]
            file_blocks[-1] = TextBlock(file, last.begin, last.end, last.first_line, last.num_samples, ends_file=True)
        blocks.extend(file_blocks)
        checksums.append(checksum)
    return TextIndex(tuple(blocks), sizes, tuple(checksums), files)


def _scan(path: Path, file: int, block_lines: int) -> Iterator[tuple[list[TextBlock], int, int]]:
    """Per chunk of the file: the blocks that end in it, the CRC up to its end, and its bytes."""
    checksum = 0
    buffer = padded_buffer(_CHUNK_BYTES + _MAX_LINE_BYTES)
    text = buffer[FRONT_PAD_BYTES:]
    position = 0  # of text[0] in the file
    num_kept = 0  # bytes of an unfinished line, at the begin of text
    block_begin, block_first_line, block_num_lines, block_num_samples = 0, 1, 0, 0
    with path.open("rb", buffering=0) as stream:
        while True:
            num_read = stream.readinto(text.data[num_kept : num_kept + _CHUNK_BYTES])
            checksum = zlib.crc32(text.data[num_kept : num_kept + num_read], checksum)
            num_bytes = num_kept + num_read
            is_end = num_read == 0
            if is_end and num_bytes:
                text[num_bytes] = ord("\n")  # the file's last line has no end of its own
                num_bytes += 1
            newlines = np.flatnonzero(text[:num_bytes] == ord("\n"))
            # of a line end that was added above, the file holds nothing
            end_so_far = position + num_kept + num_read
            line_ends = np.minimum(position + newlines + 1, end_so_far)
            is_sample = count_samples(newlines, text, 0)
            blocks: list[TextBlock] = []
            taken = 0
            while taken < newlines.shape[0]:
                step = min(block_lines - block_num_lines, newlines.shape[0] - taken)
                block_num_lines += step
                block_num_samples += int(is_sample[taken : taken + step].sum())
                taken += step
                if block_num_lines == block_lines:
                    end = int(line_ends[taken - 1])
                    blocks.append(TextBlock(file, block_begin, end, block_first_line, block_num_samples, False))
                    block_begin, block_first_line = end, block_first_line + block_num_lines
                    block_num_lines, block_num_samples = 0, 0
            if is_end:
                if block_num_lines:
                    blocks.append(TextBlock(file, block_begin, end_so_far, block_first_line, block_num_samples, False))
                yield blocks, checksum, 0
                return
            finished = int(newlines[-1]) + 1 if newlines.shape[0] else 0
            num_kept = num_bytes - finished
            if num_kept > _MAX_LINE_BYTES:
                line = block_first_line + block_num_lines
                raise DataError(
                    f"{path}, line {line}: longer than {_MAX_LINE_BYTES} bytes; this is no Criteo text file"
                )
            text[:num_kept] = text[finished:num_bytes].copy()
            position += finished
            yield blocks, checksum, num_read
