"""Retrieval: a user tower and an item tower, in-batch and sampled negatives, two collections with other optimizers."""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Adagrad, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, RowWiseAdam

USERS, ITEMS, BATCH, NEGATIVES = 2_000, 8_000, 64, 32


@dataclass
class Sampler:
    """Negatives by popularity, and pairs; keeps NumPy's generator in what it saves."""

    rng: np.random.Generator
    samples: int = 0

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        user = self.rng.integers(USERS, size=BATCH)
        item = (user * 7 + self.rng.integers(20, size=BATCH)) % ITEMS
        negative = np.minimum((self.rng.pareto(1.1, NEGATIVES) * 40).astype(np.int64), ITEMS - 1)
        self.samples += BATCH
        return torch.from_numpy(user), torch.from_numpy(item), torch.from_numpy(negative)

    def state_dict(self) -> dict:
        return {"rng": self.rng.bit_generator.state, "samples": self.samples}

    def load_state_dict(self, state: dict) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.samples = state["samples"]

    def seek(self, samples: int) -> None:
        assert samples == self.samples, "the position came with the generator's state"


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 80), nn.Tanh(), nn.Linear(80, 40))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(x), dim=1)


def bags(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids, torch.arange(len(ids) + 1)


def train(directory: str, last_step: int = 250) -> None:
    torch.manual_seed(8)
    with Pool(directory, seed=8, row_checksums=True) as pool:
        users = EmbeddingBagCollection(
            pool,
            [EmbeddingBagConfig(name="users", num_embeddings=USERS, embedding_dim=24, feature_names=["user"])],
            optimizer=Adagrad(lr=0.05),
        )
        items = EmbeddingBagCollection(
            pool,
            [EmbeddingBagConfig(name="items", num_embeddings=ITEMS, embedding_dim=56, feature_names=["item"])],
            optimizer=RowWiseAdam(lr=0.01),
        )
        towers = nn.ModuleDict({"user": Tower(24), "item": Tower(56)})
        temperature = nn.Parameter(torch.tensor(0.1))
        model = nn.ModuleDict({"towers": towers})
        model.register_parameter("temperature", temperature)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
        sampler = Sampler(np.random.default_rng(17))
        checkpoint = Checkpoint(pool, model=model, optimizer=optimizer, loader=sampler)
        checkpoint.resume()
        while pool.step < last_step:
            user, item, negative = sampler.batch()
            optimizer.zero_grad()
            left = towers["user"](users({"user": bags(user)}).values())
            right = towers["item"](items({"item": bags(torch.cat([item, negative]))}).values())
            logits = left @ right.T / temperature.clamp(min=0.02)
            loss = nn.functional.cross_entropy(logits, torch.arange(BATCH))
            loss.backward()
            optimizer.step()
            users.optimizer.step()
            items.optimizer.step()
            checkpoint.commit()


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/towers-pool")
