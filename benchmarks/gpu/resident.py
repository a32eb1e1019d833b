"""Tables that lie in the device's memory whole, worked on by the kernels of the device path: no pool, nothing goes
back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.rooflines import Counts
from gpu.shapes import EPSILON, LEARNING_RATE
from holdfast.device import kernels
from holdfast.pools.optim import RowWiseAdagrad
from peers.shapes import Shape


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch as the kernels take it, all of it on the device; row r of table t lies in slot t × rows + r."""

    counts: Counts
    lookup_slot: Tensor
    bag_start: Tensor
    columns: Tensor
    slots: Tensor
    row_start: Tensor
    gradient_offset: Tensor
    max_occurrences: int

    @classmethod
    def of(cls, ids: NDArray[np.integer], shape: Shape, device: torch.device) -> BatchArrays:
        """ids: ``[num_tables, batch_size, lookups_per_bag]``."""
        dim, (num_tables, batch_size, lookups) = shape.embedding_dim, ids.shape
        table = torch.arange(num_tables, device=device)[:, None, None]
        sample = torch.arange(batch_size, device=device)[None, :, None]
        slot_of = table * shape.num_embeddings + torch.from_numpy(ids.astype(np.int64)).to(device)
        sorted_slots, order = slot_of.flatten().sort(stable=True)
        slots, occurrences = torch.unique_consecutive(sorted_slots, return_counts=True)
        gradient_offset = (table * dim + sample * (num_tables * dim)).expand_as(slot_of).flatten()[order]
        num_bags = num_tables * batch_size
        return cls(
            counts=Counts(num_unique=slots.numel(), num_lookups=slot_of.numel(), num_bags=num_bags, dim=dim),
            lookup_slot=slot_of.flatten().int(),
            bag_start=torch.arange(0, (num_bags + 1) * lookups, lookups, dtype=torch.int32, device=device),
            columns=torch.arange(0, num_tables * dim, dim, dtype=torch.int32, device=device),
            slots=slots.int(),
            row_start=torch.nn.functional.pad(occurrences.cumsum(0), (1, 0)).int(),
            gradient_offset=gradient_offset.int(),
            max_occurrences=int(occurrences.max()),
        )


class ResidentTables:
    """float32 rows and row-wise Adagrad's state on `device`, with uniform initial values."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        num_rows = shape.num_tables * shape.num_embeddings
        bound = shape.num_embeddings**-0.5
        self._shape = shape
        self._device = device
        self._alignment = shape.embedding_dim & -shape.embedding_dim
        self._one = torch.ones((), device=device)
        self._num_updates = 0
        self.weights = torch.empty(num_rows, shape.embedding_dim, device=device).uniform_(-bound, bound)
        self.state = torch.zeros(num_rows, 1, device=device)

    def lookup(self, batch: BatchArrays) -> Tensor:
        """float32 ``[batch_size, num_tables × dim]``."""
        out = torch.empty(self._shape.batch_size, batch.columns.numel() * batch.counts.dim, device=self._device)
        kernels.pooled_lookup(
            self.weights,
            batch.lookup_slot,
            batch.bag_start,
            batch.columns,
            out,
            scale=None,
            mean=False,
            alignment=self._alignment,
        )
        return out

    def update(self, batch: BatchArrays, grad: Tensor) -> None:
        """grad: of what `lookup` gives."""
        self._num_updates += 1
        sums = kernels.segment_sum(
            grad,
            batch.row_start,
            batch.gradient_offset,
            batch.counts.dim,
            scale=None,
            max_occurrences=batch.max_occurrences,
            alignment=self._alignment,
        )
        kernels.update_rows(
            RowWiseAdagrad.kind,
            self.weights,
            self.state,
            batch.slots,
            sums,
            hyperparameters=kernels.Hyperparameters(
                learning_rate=LEARNING_RATE, step=self._num_updates, epsilon=EPSILON
            ),
            gradient_scale=self._one,
            rounding=None,
            fresh_weights=torch.empty_like(sums),
            fresh_state=torch.empty(sums.shape[0], 1, device=self._device),
        )
