"""torch.utils.data as everybody has it, two worker processes, warm-up and cosine decay, AdamW with clipping."""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import holdfast
from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdagrad

BATCH = 128
FIELDS = {"site": 300, "app": 5000, "device": 40, "hour": 24}


class Clicks(Dataset):
    """Everything of sample i is a function of i."""

    def __len__(self):
        return 6000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.stack([torch.randint(size, (), generator=g) for size in FIELDS.values()])
        numbers = torch.randn(10, generator=g)
        return ids, numbers, ((ids[3] < 9).float() + numbers[0] > 0.7).float()


class Resumable(Sampler):
    """Epoch after epoch, each shuffled anew, from any position."""

    def __init__(self, size, seed):
        self.size, self.seed, self.start = size, seed, 0

    def __iter__(self):
        position = self.start
        while True:
            epoch, offset = divmod(position, self.size)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed * 1000 + epoch))
            for i in order[offset:].tolist():
                yield i
            position = (epoch + 1) * self.size


class Stream:
    """Counts what was trained on, not what the workers have fetched ahead."""

    def __init__(self, dataset):
        self.sampler = Resumable(len(dataset), seed=3)
        # A generator of its own: iterating a DataLoader draws from the global one otherwise.
        self.loader = DataLoader(
            dataset, batch_size=BATCH, sampler=self.sampler, num_workers=2, generator=torch.Generator().manual_seed(0)
        )
        self.samples = 0
        self.batches = None

    def __next__(self):
        if self.batches is None:
            self.batches = iter(self.loader)
        batch = next(self.batches)
        self.samples += BATCH
        return batch

    def seek(self, samples):
        self.samples = self.sampler.start = samples
        self.batches = None

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.seek(state["samples"])


class Network(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.body = nn.Sequential(
            nn.Linear(rows.output_width + 10, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 1)
        )

    def forward(self, ids, numbers):
        offsets = torch.arange(len(ids) + 1)
        vectors = self.rows({field: (ids[:, i], offsets) for i, field in enumerate(FIELDS)})
        return self.body(torch.cat([vectors.values(), numbers], 1)).squeeze(1)


def main(where):
    torch.manual_seed(11)
    with Pool(where, seed=2) as pool:
        tables = [
            EmbeddingBagConfig(name=field, num_embeddings=size, embedding_dim=12, feature_names=[field])
            for field, size in FIELDS.items()
        ]
        model = Network(EmbeddingBagCollection(pool, tables, optimizer=RowWiseAdagrad(lr=0.02)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _Factor(warm_up=10, total=400))
        stream = Stream(Clicks())
        checkpoint = Checkpoint(pool, model=model, optimizer=optimizer, scheduler=schedule, loader=stream)
        checkpoint.resume()
        model.train()
        while pool.step < 400:
            ids, numbers, clicked = next(stream)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), clicked)
            loss.backward()
            holdfast.clip_grad_norm_(model.parameters(), model.rows, 1.0)
            optimizer.step()
            model.rows.optimizer.step()
            schedule.step()
            checkpoint.commit()


class _Factor:
    """Of the learning rate. A class, because a lambda cannot be written down."""

    def __init__(self, warm_up, total):
        self.warm_up, self.total = warm_up, total

    def __call__(self, step):
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - self.warm_up) / (self.total - self.warm_up)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/clicks-pool")
