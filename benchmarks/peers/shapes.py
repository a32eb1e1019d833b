"""The models of the comparison: three DLRMs whose time goes to different places."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A DLRM with dot interaction. ``bottom`` and ``top`` are layer sizes without the input; every bag has
    ``lookups_per_bag`` ids and sum pooling."""

    name: str
    num_tables: int
    num_embeddings: int
    embedding_dim: int
    lookups_per_bag: int
    batch_size: int
    num_dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


KAGGLE = Shape(
    name="kaggle",
    num_tables=26,
    num_embeddings=1_000_000,
    embedding_dim=16,
    lookups_per_bag=1,
    batch_size=2048,
    num_dense=13,
    bottom=(512, 256, 64, 16),
    top=(512, 256, 1),
)
RM1 = Shape(
    name="rm1",
    num_tables=8,
    num_embeddings=1_000_000,
    embedding_dim=32,
    lookups_per_bag=80,
    batch_size=1024,
    num_dense=128,
    bottom=(64, 32),
    top=(64, 1),
)
RM3 = Shape(
    name="rm3",
    num_tables=10,
    num_embeddings=1_000_000,
    embedding_dim=32,
    lookups_per_bag=20,
    batch_size=1024,
    num_dense=2560,
    bottom=(1024, 256, 32),
    top=(512, 256, 1),
)

SHAPES: dict[str, Shape] = {shape.name: shape for shape in (KAGGLE, RM1, RM3)}
