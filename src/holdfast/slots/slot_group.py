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


def shares_of(groups: Sequence[Sequence[_core.TableSpec]], num_bytes: int) -> list[Share]:
    """As the rows that tables are going to have; no more slots than these can have."""
    wanted = [sum(row_bytes(spec) * expected_rows(spec) for spec in specs) for specs in groups]
    share = num_bytes / sum(wanted)
    shares = []
    for specs, bytes_wanted in zip(groups, wanted, strict=True):
        of_row = row_bytes(specs[0])
        room = max(1, int(share * bytes_wanted) // of_row)
        num_slots = min(room, sum(spec.num_embeddings for spec in specs), _MOST_SLOTS)
        shares.append(Share(num_slots, of_row, bytes_wanted / sum(wanted)))
    return shares


class SlotGroup:
    """Tables whose rows are alike, and so share slots.

    weights: ``[num_slots, dim]`` in the tables' dtype. state: float32 ``[num_slots, state_floats]``, None without any.
    share: of the scratchpad's bytes.
    """

    def __init__(
        self,
        collection: _core.Collection,
        tables: list[int],
        specs: list[_core.TableSpec],
        features: list[int],
        *,
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
        self.mean = spec.pooling == 1
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

    def bytes_wanted(self, plan: _core.Plan) -> int:
        """Of the plan's rows, each once."""
        return sum(len(plan.rows(table)) for table in self.tables) * self.row_bytes


def row_bytes(spec: _core.TableSpec) -> int:
    """Of weights and optimizer state."""
    layout = layout_of(spec)
    return layout.weight_bytes + layout.state_bytes
