"""Run in the peers' environment: trains TorchRec's managed collisions, saves them, and says what they read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SLOTS, DIM = 60, 4
cpu = torch.device("cpu")
tables = [EmbeddingBagConfig(name="goods", embedding_dim=DIM, num_embeddings=SLOTS, feature_names=["goods"])]
managed = MCHManagedCollisionModule(
    zch_size=SLOTS, device=cpu, eviction_interval=2, eviction_policy=DistanceLFU_EvictionPolicy(), input_hash_size=2**62
)
model = ManagedCollisionEmbeddingBagCollection(
    EmbeddingBagCollection(tables=tables, device=cpu), ManagedCollisionCollection({"goods": managed}, tables)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
draw = torch.Generator().manual_seed(1)


def read(ids: torch.Tensor) -> torch.Tensor:
    features = KeyedJaggedTensor.from_lengths_sync(["goods"], ids, torch.ones(len(ids), dtype=torch.int32))
    found = model(features)
    return (found[0] if isinstance(found, tuple) else found)["goods"]


model.train()
for _ in range(8):
    new = torch.randint(2**40, 2**60, (5,), generator=draw)
    optimizer.zero_grad()
    (read(torch.cat([torch.tensor([11, 2**59, 77]), new])) - 1.0).square().sum().backward()
    optimizer.step()
model.eval()
state = model.state_dict()
known = next(value for name, value in state.items() if name.endswith("_mch_sorted_raw_ids"))
known = known[known != torch.iinfo(torch.int64).max]
torch.save(state, Path(sys.argv[1]))
print(json.dumps({"ids": known.tolist(), "values": read(known).tolist()}))
