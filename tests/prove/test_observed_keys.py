"""What `holdfast prove` sees of a table whose ids are keys: the keys and their values, wherever their rows are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from holdfast import SGD, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.proving.observation import Values, row_leaves
from holdfast.proving.record import Leaf

KEYS = torch.tensor([7, -3, 2**62])


def observed(directory: Path, *planned_before: int) -> list[Leaf]:
    """After a step that trains KEYS, in a table that has room for two keys more."""
    table = EmbeddingBagConfig(
        name="items", num_embeddings=None, capacity=len(KEYS) + 2, embedding_dim=4,
        feature_names=["item"],
    )  # fmt: skip
    with Pool(directory, seed=1) as pool, tempfile.TemporaryFile() as file:
        rows = EmbeddingBagCollection(pool, [table], optimizer=SGD(lr=0.5))
        checkpoint = Checkpoint(pool, model=torch.nn.Linear(1, 1), optimizer=[])
        checkpoint.resume()
        if planned_before:
            rows.plan({"item": torch.tensor(planned_before)})
        planned = rows.plan({"item": KEYS})
        rows(planned).values().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
        return [*row_leaves([(rows, planned)], Values(file, 1 << 20)), *row_leaves([(rows, planned)], Values(file, 0))]


def test_a_keys_row_and_an_observation_make_no_difference(pool_root: Path):
    alone = observed(pool_root / "alone")
    assert [(leaf.part, leaf.name) for leaf in alone[:2]] == [
        ("batch", "keys that the batch reads of table 'items'"),
        ("rows", "table 'items'"),
    ]
    shown = [leaf.digest for leaf in alone]
    assert shown[:2] == shown[2:]
    assert [leaf.digest for leaf in observed(pool_root / "behind", 5, 11)] == shown
