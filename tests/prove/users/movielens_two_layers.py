"""Ratings, as in MovieLens: one wide layer, Adam, a loader of my own that cuts batches from arrays."""

import argparse

import numpy as np
import torch
from torch import nn

import holdfast

USERS, MOVIES, RATINGS, BATCH = 943, 1682, 20_000, 256

parser = argparse.ArgumentParser()
parser.add_argument("--pool", default="/dev/shm/movielens-pool")
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()
torch.set_num_threads(args.threads)
torch.manual_seed(42)

made = np.random.default_rng(0)
users = torch.from_numpy(made.zipf(1.3, RATINGS) % USERS)
movies = torch.from_numpy(made.zipf(1.2, RATINGS) % MOVIES)
taste = torch.from_numpy(made.normal(size=(USERS,)))
ratings = (3.5 + taste[users] + torch.from_numpy(made.normal(0, 0.3, RATINGS))).float()


class Batches:
    def __init__(self, seed):
        self.seed = seed
        self.samples = 0

    def __next__(self):
        epoch, begin = divmod(self.samples, RATINGS // BATCH * BATCH)
        order = torch.randperm(RATINGS, generator=torch.Generator().manual_seed(self.seed + epoch))
        chosen = order[begin : begin + BATCH]
        self.samples += BATCH
        return users[chosen], movies[chosen], ratings[chosen]

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]

    def seek(self, samples):
        self.samples = samples


pool = holdfast.Pool(args.pool, seed=7)
rows = holdfast.EmbeddingBagCollection(
    pool,
    [
        holdfast.EmbeddingBagConfig(name="user", num_embeddings=USERS, embedding_dim=48, feature_names=["user"]),
        holdfast.EmbeddingBagConfig(name="movie", num_embeddings=MOVIES, embedding_dim=48, feature_names=["movie"]),
    ],
    optimizer=holdfast.Adam(lr=0.005),
)
model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
batches = Batches(seed=5)
checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer, loader=batches)
checkpoint.resume()
one_each = torch.arange(BATCH + 1)
while pool.step < 300:
    user, movie, rating = next(batches)
    optimizer.zero_grad()
    vectors = rows({"user": (user, one_each), "movie": (movie, one_each)}).values()
    loss = nn.functional.mse_loss(model(vectors).squeeze(1), rating)
    loss.backward()
    optimizer.step()
    rows.optimizer.step()
    checkpoint.commit()
    if pool.step % 10 == 0:
        print(f"{pool.step}: rmse {loss.item() ** 0.5:.4f}", flush=True)
pool.close()
