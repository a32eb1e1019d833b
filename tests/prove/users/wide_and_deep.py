"""Wide and deep: the wide part is a table of dimension one with SGD, the deep part has an optimizer of its own."""

import itertools
import sys
import time

import torch
from torch import nn

from holdfast import SGD, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdagrad

COLUMNS = {"age": 80, "zip": 9000, "genre": 19, "decade": 11}
CROSSED = 50_000


def hashed(a, b):
    return (a * 1_000_003 + b * 8191) % CROSSED


def examples(start):
    for number in itertools.count(start):
        g = torch.Generator().manual_seed(number)
        ids = {name: torch.randint(size, (96,), generator=g) for name, size in COLUMNS.items()}
        cross = torch.stack([hashed(ids["age"], ids["genre"]), hashed(ids["zip"], ids["decade"])], 1)
        label = ((ids["age"] + ids["genre"]) % 4 == 0).float()
        yield ids, cross, label


def main(directory):
    began = time.time()
    torch.manual_seed(64)
    torch.use_deterministic_algorithms(True)
    with Pool(directory, seed=12, dense_interval=4) as pool:
        deep = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=10, feature_names=[name])
                for name, size in COLUMNS.items()
            ],
            optimizer=RowWiseAdagrad(lr=0.04),
        )
        wide = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(
                    name="wide",
                    num_embeddings=CROSSED,
                    embedding_dim=1,
                    feature_names=["cross"],
                    weight_init_min=0.0,
                    weight_init_max=0.0,
                )
            ],
            optimizer=SGD(lr=0.1),
        )
        bias = nn.Parameter(torch.zeros(1))
        network = nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 1))
        model = nn.ModuleDict({"deep": network, "wide": nn.ParameterList([bias])})
        optimizers = [
            torch.optim.AdamW(network.parameters(), lr=1e-3),
            torch.optim.SGD([bias], lr=0.01),
        ]
        schedules = [
            torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=5, gamma=0.9),
            torch.optim.lr_scheduler.ExponentialLR(deep.optimizer, gamma=0.999),
        ]
        checkpoint = Checkpoint(pool, model=model, optimizer=optimizers, scheduler=schedules)
        stream = examples(checkpoint.resume())
        offsets, pairs = torch.arange(97), torch.arange(0, 193, 2)
        while pool.step < 600:
            ids, cross, label = next(stream)
            for optimizer in optimizers:
                optimizer.zero_grad()
            logit = network(deep({name: (values, offsets) for name, values in ids.items()}).values())
            logit = logit + wide({"cross": (cross.reshape(-1), pairs)}).values() + bias
            loss = nn.functional.binary_cross_entropy_with_logits(logit.squeeze(1), label)
            loss.backward()
            for optimizer in (*optimizers, deep.optimizer, wide.optimizer):
                optimizer.step()
            for schedule in schedules:
                schedule.step()
            checkpoint.commit((pool.step + 1) * 96)
            if pool.step % 50 == 0:
                print(f"step {pool.step}, {time.time() - began:.0f} s, loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/wide-pool")
