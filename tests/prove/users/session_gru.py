"""Next item of a session: an nn.Embedding of positions beside the pool, GRU, attention, dropout of the global seed."""

import random
import sys

import numpy as np
import torch
from torch import nn

import holdfast

ITEMS, LENGTH, BATCH, DIM = 3000, 12, 32, 32
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
torch.set_num_threads(2)


class SessionModel(nn.Module):
    def __init__(self, items):
        super().__init__()
        self.items = items
        self.positions = nn.Embedding(LENGTH, DIM)
        self.gru = nn.GRU(DIM, 64, num_layers=2, batch_first=True, dropout=0.1)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, DIM)

    def forward(self, sessions):
        flat = sessions.reshape(-1)
        vectors = self.items({"item": (flat, torch.arange(len(flat) + 1))}).values()
        x = vectors.view(len(sessions), LENGTH, DIM) + self.positions(torch.arange(LENGTH))
        x, _ = self.gru(x)
        heads = [layer(x).view(len(x), LENGTH, 4, 16).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        x = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(len(sessions), LENGTH, 64)), vectors.view(-1, LENGTH, DIM)


def sessions():
    """Drawn from Python's and NumPy's global generators, as old code does."""
    start = [random.randrange(ITEMS) for _ in range(BATCH)]
    steps = np.random.randint(1, 5, (BATCH, LENGTH)).cumsum(1)
    return torch.tensor((np.array(start)[:, None] + steps) % ITEMS)


with holdfast.Pool(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/session-pool", seed=4, dense_interval=2) as pool:
    items = holdfast.EmbeddingBagCollection(
        pool,
        [holdfast.EmbeddingBagConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])],
        optimizer=holdfast.RowWiseAdagrad(lr=0.05),
    )
    model = SessionModel(items)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer)
    checkpoint.resume()
    for step in range(pool.step, 200):
        batch = sessions()
        optimizer.zero_grad()
        out, vectors = model(batch)
        scores = torch.einsum("bld,bmd->blm", out[:, :-1], vectors[:, 1:])
        target = torch.arange(LENGTH - 1).expand(BATCH, -1)
        loss = nn.functional.cross_entropy(scores.reshape(-1, LENGTH - 1), target.reshape(-1))
        loss.backward()
        optimizer.step()
        items.optimizer.step()
        checkpoint.commit((step + 1) * BATCH)
