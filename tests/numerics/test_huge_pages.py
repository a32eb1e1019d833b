"""Tables in memory are moved into huge pages beside training: the bits of tables that stay where they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from holdfast import Adam, EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.admin.digest import digest_pool
from holdfast.pools.read_only import at_rest

ROWS, DIM, STEPS = 70_000, 16, 40  # weights of 4.5 MB, states of 9


def bytes_in_huge_pages() -> int:
    """Of all of this process's mappings of files in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped:"))


def opened(directory: Path) -> tuple[Pool, EmbeddingBagCollection]:
    pool = Pool(directory, seed=5, medium="memory")
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    return pool, EmbeddingBagCollection(pool, [table], optimizer=Adam(lr=0.01))


def step(pool: Pool, rows: EmbeddingBagCollection, ids: torch.Tensor) -> None:
    vectors = rows({"f": ids}).values()
    (vectors * torch.arange(1.0, DIM + 1)).square().sum().backward()
    rows.optimizer.step()
    pool.commit(pool.step + 1)


def train(directory: Path, *, until: int, seconds: float = 0.0) -> int:
    """All rows in the first step, then some, spread over so many seconds. Returns how much lies in huge pages."""
    pool, rows = opened(directory)
    with pool:
        if pool.step == 0:
            step(pool, rows, torch.arange(ROWS))
        while pool.step < until:
            draw = torch.Generator().manual_seed(pool.step)
            step(pool, rows, torch.randint(0, ROWS, (3_000,), generator=draw))
            time.sleep(seconds / STEPS)
        return bytes_in_huge_pages()


def bits(directory: Path) -> object:
    with at_rest(directory) as (reader, _):
        return digest_pool(reader)


def kernel_moves_pages() -> bool:
    """Linux since 6.1, where it was built with huge pages for files in memory and nobody has denied them."""
    allowed = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return version >= (6, 1) and allowed.exists() and "[deny]" not in allowed.read_text()


@pytest.mark.dear
@pytest.mark.parametrize("stops", [(), (20,)], ids=["one life", "two lives"])
def test_rows_that_are_moved_while_they_train_end_with_the_same_bits(
    stops: tuple[int, ...], pool_root: Path, tmp_path: Path
) -> None:
    for stop in stops:
        train(pool_root / "moved", until=stop, seconds=0.5)
    in_huge_pages = train(pool_root / "moved", until=STEPS, seconds=2.5)
    train(tmp_path / "on_disk", until=STEPS)
    assert bits(pool_root / "moved") == bits(tmp_path / "on_disk")
    if pool_root.is_relative_to("/dev/shm") and kernel_moves_pages():
        assert in_huge_pages >= 8 << 20


def test_rows_that_nobody_has_touched_stay_without_memory(pool_root: Path) -> None:
    pool, rows = opened(pool_root / "pool")
    with pool:
        step(pool, rows, torch.arange(0, ROWS, 700))
        time.sleep(1.5)
        step(pool, rows, torch.arange(0, ROWS, 700))
    used = sum(path.stat().st_blocks * 512 for path in (pool_root / "pool").rglob("*") if "weights" in path.name)
    assert 0 < used <= 101 * 4096 + 8192
