"""A child of fork has the pool of its parent in memory, and no part in it: it neither hangs nor keeps nor changes
anything, whatever it does with what it inherited."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, Pool, _core
from holdfast.errors import PoolBusy, StepError
from holdfast.group.founding import GroupLock
from holdfast.pools.read_only import at_rest, locked
from holdfast.rows.row_access import PlannedFeatures

pytestmark = pytest.mark.dear

Medium = Literal["memory", "block"]
PATIENCE = 60.0  # seconds: what does not end by then hangs


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    """What those left to be collected is none of a child's."""
    gc.collect()


def in_child(act: Callable[[], object]) -> int:
    """The exit status of a forked child that does it: 0, or 1 where it raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


class Training:
    """A pool under way: threads at work, a step begun."""

    def __init__(self, directory: Path, medium: Medium) -> None:
        self.pool = Pool(directory, medium=medium, log_bytes=1 << 20, scratchpad_bytes=1 << 20)
        self.rows = EmbeddingBagCollection(
            self.pool, [EmbeddingBagConfig(num_embeddings=200, embedding_dim=8, name="t", feature_names=["f"])]
        )
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpoint = Checkpoint(self.pool, model=self.model, optimizer=self.optimizer)
        self.checkpoint.resume()

    def batch(self, number: int) -> JaggedFeatures:
        ids = torch.arange(number, number + 20) % 200
        return JaggedFeatures(["f"], ids, torch.arange(0, 21, 2))

    def step(self) -> None:
        loss = self.model(self.rows(self.batch(self.pool.step)).values()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rows.optimizer.step()
        self.checkpoint.commit(self.pool.step + 1)


@pytest.fixture(params=["memory", "block"])
def training(request: pytest.FixtureRequest, pool_root: Path) -> Any:
    made = Training(pool_root / "pool", request.param)
    for _ in range(3):
        made.step()
    yield made
    made.pool.close()


def test_a_child_that_collects_an_inherited_pool_ends(training: Training) -> None:
    held = [training.pool, training.rows, training.checkpoint]

    def forget() -> None:
        vars(training).clear()
        held.clear()
        gc.collect()

    assert in_child(forget) == 0
    training.step()


def test_a_child_that_closes_an_inherited_pool_changes_nothing(training: Training, pool_root: Path) -> None:
    assert in_child(training.pool.close) == 0
    reader = _core.Reader(str(pool_root / "pool"))
    assert not reader.clean
    training.step()
    assert training.checkpoint.flush() == 4


def test_every_verb_of_an_inherited_pool_is_a_typed_error(training: Training) -> None:
    planned = training.rows.plan(training.batch(training.pool.step))
    captured = training.rows.capture(planned)  # no gradient comes of it: the step discards it
    core = training.pool.core
    out = torch.zeros(10, 8).numpy()
    verbs: list[Callable[[], object]] = [
        training.step,
        lambda: training.rows.capture(planned),
        lambda: training.rows.lookup(captured, planned),
        lambda: training.rows.eval()(training.batch(3)),
        lambda: core.announce(planned.plan),
        lambda: core.lookup(captured, out),
        lambda: core.dense_state(),
        lambda: core.import_rows(0, 0, torch.zeros(32, dtype=torch.uint8).numpy(), None),
        lambda: core.keep_rows(0, [1]),
        lambda: core.log_bytes_free,
        lambda: core.traffic(),
        lambda: core.take_spans(),
        lambda: core.mapping(0),
        training.checkpoint.commit,
        training.checkpoint.flush,
        training.pool.flush,
    ]

    def use() -> None:
        for verb in verbs:
            with pytest.raises(StepError, match="of which this one is a fork"):
                verb()

    assert in_child(use) == 0
    training.step()


class Planned(Dataset):
    """Batches that are planned where they are read."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> PlannedFeatures:
        return self.training.rows.plan(self.training.batch(number))


def test_a_worker_that_plans_is_told_to_give_ids(training: Training) -> None:
    """A plan cannot be pickled, and a loader would wait for ever for what its worker could not send."""
    loader = DataLoader(Planned(training), batch_size=None, num_workers=1, timeout=PATIENCE)
    with pytest.raises(StepError, match=r"of which this one is a fork.*let workers give ids"):
        next(iter(loader))
    training.step()


def waiting_child() -> int:
    """A forked child that does nothing until it is killed; it is under way when this returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"!")
            time.sleep(10 * PATIENCE)
        finally:
            os._exit(0)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_pool_can_be_opened_when_its_process_is_dead_and_a_child_of_it_lives(pool_root: Path) -> None:
    """The everyday case: SIGKILL for a training script whose DataLoader has workers."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            training = Training(pool_root / "pool", "memory")
            training.step()
            training.pool.flush()
            os.write(write, waiting_child().to_bytes(4, "little"))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(write)
    child = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.waitpid(parent, 0)
    assert child, "the parent did not get as far"
    try:
        os.kill(child, 0)
        training = Training(pool_root / "pool", "memory")
        assert training.pool.step == 1
        training.pool.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_closed_pool_can_be_opened_while_a_child_of_its_process_lives(pool_root: Path) -> None:
    training = Training(pool_root / "pool", "memory")
    child = waiting_child()
    try:
        training.pool.close()
        Training(pool_root / "pool", "memory").pool.close()
    finally:
        end(child)


def test_a_child_does_not_let_go_of_its_parents_lock(pool_root: Path) -> None:
    training = Training(pool_root / "pool", "memory")

    def open_it() -> None:
        gc.collect()
        with pytest.raises(PoolBusy):
            Pool(pool_root / "pool")

    assert in_child(open_it) == 0
    training.pool.close()


def test_locks_of_groups_and_readers_end_with_their_process(pool_root: Path) -> None:
    Training(pool_root / "pool", "memory").pool.close()
    lock = GroupLock(pool_root / "group")
    with locked(pool_root / "pool"):
        child = waiting_child()
    try:
        lock.release()
        GroupLock(pool_root / "group").release()
        with locked(pool_root / "pool", alone=True):
            pass
        with at_rest(pool_root / "pool"):
            pass
    finally:
        end(child)


class Rows(Dataset[Any]):
    """Holds what a user's data set would hold by accident: the whole training."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_workers_of_a_dataloader_inherit_a_pool_and_end(training: Training) -> None:
    loader = DataLoader(Rows(training), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE)
    for _ in loader:
        training.step()
    assert training.checkpoint.flush() == 7
