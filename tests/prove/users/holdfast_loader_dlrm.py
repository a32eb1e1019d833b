"""The README loop with sizes of my own: the loader of holdfast plans ahead, rows are announced, all on a disk."""

import os
import sys
from collections import deque

import torch

import holdfast
from holdfast.data import Loader, SyntheticConfig, SyntheticSource
from holdfast.models import DLRM

AHEAD = 3


def main(directory):
    torch.manual_seed(31)
    source = SyntheticSource(SyntheticConfig(num_samples=4000, rows=(5000, 70, 900, 11, 2500), lookups=3, num_dense=9))
    with holdfast.Pool(directory, seed=3, medium="block", log_bytes=8 << 20, scratchpad_bytes=4 << 20) as pool:
        tables = [
            holdfast.EmbeddingBagConfig(
                name=f.name, num_embeddings=f.num_embeddings, embedding_dim=24, feature_names=[f.name]
            )
            for f in source.features
        ]
        rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.Adagrad(lr=0.03))
        model = DLRM(embeddings=rows, num_dense=9, embedding_dim=24, num_features=5, bottom=[40, 24], top=[64, 1])
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.8, 0.99))
        loader = Loader(source, batch_size=180, seed=9, workers=2, transform=lambda batch: rows.plan(batch.features))
        checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        coming = deque()
        while pool.step < 300:
            while len(coming) < AHEAD:
                batch, planned = next(loader)
                rows.announce(planned)
                coming.append((batch, planned))
            batch, planned = coming.popleft()
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, planned), batch.labels)
            loss.backward()
            holdfast.clip_grad_norm_(model.parameters(), rows, 5.0)
            optimizer.step()
            rows.optimizer.step()
            checkpoint.commit(batch.first_sample + batch.size, loss=loss.detach())
        loader.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.expanduser("~/holdfast-dlrm-pool"))
