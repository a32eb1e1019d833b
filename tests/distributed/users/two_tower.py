"""A retrieval model of somebody's own: two towers over generated MovieLens-like data, in-batch negatives, own loop.

torchrun --nproc-per-node 2 two_tower.py runs/towers
torchrun --nproc-per-node 4 two_tower.py runs/towers --memory-ranks 2
python two_tower.py runs/towers
"""

import argparse
import os
import random
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import holdfast

USERS, MOVIES, TAGS, BATCH = 6000, 4000, 300, 64

parser = argparse.ArgumentParser()
parser.add_argument("pool")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--memory-ranks", type=int, default=0)
parser.add_argument("--medium", default="auto")
parser.add_argument("--dense-interval", type=int, default=1)
parser.add_argument("--kill", default="-1:0", metavar="RANK:STEP", help="somewhere in the step after that one")
args = parser.parse_args()
torch.set_num_threads(1)


def watched(step: int, part: int, parts: int) -> tuple[dict, dict, torch.Tensor]:
    """This trainer's part of what was watched in a step: who, what, and how much it was liked."""
    generator = torch.Generator().manual_seed(step)
    users = (torch.rand(BATCH, generator=generator) ** 3 * USERS).long()
    movies = (torch.rand(BATCH, generator=generator) ** 2 * MOVIES).long()
    num_tags = torch.randint(0, 4, (BATCH,), generator=generator)
    tags = torch.randint(0, TAGS, (BATCH, 3), generator=generator)
    stars = torch.rand(BATCH, generator=generator)
    mine = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    flat = torch.cat([row[:n] for row, n in zip(tags[mine], num_tags[mine], strict=True)])
    ends = torch.cat([torch.zeros(1, dtype=torch.long), num_tags[mine].cumsum(0)])
    one_each = torch.arange(len(users[mine]) + 1)
    return {"user": (users[mine], one_each)}, {"movie": (movies[mine], one_each), "tags": (flat, ends)}, stars[mine]


def die(pool: holdfast.Pool, step: int) -> None:
    while pool.step < step:
        time.sleep(0.0005)
    time.sleep(random.Random(step).random() * 0.01)
    os.kill(os.getpid(), 9)


group = holdfast.GroupOptions(memory_ranks=args.memory_ranks, shards=8, split_rows=1000, timeout=20.0)
with holdfast.Pool(
    args.pool, seed=5, medium=args.medium, dense_interval=args.dense_interval, log_bytes=1 << 20, group=group
) as pool:
    who = holdfast.EmbeddingBagCollection(
        pool,
        [holdfast.EmbeddingBagConfig(num_embeddings=USERS, embedding_dim=16, name="users", feature_names=["user"])],
        optimizer=holdfast.Adam(lr=0.01),
    )
    what = holdfast.EmbeddingBagCollection(
        pool,
        [
            holdfast.EmbeddingBagConfig(
                num_embeddings=MOVIES, embedding_dim=16, name="movies", feature_names=["movie"]
            ),
            holdfast.EmbeddingBagConfig(
                num_embeddings=TAGS, embedding_dim=8, name="tags", feature_names=["tags"], pooling="mean"
            ),
        ],
    )
    random.seed(1), np.random.seed(1)
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # dropout differs from rank to rank, on purpose
    user_tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 12))
    movie_tower = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12))
    towers = nn.ModuleDict({"user": user_tower, "movie": movie_tower, "who": who, "what": what})
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    checkpoint = holdfast.Checkpoint(pool, model=towers, optimizer=optimizer, scheduler=scheduler)
    step = checkpoint.resume()
    rank, dies_at = map(int, args.kill.split(":"))
    if pool.group.rank == rank:
        threading.Thread(target=die, args=(pool, dies_at), daemon=True).start()
    if not pool.group.is_trainer:
        pool.serve()
    else:
        part, parts = pool.part
        for step in range(step + 1, args.steps + 1):
            users, movies, stars = watched(step, part, parts)
            mine = user_tower(who(users).values())
            theirs = movie_tower(what(movies).values())
            loss = (
                functional.cross_entropy(mine @ theirs.T, torch.arange(len(stars)), reduction="none") * stars
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            pool.average_gradients(towers)
            holdfast.clip_grad_norm_(towers.parameters(), [who, what], 1.0)
            optimizer.step()
            who.optimizer.step()
            what.optimizer.step()
            scheduler.step()
            checkpoint.commit(loss=loss.detach())
        checkpoint.flush()
        print(f"rank {pool.group.rank}: step {pool.step}, durable {pool.durable_step}", flush=True)
