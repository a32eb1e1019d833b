"""Rows of tables with keys, in slots: before a batch reads them, those that are not its keys' begin.

A slot has a row, known by its number, and what the row was when it came. Since then its key may have been left behind,
or the row be another key's. Which it is, the record in the slot says, and the step from which on records count; so rows
come as the pool has them, whoever's they are.

Invariants
- In step N records count that a plain capture of step N would let count. Where keys are left behind by age alone, that
  is known from N. Where they make room (max_keys), the step before decides it: a batch waits until that one is retired.
- A row that begins in its slot is written nowhere else before an update: a step that is skipped leaves no trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.device import kernels
from holdfast.device.queues import host_empty
from holdfast.slots.slot_batch import Part
from holdfast.slots.slot_pool import SlotPool


class KeysInSlots:
    """Of a collection. numbers: of its tables in the pool."""

    def __init__(self, pool: SlotPool, numbers: Sequence[int], device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._specs = {number: pool.core.tables[number] for number in numbers}
        num_tables = max(numbers) + 1
        bounds = [(0.0, 0.0)] * num_tables
        admit_after = torch.zeros(num_tables, dtype=torch.int64, device="cpu")
        for number, spec in self._specs.items():
            bounds[number] = (spec.init_low, spec.init_high)
            admit_after[number] = spec.admit_after
        self._initial = kernels.InitialValues.of(int(pool.core.header["seed"]), bounds, device)
        self._admit_after = admit_after.to(device)
        self._waits = any(spec.max_keys for spec in self._specs.values())
        # When the collection was made; later it is known without asking the pool, which is some steps behind.
        self._oldest_then = [
            pool.core.oldest_keys(number) if number in self._specs else [0] for number in range(num_tables)
        ]
        # A table's are one behind the other: one for each of its shards, where these count for themselves.
        lengths = torch.tensor([len(oldest) for oldest in self._oldest_then], device="cpu")
        self._first = (lengths.cumsum(0) - lengths).to(device)
        self._has_shards = bool((lengths > 1).any())
        self._by_shard = (lengths > 1).to(device)
        self._oldest: Tensor | None = None
        self._step = -1

    def reach(self, step: int) -> None:
        """That one is under way."""
        if step == self._step:
            return
        self._step = step
        if self._waits:
            self._pool.drain()
        found = [self._oldest_of(number, step) for number in range(len(self._oldest_then))]
        oldest = host_empty((sum(map(len, found)),), torch.int64, self._device)
        oldest.copy_(torch.tensor(list(itertools.chain(*found))))
        self._oldest = oldest.to(self._device, non_blocking=True)

    def _oldest_of(self, number: int, step: int) -> list[int]:
        spec, then = self._specs.get(number), self._oldest_then[number]
        if spec is None:
            return then
        if spec.max_keys:
            return self._pool.core.oldest_keys(number)
        return [max(then[0], step - spec.ttl_steps if spec.ttl_steps else 0)]

    def start(self, part: Part) -> None:
        """Of a batch whose rows have arrived, on the queue that computes."""
        if not part.group.has_keys:
            return
        assert self._oldest is not None
        assert part.group.state is not None
        place = part.arrays["tables"].long()
        if self._has_shards:
            of_shard = part.arrays["shards"] * self._by_shard[place] if "shards" in part.arrays else 0
            place = self._first[place] + of_shard
        kernels.start_keys(
            part.group.weights,
            part.group.state,
            part.arrays["slots"],
            part.arrays["keys"],
            part.arrays["tables"],
            self._oldest[place],
            self._initial,
        )

    def update_of(self, part: Part, step: int) -> kernels.KeyUpdate | None:
        if not part.group.has_keys:
            return None
        return kernels.KeyUpdate(part.arrays["keys"], part.arrays["tables"], self._admit_after, step)
