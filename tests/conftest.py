"""What every test starts from: the same random numbers, all threads, and a directory on memory where there is one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from holdfast import _core
from holdfast.state.reproducibility import prepare_environment

SEED = 20261120

prepare_environment()  # before anything computes: what MKL reads at its first call it keeps


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Seeds torch, and gives the core its threads back whatever the test did with them."""
    num_threads = _core.num_threads()
    torch.manual_seed(SEED)
    yield
    _core.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def new_root() -> Iterator[Callable[[], Path]]:
    """Gives an empty directory at every call; on tmpfs where the machine has one, because tests make hundreds of pools.
    For hypothesis, which runs a test many times over one set of fixtures."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=parent) as directory:
        numbers = count()

        def make() -> Path:
            root = Path(directory) / str(next(numbers))
            root.mkdir()
            return root

        yield make


@pytest.fixture
def pool_root(new_root: Callable[[], Path]) -> Iterator[Path]:
    """An empty directory for pools."""
    root = new_root()
    yield root
    shutil.rmtree(root)
