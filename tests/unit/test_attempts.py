"""What is being made has a hidden name beside its own, however long that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.admin.snapshot.output import new_directory
from holdfast.data.output import whole_file


@pytest.mark.parametrize("letter", ["a", "ü", "🙂"])
def test_a_name_may_be_as_long_as_the_filesystem_allows(tmp_path: Path, letter: str) -> None:
    name = letter * (255 // len(letter.encode()))
    for _ in range(2):
        with whole_file(tmp_path / name, overwrite=True) as partial:
            partial.write_text("whole")
        assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    with new_directory(tmp_path / name, "restoring") as directory:
        (directory / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == [name]
