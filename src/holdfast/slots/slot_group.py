"""Slots of a device's memory for tables whose rows are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast import _core
from holdfast.device.queues import host_empty
from holdfast.pools.read_only import expected_rows, layout_of
from holdfast.pools.tables import TORCH_DTYPES

_MOST_SLOTS = 2**31 - 1  # their numbers are int32


@dataclass(frozen=True, slots=True)
class Share:
    """What a group gets of the scratchpad."""

    num_slots: int
    row_bytes: int
    of_bytes: float


@dataclass(frozen=True, slots=True)
class TableHere:
    """most_rows: of the table's, that this process may have; the others are other ranks'."""

    spec: _core.TableSpec
    most_rows: int

    @property
    def expected_bytes(self) -> int:
        return row_bytes(self.spec) * expected_rows(self.spec) * self.most_rows // self.spec.num_embeddings


def shares_of(groups: Sequence[Sequence[TableHere]], num_bytes: int) -> list[Share]:
    """As the rows that tables are going to have; no more slots than these can have, and one at least."""
    wanted = [sum(table.expected_bytes for table in tables) for tables in groups]
    all_wanted = max(1, sum(wanted))
    shares = []
    for tables, bytes_wanted in zip(groups, wanted, strict=True):
        of_row = row_bytes(tables[0].spec)
        room = int(num_bytes / all_wanted * bytes_wanted) // of_row
        num_slots = max(1, min(room, sum(table.most_rows for table in tables), _MOST_SLOTS))
        shares.append(Share(num_slots, of_row, bytes_wanted / all_wanted))
    return shares


class SlotGroup:
    """Tables whose rows are alike, and so share slots.

    weights: ``[num_slots, dim]`` in the tables' dtype. state: float32 ``[num_slots, state_floats]``, None without any.
    features: of the collection, those that read these tables. takes_mean: their bags' sums are divided by the lengths.
    share: of the scratchpad's bytes.
    """

    def __init__(
        self,
        collection: _core.Collection,
        tables: list[int],
        specs: list[_core.TableSpec],
        features: list[int],
        *,
        takes_mean: bool,
        num_slots: int,
        share: float,
        keep: bool,
        device: torch.device,
    ) -> None:
        spec = specs[0]
        self.share = share
        self.tables = tables
        self.features = features
        self.dim = spec.embedding_dim
        self.mean = takes_mean
        self.optimizer = spec.optimizer
        self.row_bytes = row_bytes(spec)
        self.has_keys = spec.keys != 0
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._state_floats = layout_of(spec).state_bytes // 4
        self._device = device
        self.directory = _core.SlotDirectory(collection, tables, num_slots, keep=keep)
        self.weights, self.state = self.empty_rows(num_slots)

    def empty_rows(self, num_rows: int, *, host: bool = False) -> tuple[Tensor, Tensor | None]:
        """Weights and state of so many rows, on the device or on the host for a copy to it."""

        def empty(floats: int, dtype: torch.dtype) -> Tensor:
            if host:
                return host_empty((num_rows, floats), dtype, self._device)
            return torch.empty(num_rows, floats, dtype=dtype, device=self._device)

        state = empty(self._state_floats, torch.float32) if self._state_floats else None
        return empty(self.dim, self._dtype), state

    def let_go(self) -> None:
        """Gives back the memory of all slots: nobody uses one any more."""
        self.weights, self.state = self.empty_rows(0)

    def bytes_wanted(self, plan: _core.Plan) -> int:
        """Of the plan's rows, each once."""
        return sum(len(plan.rows(table)) for table in self.tables) * self.row_bytes


def row_bytes(spec: _core.TableSpec) -> int:
    """Of weights and optimizer state."""
    return layout_of(spec).row_bytes
