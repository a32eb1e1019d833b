"""Real data: a DLRM on holdfast learns what the same DLRM on torch.nn.EmbeddingBag learns, in the same order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.data import CriteoTsvConfig, CriteoTsvSource, Loader
from holdfast.models import DLRM
from holdfast.pools.optim import SGD
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.train.metrics import evaluate_scores

DATA = Path(os.environ.get("HOLDFAST_CRITEO", Path(__file__).parents[3] / "shared/data/criteo_8k"))
DIM = 8
ROWS = 2000


class Bags(nn.Module):
    """The peer: one torch.nn.EmbeddingBag a table."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum") for w in weights)

    def forward(self, features):
        size = features.stride()
        offsets = features.offsets()
        pooled = []
        for i, bag in enumerate(self.bags):
            starts = offsets[i * size : (i + 1) * size + 1]
            pooled.append(bag(features.values()[starts[0] : starts[-1]], starts[:-1] - starts[0]))
        return torch.cat(pooled, dim=1)


def test_auc_on_criteo_equals_that_of_plain_pytorch_with_the_same_seed_and_order(pool_root: Path) -> None:
    if not (DATA / "train.tsv").exists():
        pytest.skip(f"no Criteo data in {DATA}: set HOLDFAST_CRITEO")
    source = CriteoTsvSource(CriteoTsvConfig(paths=(DATA / "train.tsv",), num_embeddings=ROWS))
    held_out = CriteoTsvSource(CriteoTsvConfig(paths=(DATA / "valid.tsv", DATA / "test.tsv"), num_embeddings=ROWS))
    with Pool(pool_root / "pool", seed=1) as pool:
        rows = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f.name, feature_names=[f.name])
                for f in source.features
            ],
            optimizer=SGD(lr=0.3),
        )
        every_row = {name: (torch.arange(ROWS), torch.arange(ROWS)) for name in rows.keys()}  # noqa: SIM118
        with torch.no_grad():
            initial = rows(every_row).to_dict()
        peer = Bags([initial[name].clone() for name in rows.keys()])  # noqa: SIM118
        models = []
        for embeddings in (rows, peer):
            torch.manual_seed(2)
            models.append(
                DLRM(
                    embeddings=embeddings,
                    num_dense=source.num_dense,
                    embedding_dim=DIM,
                    num_features=len(source.features),
                    bottom=[64, DIM],
                    top=[64, 1],
                )
            )
        dense_lr = 0.05
        ours = torch.optim.SGD(models[0].parameters(), lr=dense_lr)
        bag_parameters = list(peer.parameters())
        theirs = torch.optim.SGD(
            [
                {"params": [*models[1].bottom.parameters(), *models[1].top.parameters()], "lr": dense_lr},
                {"params": bag_parameters, "lr": 0.3},
            ]
        )
        loss_function = nn.BCEWithLogitsLoss()
        with Loader(source, batch_size=128, seed=3) as loader:
            for _ in range(2 * len_in_batches(source, 128)):
                batch = next(loader)
                for model, optimizer in zip(models, (ours, theirs), strict=True):
                    optimizer.zero_grad()
                    loss_function(model(batch.dense, batch.features), batch.labels).backward()
                    optimizer.step()
                rows.optimizer.step()
                pool.commit(loader.samples)
        found = []
        for model in models:
            model.eval()
            with torch.no_grad(), Loader(held_out, batch_size=800, seed=0) as loader:
                batches = list(loader.once())
                logits = torch.cat([model(batch.dense, batch.features) for batch in batches])
            found.append(evaluate_scores(logits, torch.cat([batch.labels for batch in batches])))
    assert found[0].auc > 0.6
    assert abs(found[0].auc - found[1].auc) < 1e-3
    assert abs(found[0].log_loss - found[1].log_loss) < 1e-4


def len_in_batches(source: CriteoTsvSource, batch_size: int) -> int:
    return source.num_samples // batch_size
