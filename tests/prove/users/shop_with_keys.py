"""A shop: users and items are 64-bit keys that nobody counted, some are left behind; a DataLoader with workers."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

torch.manual_seed(3)
torch.set_num_threads(2)
SAMPLES, BATCH = 4000, 128
A_PASS = SAMPLES // BATCH


class Purchases(Dataset):
    def __init__(self):
        draw = np.random.default_rng(1)
        catalogue = draw.integers(-(2**62), 2**62, 5000)
        self.items = [catalogue[(draw.zipf(1.3, draw.integers(1, 12)) - 1) % 5000] for _ in range(SAMPLES)]
        self.users = draw.integers(0, 2**63 - 1, 2000)[draw.integers(0, 2000, SAMPLES)]
        self.bought = (draw.random(SAMPLES) < 0.3).astype(np.float32)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return self.users[number], self.items[number], self.bought[number]


def collate(samples):
    users, items, bought = zip(*samples, strict=True)
    lengths = torch.tensor([len(some) for some in items])
    bags = (torch.from_numpy(np.concatenate(items)), lengths.cumsum(0) - lengths)
    return {"user": torch.tensor(np.array(users)), "item": bags, "bought": torch.tensor(np.array(bought))}


def batches(first):
    """From batch `first` on, each pass in an order of its own."""
    while True:
        number, begin = divmod(first, A_PASS)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))[: A_PASS * BATCH]
        yield from DataLoader(
            Purchases(), BATCH, sampler=order[begin * BATCH :].tolist(), collate_fn=collate, num_workers=2,
            generator=torch.Generator(),
        )  # fmt: skip
        first = (number + 1) * A_PASS


with holdfast.Pool(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/shop-pool", seed=7) as pool:
    rows = holdfast.EmbeddingBagCollection(
        pool,
        [
            holdfast.EmbeddingBagConfig(
                name="users", num_embeddings=None, embedding_dim=16, feature_names=["user"], ttl_steps=5
            ),
            holdfast.EmbeddingBagConfig(
                name="items",
                num_embeddings=None,
                embedding_dim=32,
                feature_names=["item"],
                admit_after=2,
                pooling="mean",
            ),
        ],
        optimizer=holdfast.Adam(lr=0.01),
    )
    net = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=optimizer, scheduler=schedule)
    checkpoint.resume()
    for batch in batches(pool.step):
        optimizer.zero_grad()
        logit = net(rows(batch).values()).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logit, batch["bought"]).backward()
        optimizer.step()
        rows.optimizer.step()
        schedule.step()
        checkpoint.commit()
        if pool.step == 200:
            break
