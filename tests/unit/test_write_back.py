"""A file that is written from one end to the other is written back on the way, each part before it is let go of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.files import write_back
from holdfast.files.write_back import WriteBack


@pytest.mark.parametrize("begin", [0, 37])
def test_what_was_written_is_given_back_twice_and_nothing_else_is(
    begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time it may be on its way to the disk still."""
    monkeypatch.setattr(write_back, "_BYTES", 100)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, count, advice: told.append((offset, offset + count)))
    with (tmp_path / "file").open("wb") as file:
        parts = WriteBack(file.fileno(), begin)
        for end in range(begin, begin + 1001, 30):
            parts.reached(end)
    times = [sum(first <= place < last for first, last in told) for place in range(begin + 1000)]
    assert times[:begin] == [0] * begin
    assert set(times[begin : told[-2][1]]) == {2}
    assert max(last for _, last in told) <= begin + 990
