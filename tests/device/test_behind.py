"""A pool that is some steps behind its device: what it does when its log runs low, when a step cannot be retired, and
what time a device's clock tells."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import SGD, EmbeddingBagCollection, Pool
from holdfast.device import kernels, queues
from holdfast.device.options import DeviceConfig
from holdfast.device.queues import Clock, Work
from holdfast.errors import ConfigError, NonFiniteLoss, PoolFailed, StepError, WindowTooLarge
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.run.assembly import open_trainer
from holdfast.slots import home_mapping
from holdfast.slots.slot_batch import Returning
from test_ways import STEPS, WAYS, Loop, bits, config_of, train


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-behind-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("log_bytes", [16 << 10, 24 << 10, 48 << 10, 128 << 10])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_a_log_that_runs_low_has_room_for_the_steps_that_are_on_their_way(way: str, log_bytes: int, root: Path) -> None:
    config = config_of(WAYS[way], dense_interval=1000, steps=40)
    config = replace(config, pool=replace(config.pool, log_bytes=log_bytes))
    reports = train(root / "pool", config)
    assert [report.step for report in reports] == list(range(1, 41))


def test_after_a_step_that_is_given_up_the_pool_takes_no_other_and_keeps_the_last_good_one(root: Path) -> None:
    loop = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    for _ in range(4):
        loop.step()
    loop.checkpoint.flush()
    expected = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with torch.no_grad():
        loop.scale.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="step 5"):  # noqa: PT012
        for _ in range(4):
            loop.step()
    for refused in (loop.step, loop.checkpoint.flush):
        with pytest.raises(PoolFailed, match=r"stays at step 4.*the loss of step 5 is nan.*open the pool again"):
            refused()
    loop.pool.close()
    again = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    with again.pool:
        assert again.pool.step == 4
        assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("at", [3, STEPS - 2])
def test_every_step_is_reported_also_where_the_pool_is_flushed_in_between(at: int, root: Path) -> None:
    seen = []
    with open_trainer(config_of(WAYS["scratchpad"]), root / "pool") as trainer:
        for report in trainer.steps():
            seen.append(report.step)
            if report.step == at:
                trainer.flush()
    assert seen == list(range(1, STEPS + 1))


def test_a_batch_that_has_no_room_is_forgotten_and_smaller_ones_go_on(root: Path) -> None:
    with Pool(root / "pool", medium="memory") as pool:
        tables = [
            EmbeddingBagConfig(num_embeddings=100, embedding_dim=dim, name=name, feature_names=[name])
            for name, dim in (("a", 4), ("b", 8))
        ]
        rows = EmbeddingBagCollection(
            pool, tables, optimizer=SGD(), device=DeviceConfig(rows="scratchpad", scratchpad_bytes=960)
        )

        def batch(*numbers: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
            """So many rows of each table, one bag each."""
            return {
                table.name: (torch.arange(number), torch.tensor([0, number]))
                for table, number in zip(tables, numbers, strict=True)
            }

        with pytest.raises(WindowTooLarge, match=r"feature\(s\) 'b'"):
            rows(batch(20, 21))  # after the rows of table a have found room, whose bytes nobody brings now
        pooled = rows(batch(20, 20)).values()
        with torch.no_grad():
            assert torch.allclose(pooled, rows(batch(20, 20)).values())


@pytest.mark.parametrize("ways", [("near_memory", "scratchpad"), ("direct", "near_memory")], ids=str)
def test_a_pool_is_behind_with_all_of_its_collections_or_with_none(ways: tuple[Any, Any], root: Path) -> None:
    with Pool(root / "pool", medium="memory") as pool:
        first, second = (
            [EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=name, feature_names=[name])] for name in "ab"
        )
        EmbeddingBagCollection(pool, first, device=DeviceConfig(rows=ways[0]))
        with pytest.raises(ConfigError, match=rf"{ways[1]}.*the same device\.rows"):
            EmbeddingBagCollection(pool, second, device=DeviceConfig(rows=ways[1]))


def test_a_table_has_its_rows_in_slots_of_the_collection_that_was_made_last_and_others_are_refused(root: Path) -> None:
    table = EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="a", feature_names=["a"])
    device, batch = DeviceConfig(rows="scratchpad"), {"a": torch.arange(5)}
    with Pool(root / "pool", medium="memory") as pool:

        def train(rows: EmbeddingBagCollection) -> torch.Tensor:
            pooled = rows(batch).values()
            pooled.sum().backward()
            rows.optimizer.step()
            pool.commit(pool.step + 1)
            return pooled.detach()

        first = EmbeddingBagCollection(pool, [table], optimizer=SGD(lr=0.5), device=device)
        began = train(first)
        train(first)
        under_way = first(batch).values()
        second = EmbeddingBagCollection(pool, [table], optimizer=SGD(lr=0.5), device=device)
        under_way.sum().backward()
        for refused in (first.optimizer.step, lambda: first(batch)):
            with pytest.raises(StepError, match=r"table 'a'.*one collection read all features.*near_memory"):
                refused()
        torch.testing.assert_close(train(second), began - 1.0)
        with torch.no_grad():
            torch.testing.assert_close(first(batch).values(), began - 1.5)


@pytest.mark.parametrize("way", ["scratchpad", "direct"])
def test_a_step_that_has_updated_its_rows_takes_no_other_forward_pass_and_no_other_update(way: str, root: Path) -> None:
    loop = Loop(root / "pool", DeviceConfig(rows=way))  # type: ignore[arg-type]
    loss = loop.forward(1)
    loss.backward(retain_graph=True)
    for rows in loop.collections:
        rows.optimizer.step()
    with pytest.raises(StepError, match="step 1 has updated its rows already: commit it"):
        loop.forward(2)
    loss.backward()
    with pytest.raises(StepError, match=r"step 1 were updated already.*after the last backward"):
        loop.collections[0].optimizer.step()
    loop.checkpoint.commit(1)
    loop.step()
    assert loop.pool.step == 2
    loop.pool.close()


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_an_interrupted_update_is_taken_back_when_the_pool_is_opened_again(
    updates: int, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    expected = Loop(root / "expected", DeviceConfig(rows="scratchpad"))
    for _ in range(4):
        expected.step()
    expected.pool.close()
    loop = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    for _ in range(2):
        loop.step()
    done, update_rows = 0, kernels.update_rows

    def update_until_interrupted(*given: Any, **named: Any) -> None:
        nonlocal done
        if done == updates:
            raise KeyboardInterrupt
        update_rows(*given, **named)
        done += 1

    monkeypatch.setattr(kernels, "update_rows", update_until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    monkeypatch.undo()
    with pytest.raises(StepError, match=r"step 3 was interrupted.*open the pool again"):
        loop.checkpoint.commit(3)
    assert loop.checkpoint.resume() == 2
    with pytest.raises(StepError, match=r"step 3 has updated its rows.*open the pool again"):
        loop.forward(3)
    loop.pool.close()
    again = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    for _ in range(2):
        again.step()
    again.pool.close()
    assert bits(root / "pool") == bits(root / "expected")


def test_a_resume_goes_on_after_the_steps_that_are_on_their_way(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    loop, wait = Loop(root / "pool", DeviceConfig(rows="scratchpad")), Returning.wait

    def wait_long(returning: Returning) -> Any:
        time.sleep(0.1)
        return wait(returning)

    monkeypatch.setattr(Returning, "wait", wait_long)
    for _ in range(3):
        loop.step()
    assert (loop.checkpoint.resume(), loop.pool.cursor) == (3, 3)
    loop.pool.close()


class _Float32Mark:
    """As CUDA's events: the milliseconds between two are a float32, of a device that runs since an hour ago."""

    now = 3600.0

    def __init__(self, at: float) -> None:
        self.at = at

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: _Float32Mark) -> float:
        assert earlier.at <= self.at + 1.0
        return float(np.float32((self.at - earlier.at) * 1e3)) * 1e-3


