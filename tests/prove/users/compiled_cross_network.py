"""A deep and cross network whose dense part is compiled, trained with momentum under OneCycleLR."""

import sys

import torch
from torch import nn

from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdagrad

BATCH, WIDTH = 200, 3 * 16 + 6


class Cross(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.deep = nn.Sequential(nn.Linear(WIDTH, 72), nn.BatchNorm1d(72), nn.ReLU(), nn.Linear(72, 36), nn.ReLU())
        self.head = nn.Linear(WIDTH + 36, 1)

    def forward(self, x):
        crossed = x
        for layer in self.weights:
            crossed = x * layer(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(x)], 1)).squeeze(1)


def batch_of(step):
    g = torch.Generator().manual_seed(1000 + step)
    ids = {name: torch.randint(0, size, (BATCH,), generator=g) for name, size in (("a", 100), ("b", 7000), ("c", 900))}
    numbers = torch.randn(BATCH, 6, generator=g)
    labels = ((ids["a"] % 3 == 0) & (numbers[:, 0] > 0)).float()
    return ids, numbers, labels


def main():
    torch.manual_seed(123)
    pool = Pool(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/cross-pool", seed=5)
    rows = EmbeddingBagCollection(
        pool,
        [
            EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=16, feature_names=[name])
            for name, size in (("a", 100), ("b", 7000), ("c", 900))
        ],
        optimizer=RowWiseAdagrad(lr=0.03),
    )
    network = Cross()
    compiled = torch.compile(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=1000)
    checkpoint = Checkpoint(pool, model=network, optimizer=optimizer, scheduler=schedule)
    checkpoint.resume()
    offsets = torch.arange(BATCH + 1)
    while pool.step < 1000:
        ids, numbers, labels = batch_of(pool.step)
        optimizer.zero_grad(set_to_none=True)
        x = torch.cat([rows({name: (values, offsets) for name, values in ids.items()}).values(), numbers], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(compiled(x), labels)
        loss.backward()
        optimizer.step()
        rows.optimizer.step()
        schedule.step()
        checkpoint.commit((pool.step + 1) * BATCH, loss=loss.detach())
    pool.close()


if __name__ == "__main__":
    main()
