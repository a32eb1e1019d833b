"""Trains TorchRec's EmbeddingCollection beside holdfast's, through one network, and prints what differs, as JSON.

Runs in the peers' environment (`make bench` makes it), where TorchRec is, with src/ on the path.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import holdfast

DIM, BATCH, STEPS, KEYS = 8, 16, 10, ["bought", "seen", "place"]
TABLES = [
    EmbeddingConfig(name="goods", num_embeddings=60, embedding_dim=DIM, feature_names=["seen", "bought"]),
    EmbeddingConfig(name="places", num_embeddings=30, embedding_dim=DIM, feature_names=["place"]),
]


def batch(number: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 5, (len(KEYS) * BATCH,), generator=draw)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths)


def loss_of(vectors: dict[str, Any]) -> torch.Tensor:
    seen, bought = (vectors[name].to_padded_dense(3, padding_value=0.5) for name in ("seen", "bought"))
    places = vectors["place"].values()
    assert len(places) == int(vectors["place"].lengths().sum()) == int(vectors["place"].offsets()[-1])
    return ((seen * bought).sum(-1) - 1).square().mean() + places.square().sum(-1).mean()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, holdfast.Pool(directory + "/pool", seed=1) as pool:
        ours = holdfast.EmbeddingCollection(pool, TABLES, optimizer=holdfast.SGD(lr=0.5))
        checkpoint = holdfast.Checkpoint(pool, model=torch.nn.Linear(1, 1), optimizer=[])
        checkpoint.resume()
        theirs = EmbeddingCollection(tables=TABLES, device=torch.device("cpu"))
        before = [ours.read(number, torch.arange(table.num_embeddings)) for number, table in enumerate(TABLES)]
        with torch.no_grad():
            for weights, table in zip(before, TABLES, strict=True):
                theirs.embeddings[table.name].weight.copy_(weights)
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
        difference = 0.0
        for number in range(STEPS):
            found, expected = ours(batch(number)), theirs(batch(number))
            assert sorted(found) == sorted(expected)
            losses = loss_of(found), loss_of(expected)
            difference = max(difference, abs(float(losses[0]) - float(losses[1])))
            optimizer.zero_grad()
            for loss in losses:
                loss.backward()
            optimizer.step()
            ours.optimizer.step()
            checkpoint.commit()
        after = [ours.read(number, torch.arange(table.num_embeddings)) for number, table in enumerate(TABLES)]
        wanted = [theirs.embeddings[table.name].weight for table in TABLES]
        said = {
            "largest_loss_difference": difference,
            "largest_row_difference": max(float((a - b).abs().max()) for a, b in zip(after, wanted, strict=True)),
            "largest_row_change": max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)),
        }
    sys.stdout.write(json.dumps(said) + "\n")


main()
