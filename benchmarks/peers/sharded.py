"""TorchRec's DistributedModelParallel: tables whole on one rank each, the network data-parallel, over gloo.

Invariants
- Every rank makes the global batch and trains on its own part of the samples; losses and gradients are means over all
  samples, as in one process.
- Table t is on rank t * ranks / tables: each rank has as many neighbours as the next, and the pooled features come back
  in the tables' order.
- Tables are updated in backward, by FBGEMM's fused operator. On CPU TorchRec has no other kernel that shards them by
  table, and refuses to shard them by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from peers.batches import Batch
from peers.systems import EPSILON, LEARNING_RATE, PeerTables, fill_table, torchrec_configs

if TYPE_CHECKING:
    from peers.shapes import Shape


class ShardedTables(PeerTables):
    """An EmbeddingBagCollection that is not there yet: ``parallel`` of the model around it makes the shards."""

    def __init__(self, shape: Shape, optimizer: str) -> None:
        super().__init__()
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        kind: Any = {"rowwise_adagrad": RowWiseAdagrad, "sgd": torch.optim.SGD}[optimizer]
        self.optimizer_label = f"torchrec DistributedModelParallel, table-wise, fused {kind.__name__}"
        self._shape = shape
        self._keys = [f"f{number}" for number in range(shape.num_tables)]
        self._keyed_jagged_tensor: Any = KeyedJaggedTensor
        self.collection: Any = EmbeddingBagCollection(
            tables=torchrec_configs(shape),
            device=torch.device("meta"),
        )
        options = {"lr": LEARNING_RATE} | ({} if optimizer == "sgd" else {"eps": EPSILON})
        _apply_optimizer_in_backward(kind, self.collection.parameters(), options)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.ids, batch.offsets.diff()

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        # made anew for each step: a KeyedJaggedTensor caches what is computed from it
        ids, lengths = sparse
        features = self._keyed_jagged_tensor(keys=self._keys, values=ids, lengths=lengths)
        pooled: Tensor = self.collection(features).values()
        return pooled

    def tables(self) -> list[Tensor]:
        return list(self.tables_here().values())

    def tables_here(self) -> dict[int, Tensor]:
        """The weights on this rank by number of the table; writing to them writes to the tables."""
        state = self.collection.state_dict()
        weights = {number: state[f"embedding_bags.t{number}.weight"] for number in range(self._shape.num_tables)}
        return {number: shard.tensor.detach() for number, weight in weights.items() for shard in weight.local_shards()}


def part_of(batch: Batch, shape: Shape) -> Batch:
    """This rank's samples of a global batch."""
    size = shape.batch_size // dist.get_world_size()
    samples = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    ids = batch.ids.view(shape.num_tables, shape.batch_size, shape.lookups_per_bag)[:, samples]
    return Batch(
        dense=batch.dense[samples].clone(),
        ids=ids.reshape(-1),
        offsets=torch.arange(shape.num_tables * size + 1) * shape.lookups_per_bag,
        labels=batch.labels[samples].clone(),
    )


def parallel(model: nn.Module, tables: ShardedTables, shape: Shape) -> nn.Module:
    """``model``, which is around ``tables``, over all ranks; the tables filled like those of every system."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan

    num_ranks = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        tables.collection,
        {
            f"t{number}": table_wise(rank=number * num_ranks // shape.num_tables, compute_kernel="fused")
            for number in range(shape.num_tables)
        },
        sharder=sharder,
        world_size=num_ranks,
        local_size=num_ranks,
        device_type="cpu",
    )
    sharded: nn.Module = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings.collection": plan}),
        sharders=[sharder],
        init_parameters=False,  # the network has its own; what is left on the meta device is sharded
    )
    for number, table in tables.tables_here().items():
        fill_table(table, number, shape)
    return sharded


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
