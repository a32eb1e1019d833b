"""What a closed pool leaves behind in its process: nothing, whoever still knows it."""

from __future__ import annotations

import ctypes
import gc
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Adam, DeviceConfig, EmbeddingBagCollection, EmbeddingBagConfig, Pool, VictimCache
from holdfast.errors import PoolFailed, StepError

ROWS, DIM = 120_000, 64
BYTES_OF_ROWS = ROWS * DIM * 4 * 3  # weights, and two moments
WAYS = {
    "in_place": ("memory", "near_memory"),
    "read_by_the_device": ("memory", "direct"),
    "row_log": ("block", "near_memory"),
    "slots": ("block", "scratchpad"),
}


@pytest.fixture
def no_garbage_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def files_in_use(directory: Path) -> list[str]:
    opened = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted(name for name in opened + mapped if str(directory) in name)


def resident_bytes() -> int:
    """Without what is free, and what malloc keeps for whoever asks next: it may be more than a pool has."""
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) << 10


class Loop:
    def __init__(self, directory: Path, medium: str, rows: str, **options: object) -> None:
        self.pool = Pool(directory, seed=1, medium=medium, scratchpad_bytes=2 * BYTES_OF_ROWS, **options)  # type: ignore[arg-type]
        table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"])
        self.emb = EmbeddingBagCollection(
            self.pool,
            [table],
            optimizer=Adam(lr=0.1),
            device=DeviceConfig(rows=rows, scratchpad_bytes=2 * BYTES_OF_ROWS),  # type: ignore[arg-type]
        )

    def plan(self, first: int):
        ids = torch.arange(first, first + 20_000) % ROWS
        return self.emb.plan({"f": (ids, torch.arange(len(ids)))})

    def step(self, number: int) -> None:
        self.emb(self.plan(number * 20_000)).values().square().sum().backward()
        self.emb.optimizer.step()
        self.pool.commit(number)


@pytest.mark.dear
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("no_garbage_is_collected")
def test_a_closed_pool_has_given_back_its_files_and_its_memory(pool_root: Path, way: str) -> None:
    loop = Loop(pool_root / "pool", *WAYS[way])
    for number in range(1, 8):
        loop.step(number)
    loop.emb.announce(loop.plan(5))
    loop.pool.flush()
    had, counted = resident_bytes(), loop.pool.traffic()
    assert files_in_use(pool_root)
    loop.pool.close()
    assert files_in_use(pool_root) == []
    assert resident_bytes() < had - BYTES_OF_ROWS // 2
    assert (loop.pool.step, loop.pool.cursor, loop.pool.durable_step) == (7, 7, 7)
    after = loop.pool.traffic()
    assert (after is None) == (counted is None)
    assert counted is None or after is None or after["updated_rows"] == counted["updated_rows"] == 7 * 20_000


@pytest.mark.parametrize("way", WAYS)
def test_whoever_uses_a_closed_pool_is_told_so(pool_root: Path, way: str) -> None:
    loop = Loop(pool_root / "pool", *WAYS[way])
    loop.step(1)
    captured, announced = loop.emb(loop.plan(2)).values(), loop.plan(3)
    loop.emb.announce(announced)
    loop.pool.close()
    captured.sum().backward()
    for use in (
        loop.emb.optimizer.step,
        lambda: loop.pool.commit(2),
        lambda: loop.emb(announced),
        lambda: loop.emb(loop.plan(4)),
        lambda: loop.emb.eval()(loop.plan(4)),
        loop.pool.flush,
        loop.pool.dense_state,
        lambda: loop.pool.core.import_rows(0, 0, np.zeros(DIM * 4, np.uint8), None),
        lambda: loop.pool.core.import_values(0, np.zeros(1, np.uint64), np.zeros(DIM * 12, np.uint8)),
    ):
        with pytest.raises(StepError, match="the pool is closed"):
            use()
    loop.pool.close()


@pytest.mark.usefixtures("no_garbage_is_collected")
def test_pools_one_after_the_other_take_the_memory_of_one(pool_root: Path) -> None:
    loops, had = [], []
    for number in range(4):
        loops.append(Loop(pool_root / f"trial-{number}", "block", "near_memory", victims=VictimCache(bytes=8 << 20)))
        for step in range(1, 8):
            loops[-1].step(step)
        loops[-1].pool.close()
        had.append(resident_bytes())
    assert had[-1] < had[0] + BYTES_OF_ROWS // 2


@pytest.mark.usefixtures("no_garbage_is_collected")
def test_a_pool_that_failed_has_given_back_its_files_too(pool_root: Path) -> None:
    loop = Loop(pool_root / "pool", "block", "near_memory")
    loop.step(1)
    shutil.rmtree(pool_root / "pool")
    with suppress(PoolFailed):  # now, or when it is made durable
        loop.step(2)
    with pytest.raises(PoolFailed):
        loop.pool.close()
    assert files_in_use(pool_root) == []
