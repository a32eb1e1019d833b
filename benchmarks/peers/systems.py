"""The peers' embedding tables behind one small interface, so that one loop measures them all.

Invariants
- ``prepare`` brings a batch's ids into the form that the system reads fastest. It runs before anything is timed, which
  is to the peers' advantage: in training a loader would have to do it.
- ``forward`` gives ``[B, F * D]``. ``backward`` of it updates the tables where the optimizer is fused; where it is not,
  ``apply`` does, and is timed with backward.
- Tables start from the same values in every system (``fill_tables``), so that equal optimizers give equal losses.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.batches import Batch
    from peers.shapes import Shape

LEARNING_RATE = 0.01
EPSILON = 1e-8


def torchrec_configs(shape: Shape) -> list[Any]:
    """TorchRec's configurations of a shape's tables, each with a feature of its own."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=shape.embedding_dim,
            num_embeddings=shape.num_embeddings,
            feature_names=[f"f{number}"],
        )
        for number in range(shape.num_tables)
    ]


class PeerTables(nn.Module):
    """All tables of a shape, with their optimizer. ``optimizer_label`` says what the optimizer really is."""

    optimizer_label: str

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The ids of ``batch`` as ``forward`` wants them."""

    @abstractmethod
    def tables(self) -> Sequence[Tensor]:
        """The weights, ``[num_embeddings, embedding_dim]`` each; writing to them writes to the tables."""

    def apply_gradients(self) -> None:
        """What backward has left to do."""

    def optimizer_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside ``state_dict()``."""
        return {}


def fill_tables(system: PeerTables, shape: Shape) -> None:
    for number, table in enumerate(system.tables()):
        fill_table(table, number, shape)


def fill_table(table: Tensor, number: int, shape: Shape, seed: int = 1) -> None:
    """Uniform in +-1/sqrt(num_embeddings), a function of (seed, number of the table)."""
    bound = 1 / math.sqrt(shape.num_embeddings)
    with torch.no_grad():
        table.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed * 1000 + number))


class FbgemmTables(PeerTables):
    """One table-batched embedding operator of FBGEMM over all tables, optimizer fused into backward."""

    def __init__(self, shape: Shape, optimizer: str) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kind = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}[optimizer]
        self.optimizer_label = f"FBGEMM {kind.value}"
        table = (shape.num_embeddings, shape.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.operator = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * shape.num_tables,
            optimizer=kind,
            learning_rate=LEARNING_RATE,
            eps=EPSILON,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.ids, batch.offsets

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        pooled: Tensor = self.operator(*sparse)
        return pooled

    def tables(self) -> Sequence[Tensor]:
        weights: list[Tensor] = self.operator.split_embedding_weights()
        return weights


class TorchrecTables(PeerTables):
    """TorchRec's FusedEmbeddingBagCollection, which calls the same FBGEMM operator from a KeyedJaggedTensor.

    Its plain EmbeddingBagCollection with apply_optimizer_in_backward has dense gradients as large as the tables on CPU,
    and is many times slower.
    """

    def __init__(self, shape: Shape, optimizer: str) -> None:
        super().__init__()
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        kind: Any = {"rowwise_adagrad": RowWiseAdagrad, "sgd": torch.optim.SGD}[optimizer]
        self.optimizer_label = f"torchrec fused {kind.__name__}"
        self._keys = [f"f{number}" for number in range(shape.num_tables)]
        self._keyed_jagged_tensor: Any = KeyedJaggedTensor
        self.collection = FusedEmbeddingBagCollection(
            tables=torchrec_configs(shape),
            optimizer_type=kind,
            optimizer_kwargs={"lr": LEARNING_RATE} | ({} if optimizer == "sgd" else {"eps": EPSILON}),
            device=torch.device("cpu"),
        )

    def prepare(self, batch: Batch) -> Any:
        return batch.ids, batch.offsets

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        # made anew for each step: a KeyedJaggedTensor caches what is computed from it
        ids, offsets = sparse
        features = self._keyed_jagged_tensor.from_offsets_sync(keys=self._keys, values=ids, offsets=offsets)
        pooled: Tensor = self.collection(features).values()
        return pooled

    def tables(self) -> Sequence[Tensor]:
        return [bag.weight.data for bag in self.collection.embedding_bags.values()]

    def optimizer_state(self) -> dict[str, Any]:
        return {"fused_optimizer": self.collection.fused_optimizer().state_dict()}


class EmbeddingBagTables(PeerTables):
    """torch.nn.EmbeddingBag with sparse gradients, and PyTorch's own optimizers.

    PyTorch has no row-wise Adagrad: its Adagrad keeps a state per weight, not per row, and stands in for it.
    """

    def __init__(self, shape: Shape, optimizer: str) -> None:
        super().__init__()
        self._shape = shape
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                shape.num_embeddings, shape.embedding_dim, mode="sum", sparse=True, include_last_offset=True
            )
            for _ in range(shape.num_tables)
        )
        self.optimizer: torch.optim.Optimizer
        if optimizer == "sgd":
            self.optimizer_label = "torch.optim.SGD on sparse gradients"
            self.optimizer = torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)
        else:
            self.optimizer_label = "torch.optim.Adagrad on sparse gradients (state per weight, not per row)"
            self.optimizer = torch.optim.Adagrad(self.parameters(), lr=LEARNING_RATE, eps=EPSILON)

    def prepare(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        size = self._shape.batch_size
        offsets = batch.offsets[: size + 1]
        return [(ids, offsets) for ids in batch.ids.view(self._shape.num_tables, -1)]

    def forward(self, sparse: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.cat([bag(*of_table) for bag, of_table in zip(self.bags, sparse, strict=True)], dim=1)

    def tables(self) -> Sequence[Tensor]:
        return [bag.weight for bag in self.bags]  # type: ignore[misc]

    def apply_gradients(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self) -> dict[str, Any]:
        return {"sparse_optimizer": self.optimizer.state_dict()}


SYSTEMS: dict[str, type[Any]] = {
    "fbgemm": FbgemmTables,
    "torchrec": TorchrecTables,
    "embeddingbag": EmbeddingBagTables,
}
