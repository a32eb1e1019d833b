"""benchmarks/scaleout: batches in memory, in place of a trainer's loader."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast
from holdfast.models.dlrm import DLRM
from holdfast.train.options import TrainConfig
from holdfast.train.trainer import Trainer
from peers.batches import make_batches
from peers.shapes import Shape
from scaleout.batches import PreparedLoader, PreparedSource, part_of

SHAPE = Shape(
    name="small", num_tables=2, num_embeddings=100, embedding_dim=4, lookups_per_bag=3, batch_size=8, num_dense=5,
    bottom=(4,), top=(1,),
)  # fmt: skip


def losses(directory: Path, *, prepared: bool) -> list[float]:
    torch.manual_seed(1)
    batches = make_batches(SHAPE, 3)
    source = PreparedSource(SHAPE, batches)
    with holdfast.Pool(directory, seed=1) as pool:
        tables = [
            holdfast.EmbeddingBagConfig(
                name=feature.name, num_embeddings=100, embedding_dim=4, feature_names=[feature.name]
            )
            for feature in source.features
        ]
        rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.SGD(lr=0.1))
        model = DLRM(embeddings=rows, num_dense=5, embedding_dim=4, num_features=2, bottom=(4,), top=(8, 1))
        dense = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.1)
        config = TrainConfig(batch_size=8, steps=7, epochs=3, shuffle=False)
        trainer = Trainer(config, pool=pool, rows=rows, model=model, dense_optimizer=dense, source=source)
        if prepared:
            parts = [part_of(batch, SHAPE, 0, 1)[0] for batch in batches]
            trainer.loader.close()
            trainer.loader = PreparedLoader(source, parts, 8, lambda batch: rows.plan(batch.features, ahead=False))
        trainer.recover()
        with trainer:
            return [step.loss for step in trainer.steps()]


def test_a_trainer_takes_them_in_place_of_its_loader_and_trains_as_with_it(pool_root: Path) -> None:
    of_loader = losses(pool_root / "loader", prepared=False)
    assert len(of_loader) == 7
    assert losses(pool_root / "prepared", prepared=True) == of_loader
