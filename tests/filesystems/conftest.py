"""Disks for the tests here, which only root can make; and the modules of crash tests and of recorded power cuts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "power"))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
sys.path.insert(0, str(Path(__file__).parent))

from crash_runs import Zygote
from loop_disks import Cell, Host, LoopDisk

# Not in memory: what lies on a disk whose bytes do is of level `process`, and need not survive a cut.
ON_DISK = Path(__file__).resolve().parents[2] / "build"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="holdfast-filesystems-", dir=ON_DISK) as root:
        try:
            host = Host(Path(root))
        except OSError as error:
            pytest.skip(f"no disks in loop devices: {error}")
        yield host
        host.close()


NUMBERS = count()


@pytest.fixture
def disk(cell: Cell, host: Host) -> Iterator[LoopDisk]:
    """A new disk of the cell that the test is for."""
    try:
        disk = LoopDisk.make(cell, host, f"disk-{next(NUMBERS)}")
    except OSError as error:
        pytest.skip(f"no {cell}: {error}")
    yield disk
    disk.close()
