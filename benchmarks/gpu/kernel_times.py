"""Pooled lookup and update beside a plain copy's bandwidth, and beside torch's own embedding bags.

- Kernels alone are replayed as a graph, batch after batch of different ones: what the host needs to start them is not
  in it. Torch's sparse optimizer waits for the device and cannot be recorded, so the comparison with it is of both as
  Python starts them.
- Torch's side is the faster of two: one EmbeddingBag a table, as models are written, and one over all tables, which is
  what a clever user makes of tables that are alike. Its optimizer is Adagrad, the sparse one that is nearest to
  row-wise Adagrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpu.resident import BatchArrays, ResidentTables
from gpu.rooflines import lookup_bytes, update_bytes
from gpu.shapes import EPSILON, LEARNING_RATE, Case
from gpu.timing import recorded_seconds_of, seconds_of
from larger.workload import IdDrawer
from peers.shapes import Shape


def measure_kernels(case: Case, law: str, device: torch.device, *, smoke: bool) -> dict[str, Any]:
    shape, rounds = case.shape, 2 if smoke else 20
    drawer = IdDrawer(case.workload(law))
    ids = [drawer.draw(number) for number in range(case.kernel_batches)]
    grad = torch.randn(shape.batch_size, shape.num_tables * shape.embedding_dim, device=device)
    ours = _measure_ours(shape, ids, grad, rounds)
    theirs = {
        name: _measure_bags(shape, ids, grad, max(2, rounds // 4), fused=fused)
        for name, fused in (("one a table", False), ("one of all", True))
    }
    return {**ours, "embedding_bag_ms": theirs, "rows": shape.num_embeddings, "batches": len(ids)}


def _measure_ours(shape: Shape, ids: list[NDArray[np.int64]], grad: Tensor, rounds: int) -> dict[str, Any]:
    device = grad.device
    batches = [BatchArrays.of(each, shape, device) for each in ids]
    tables = ResidentTables(shape, device)
    _check(tables, batches[0], shape, ids[0])

    def lookup(batch: BatchArrays) -> None:
        tables.lookup(batch)

    def both(batch: BatchArrays) -> None:
        tables.lookup(batch)
        tables.update(batch, grad)

    return {
        "lookup_ms": 1e3 * recorded_seconds_of(device, [partial(lookup, batch) for batch in batches], rounds),
        "update_ms": 1e3
        * recorded_seconds_of(device, [partial(tables.update, batch, grad) for batch in batches], rounds),
        "both_ms": 1e3 * seconds_of(device, [partial(both, batch) for batch in batches], rounds),
        "lookup_bytes": fmean(lookup_bytes(batch.counts) for batch in batches),
        "update_bytes": fmean(update_bytes(batch.counts, tables.state.shape[1]) for batch in batches),
        "num_unique": fmean(batch.counts.num_unique for batch in batches),
        "num_lookups": batches[0].counts.num_lookups,
        "max_occurrences": max(batch.max_occurrences for batch in batches),
    }


def _check(tables: ResidentTables, batch: BatchArrays, shape: Shape, ids: NDArray[np.int64]) -> None:
    """Raises ValueError where the lookup of the last table is another than torch's."""
    of_table = torch.from_numpy(ids[-1]).to(tables.weights.device)
    expected = nn.functional.embedding_bag(of_table, tables.weights[-shape.num_embeddings :], mode="sum")
    found = tables.lookup(batch)[:, -shape.embedding_dim :]
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"{shape.name}: pooled lookup and nn.EmbeddingBag disagree by {(found - expected).abs().max()}"
        )


@dataclass(frozen=True, slots=True)
class _Bags:
    modules: nn.ModuleList
    optimizer: torch.optim.Optimizer
    offsets: Tensor

    def step(self, ids: Tensor, grads: list[Tensor]) -> None:
        """ids: int64 ``[modules, ids of one]``. grads: of what each module gives."""
        outs = [module(of_module, self.offsets) for module, of_module in zip(self.modules, ids, strict=True)]
        torch.autograd.backward(outs, grads)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _measure_bags(shape: Shape, ids: list[NDArray[np.int64]], grad: Tensor, rounds: int, *, fused: bool) -> float:
    """Milliseconds of lookup, backward and update. fused: one module over all tables behind one another."""
    device, count = grad.device, 1 if fused else shape.num_tables
    rows = shape.num_tables * shape.num_embeddings // count
    modules = nn.ModuleList(
        nn.EmbeddingBag(rows, shape.embedding_dim, mode="sum", sparse=True, device=device) for _ in range(count)
    )
    bags = shape.num_tables * shape.batch_size // count
    offsets = torch.arange(0, bags * shape.lookups_per_bag, shape.lookups_per_bag, device=device)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # spares a warning
    optimizer = torch.optim.Adagrad(modules.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    system = _Bags(modules, optimizer, offsets)
    first_row = np.arange(shape.num_tables)[:, None, None] * (shape.num_embeddings if fused else 0)
    on_device = [torch.from_numpy((each + first_row).reshape(count, -1)).to(device) for each in ids]
    of_table = grad.view(shape.batch_size, shape.num_tables, shape.embedding_dim).transpose(0, 1)
    grads = [part.contiguous() for part in of_table.reshape(count, bags, shape.embedding_dim)]
    return 1e3 * seconds_of(device, [partial(system.step, each, grads) for each in on_device], rounds)
