"""What threads beside the training one do for a device: batches are staged and steps retired, in order, and no thread
waits for what it need not."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import SGD, EmbeddingBagCollection, Pool
from holdfast.device import kernels
from holdfast.device.options import DeviceConfig
from holdfast.errors import PoolFailed, StepError
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.row_access import PlannedFeatures
from holdfast.slots.ordered_thread import OrderedThread
from holdfast.slots.slot_batch import Returning
from test_ways import Spoiled, raising

ROWS, DIM = 40, 4


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-threads-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


class Rows:
    """One table in slots, SGD with a learning rate of 1: a row loses 1 for every step that has it."""

    def __init__(self, directory: Path, num_slots: int = ROWS) -> None:
        self.pool = Pool(directory, medium="memory")
        table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="a", feature_names=["a"])
        device = DeviceConfig(rows="scratchpad", scratchpad_bytes=num_slots * DIM * 4)
        self.rows = EmbeddingBagCollection(self.pool, [table], optimizer=SGD(lr=1.0), device=device)
        self.before = self.values()

    def plan(self, *ids: int) -> PlannedFeatures:
        return self.rows.plan({"a": (torch.tensor(ids), torch.arange(len(ids) + 1))})

    def step(self, planned: PlannedFeatures) -> None:
        self.rows(planned).values().sum().backward()
        self.rows.optimizer.step()
        self.pool.commit(self.pool.step + 1)

    def values(self) -> torch.Tensor:
        with torch.no_grad():
            return self.rows(self.plan(*range(ROWS))).values().clone()

    def lost(self) -> list[int]:
        """By every row since the beginning."""
        return (self.before - self.values())[:, 0].round().int().tolist()


class Gate:
    """Returning.wait, which does not return before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        wait = Returning.wait

        def wait_at_gate(returning: Returning) -> Any:
            assert self.is_open.wait(60)
            return wait(returning)

        monkeypatch.setattr(Returning, "wait", wait_at_gate)


def test_a_thread_does_everything_in_order_and_whoever_asks_when_it_is_gone() -> None:
    thread, seen = OrderedThread("test"), []
    futures = [thread.ask(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(50)]
    thread.settle()
    assert [n for n, _ in seen] == list(range(50)) and {name for _, name in seen} == {"test_0"}
    assert all(future.done() for future in futures)
    error = thread.ask(lambda: 1 // 0).exception()
    assert isinstance(error, ZeroDivisionError)
    thread.close()
    thread.close()
    assert thread.ask(threading.current_thread).result() is threading.current_thread()


def test_the_child_of_a_fork_does_it_itself() -> None:
    thread = OrderedThread("test")
    thread.settle()
    child = os.fork()
    if child == 0:
        try:
            here = thread.ask(threading.get_ident).result() == threading.get_ident()
            thread.close()
        finally:
            os._exit(0 if here else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert thread.ask(threading.get_ident).result() != threading.get_ident()
    thread.close()


def test_batches_are_staged_while_rows_are_on_their_way_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    rows = Rows(root / "pool")
    with rows.pool:
        rows.step(rows.plan(0, 1))
        rows.step(rows.plan(1, 2))  # neither has come back
        assert (rows.pool.step, rows.pool.retired_step) == (2, 0)
        ahead = [rows.plan(2, 3), rows.plan(3, 4)]
        for planned in ahead:
            rows.rows.announce(planned)
        rows.rows.capture(ahead[0])  # would wait for ever for a thread that waits for the device
        gate.is_open.set()
        rows.pool.commit(3)
        rows.step(ahead[1])
        rows.pool.drain()
        assert rows.pool.retired_step == 4
        assert rows.lost()[:6] == [1, 2, 1, 1, 1, 0]


def test_a_batch_without_room_waits_for_a_step_that_gives_some(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    rows = Rows(root / "pool", num_slots=4)
    with rows.pool:
        rows.step(rows.plan(0, 1, 2))
        later = [rows.plan(3, 4, 5), rows.plan(5, 6, 7)]
        for planned in later:
            rows.rows.announce(planned)
        threading.Timer(0.2, gate.is_open.set).start()
        rows.step(later[0])
        rows.step(later[1])
        rows.pool.drain()
        assert rows.lost()[:9] == [1, 1, 1, 1, 1, 2, 1, 1, 0]
        assert rows.rows.traffic()["device_window_shrunk"] > 0


def test_without_a_step_to_wait_for_a_batch_without_room_is_refused(root: Path) -> None:
    rows = Rows(root / "pool", num_slots=4)
    with rows.pool:
        rows.rows.announce(rows.plan(0, 1, 2))
        later = rows.plan(3, 4, 5)
        rows.rows.announce(later)
        with pytest.raises(StepError, match="find no room among the 4 slots"):
            rows.rows.capture(later)


def test_who_relies_on_rows_that_did_not_come_fails_with_them_and_others_go_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(root / "pool")
    with rows.pool:
        error = RuntimeError("the rows do not come")
        monkeypatch.setattr(kernels, "scatter_rows", Spoiled(kernels.scatter_rows, 1, raising(error)))
        failing, relying, another = rows.plan(0, 1), rows.plan(1, 2), rows.plan(0, 2)
        rows.rows.announce(failing)
        rows.rows.announce(relying)
        rows.pool.write_behind().settle()
        for planned in (failing, relying):
            with pytest.raises(RuntimeError, match="do not come"):
                rows.rows.capture(planned)
        rows.step(another)
        rows.step(rows.plan(1, 2))
        rows.pool.drain()
        assert rows.lost()[:4] == [1, 1, 2, 0]


@pytest.mark.parametrize("verb", ["put", "commit"])
def test_a_step_that_the_pool_does_not_take_is_told_once_and_then_refused(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(root / "pool")
    with rows.pool:
        rows.step(rows.plan(0))
        rows.pool.drain()
        with monkeypatch.context() as patch:
            patch.setattr(type(rows.pool.core), verb, lambda *_: raising(ValueError("not that"))(None))
            with pytest.raises(ValueError, match="not that"):  # noqa: PT012
                for _ in range(4):
                    rows.step(rows.plan(0))
        for refused in (lambda: rows.step(rows.plan(0)), rows.pool.flush):
            with pytest.raises(PoolFailed, match=r"stays at step 1.*not that"):
                refused()
        assert rows.pool.step == 1