def test_a_clock_tells_microseconds_after_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    class AnyQueue:
        def mark(self, *, timed: bool = False) -> Any:
            return _Float32Mark(0.0)

    monkeypatch.setattr(queues, "current_queue", lambda device: AnyQueue())
    clock = Clock(torch.device("cpu"))
    start = clock.span(Work("first", "device", _Float32Mark(0.0), _Float32Mark(0.0)))[0]  # type: ignore[arg-type]
    for step in range(40_000):
        at = 0.3 * step
        began, ended = clock.span(Work("work", "device", _Float32Mark(at), _Float32Mark(at + 1e-4)))  # type: ignore[arg-type]
        assert abs(ended - began - 1e-4) < 2e-6, f"after {at} s"
    assert abs(began - start - at) < 1e-2


class _Runtime:
    """CUDA's, where it keeps its last error until somebody asks."""

    def __init__(self) -> None:
        self.pending = 0

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        self.pending = 801
        return 801

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {801: "operation not supported"}[error]

    def kernel(self, *_: Any, **__: Any) -> None:
        if self.pending:
            self.pending = 0
            raise RuntimeError("CUDA error: operation not supported")


def test_a_refused_registration_is_named_and_leaves_nothing_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.kernel)
    assert home_mapping._register(torch.device("cuda", 0), 4096, 4096) == "operation not supported"
    assert runtime.pending == 0
