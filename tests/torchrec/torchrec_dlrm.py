"""Trains TorchRec's own DLRM on holdfast's collection beside holdfast's DLRM; prints what the rows differ by, as JSON.

Runs in the peers' environment (`make bench` makes it), where TorchRec is, with src/ on the path.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torchrec.models.dlrm import DLRM as TorchRecDLRM  # noqa: N811  (which of the two)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from holdfast import _core
from holdfast.models import DLRM
from holdfast.pools.optim import RowWiseAdagrad
from holdfast.pools.pool import Pool
from holdfast.rows.embedding import EmbeddingBagCollection

NUM_TABLES, ROWS, DIM, BATCH, STEPS = 4, 200, 8, 64, 20


def collection(pool: Pool) -> EmbeddingBagCollection:
    """From TorchRec's own configs; one table is mean-pooled, one is read by two features."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=[f"f{i}"] if i else ["f0", "g0"],
            pooling=PoolingType.MEAN if i == 1 else PoolingType.SUM,
        )
        for i in range(NUM_TABLES)
    ]
    return EmbeddingBagCollection(pool, tables, optimizer=RowWiseAdagrad(lr=0.1))


def copy_dense(theirs: TorchRecDLRM, ours: DLRM, num_vectors: int) -> None:
    """TorchRec takes the pairs of the interaction from the upper triangle, holdfast from the lower: columns move."""
    target = list(theirs.dense_arch.parameters()) + list(theirs.over_arch.parameters())
    source = list(ours.bottom.parameters()) + list(ours.top.parameters())
    lower = [(i, j) for i in range(num_vectors) for j in range(i)]
    upper = [(i, j) for i in range(num_vectors) for j in range(i + 1, num_vectors)]
    columns = list(range(DIM)) + [DIM + lower.index((j, i)) for i, j in upper]
    with torch.no_grad():
        first_of_top = next(ours.top.parameters())
        for to, weights in zip(target, source, strict=True):
            to.copy_(weights[:, columns] if weights is first_of_top else weights)


def batch(number: int, keys: list[str]) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(keys) * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(BATCH, 5, generator=generator)
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    return dense, KeyedJaggedTensor.from_lengths_sync(keys, values, lengths), labels


def rows_of(directory: Path) -> torch.Tensor:
    reader = _core.Reader(str(directory))
    tables = []
    for table in range(NUM_TABLES):
        weights = torch.zeros(ROWS * DIM * 4, dtype=torch.uint8)
        state = torch.zeros(ROWS * 4, dtype=torch.uint8)
        reader.read_rows(table, 0, ROWS, weights.numpy(), state.numpy())
        tables.append(weights.view(torch.float32))
    return torch.stack(tables)


def main() -> None:
    losses: dict[str, list[float]] = {"torchrec": [], "holdfast": []}
    rows = {}
    with tempfile.TemporaryDirectory() as root:
        torch.manual_seed(1)
        dense_weights: DLRM | None = None
        for name in ("holdfast", "torchrec"):
            directory = Path(root) / name
            with Pool(directory, seed=5) as pool:
                tables = collection(pool)
                keys = tables.keys()
                if name == "holdfast":
                    model: torch.nn.Module = DLRM(
                        embeddings=tables,
                        num_dense=5,
                        embedding_dim=DIM,
                        num_features=len(keys),
                        bottom=[16, DIM],
                        top=[12, 1],
                    )
                    dense_weights = DLRM(
                        embeddings=torch.nn.Identity(),
                        num_dense=5,
                        embedding_dim=DIM,
                        num_features=len(keys),
                        bottom=[16, DIM],
                        top=[12, 1],
                    )
                    dense_weights.load_state_dict(model.state_dict())
                else:
                    assert dense_weights is not None
                    model = TorchRecDLRM(
                        embedding_bag_collection=tables,
                        dense_in_features=5,
                        dense_arch_layer_sizes=[16, DIM],
                        over_arch_layer_sizes=[12, 1],
                    )
                    copy_dense(model, dense_weights, len(keys) + 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for number in range(1, STEPS + 1):
                    dense, features, labels = batch(number, list(reversed(keys)))
                    optimizer.zero_grad()
                    logits = model(dense, features).reshape(-1)
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
                    loss.backward()
                    optimizer.step()
                    tables.optimizer.step()
                    pool.commit(number * BATCH)
                    losses[name].append(loss.item())
            rows[name] = rows_of(directory)
    json.dump(
        {
            "largest_row_difference": float((rows["torchrec"] - rows["holdfast"]).abs().max()),
            "largest_row_change": float(rows["holdfast"].abs().max()),
            "largest_loss_difference": max(
                abs(a - b) for a, b in zip(losses["torchrec"], losses["holdfast"], strict=True)
            ),
            "steps": STEPS,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
