"""A pool that is read while nobody trains it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.admin.repair import repair_pool
from holdfast.errors import PoolBusy
from holdfast.files.locks import FileLock
from holdfast.group.founding import GroupLock
from holdfast.pools.read_only import ReadOnlyPool, locked, open_untrained


def collection(pool: Pool | ReadOnlyPool, name: str) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=name, feature_names=[f"{name}_id"])
    return EmbeddingBagCollection(pool, [table])  # type: ignore[arg-type]


def test_several_collections_of_a_pool_are_evaluated_without_opening_it_for_writing(pool_root: Path):
    names = ("users", "items")
    bags = {f"{name}_id": (torch.tensor([3, 5]), torch.tensor([0, 1, 2])) for name in names}
    with Pool(pool_root / "pool") as pool:
        trained = [collection(pool, name) for name in names]
        torch.cat([rows(bags).values() for rows in trained]).sum().backward()
        for rows in trained:
            rows.optimizer.step()
        pool.commit(2)
        wanted = [rows.eval()(bags).values() for rows in trained]
    reader = ReadOnlyPool(pool_root / "pool")
    for name, values in zip(names, wanted, strict=True):
        assert torch.equal(collection(reader, name).eval()(bags).values(), values)


def test_who_finds_a_pool_locked_by_those_that_read_it_is_told_so_and_of_no_process_that_is_gone(pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        collection(pool, "users")
    with locked(pool_root / "pool"):
        for opens in (Pool, repair_pool, GroupLock):
            with pytest.raises(PoolBusy, match="is being read"):
                opens(pool_root / "pool")


def test_who_looks_at_a_pool_for_a_moment_keeps_nobody_out(pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        collection(pool, "users")
    for opens in (Pool, open_untrained, repair_pool, GroupLock):
        look = FileLock(pool_root / "pool" / "lock", os.O_RDONLY, shared=True)
        threading.Timer(0.2, look.release).start()
        opened = opens(pool_root / "pool")
        assert look.fd < 0
        for leave in ("close", "release"):
            getattr(opened, leave, lambda: None)()


def test_a_repair_says_who_keeps_others_out(pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        collection(pool, "users")
    (pool_root / "pool" / "lock").write_text("123456789")  # of a writer that was killed
    with (
        locked(pool_root / "pool", alone=True),
        pytest.raises(PoolBusy, match=f"open for writing in process {os.getpid()};"),
        locked(pool_root / "pool"),
    ):
        pass
