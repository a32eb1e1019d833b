"""What every test starts from: the same random numbers, all threads, and a directory on memory where there is one."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from zlib import crc32

import pytest

# Threads that wait for one another give their core to the tests beside them; half of the time goes to spinning
# otherwise. OpenMP reads it when torch is loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import HealthCheck, settings

from holdfast import _core
from holdfast.state.reproducibility import prepare_environment

SEED = 20261120
THOROUGH_TESTS_FOR_ONE = 10  # that is drawn

# What holds does so on a machine that is busy, too.
settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("holdfast")

prepare_environment()  # before anything computes: what MKL reads at its first call it keeps


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="of a test that has more cases than N, N of them, or one where it is marked dear, and no test that is "
        "marked thorough (make test)",
    )
    parser.addoption(
        "--draw",
        type=int,
        metavar="NUMBER",
        help="which sample: for another number other cases, and another tenth of the tests that are marked thorough "
        "(.ci/run); without it the cases are the same at every run",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    sample, draw = config.getoption("--sample"), config.getoption("--draw")
    return None if draw is None else f"the same sample again: --sample {sample} --draw {draw}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a sample, where one is asked for: evenly spread over a test's cases, from one of them on that its name and
    the draw say, so that tests of the same cases do not all have the same ones."""
    sample: int | None = config.getoption("--sample")
    draw: int | None = config.getoption("--draw")
    if sample is None:
        return
    is_thorough = [is_left_out(item, draw) for item in items]
    num_cases = Counter(function_of(item) for item, leave in zip(items, is_thorough, strict=True) if not leave)
    places: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item, leave in zip(items, is_thorough, strict=True):
        if leave:
            left_out.append(item)
            continue
        function = function_of(item)
        cases = num_cases[function]
        place = (places[function] + crc32(function.encode()) + (draw or 0)) % cases
        places[function] += 1
        wanted = 1 if item.get_closest_marker("dear") else sample
        is_drawn = cases <= wanted or (place + 1) * wanted // cases > place * wanted // cases
        (kept if is_drawn else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def is_left_out(item: pytest.Item, draw: int | None) -> bool:
    """Of a sample, whatever its cases."""
    if item.get_closest_marker("soak"):
        return True
    is_drawn = draw is not None and (crc32(function_of(item).encode()) + draw) % THOROUGH_TESTS_FOR_ONE == 0
    return item.get_closest_marker("thorough") is not None and not is_drawn


@pytest.fixture(scope="session")
def is_sample(pytestconfig: pytest.Config) -> bool:
    """Whether only a sample is asked for: a test that is one case of many draws does fewer of them then."""
    return pytestconfig.getoption("--sample") is not None


def pytest_collection_finish() -> None:
    """Keeps the collector away from torch and the tests' modules, which stay until the end: each of its full rounds
    would go through all of them."""
    gc.collect()
    gc.freeze()


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Seeds torch, and gives the core its threads back whatever the test did with them."""
    num_threads = _core.num_threads()
    torch.manual_seed(SEED)
    yield
    _core.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def same_priority(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps the priority that a command lowers for itself (`holdfast snapshot`) from the tests' process, in which it is
    called: this one, and its children, would wait for all others from then on."""
    monkeypatch.setattr(os, "nice", lambda _: os.getpriority(os.PRIO_PROCESS, 0))
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority, "the tests after it would run at another priority"


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
