"""A pool that is read while nobody trains it."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.pools.read_only import ReadOnlyPool


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
