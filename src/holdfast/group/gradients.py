"""Dense gradients of all trainers, averaged.

All of them travel in one flat buffer of a kind of number: the same layout, so the same order of summation, in every
step of every life. DistributedDataParallel cannot do that: its buckets change after the first step of a process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.group.group import Group


def average(
    group: Group, parameters: Sequence[Tensor], anchors: Sequence[Tensor], beside: Tensor | None = None
) -> None:
    """Replaces the gradients of `parameters` by their mean over the trainers. One that a trainer does not have counts
    as zeros; one that none has stays away.

    anchors: of the collections of rows (RowOptimizer): if their gradient is NaN on one trainer it is on all, so that
    a GradScaler skips the step everywhere. beside: float32, averaged with them, in place.
    """
    if group.num_trainers == 1:
        return
    known = set(map(id, parameters))
    tensors = [tensor for tensor in parameters if tensor.requires_grad]
    tensors += [anchor for anchor in anchors if id(anchor) not in known]
    # float32 is there in any case: with it travels who has a gradient.
    kinds = list(dict.fromkeys([torch.float32, *(tensor.dtype for tensor in tensors)]))
    presence = torch.tensor([float(tensor.grad is not None) for tensor in tensors])
    tail = presence if beside is None else torch.cat([beside.detach().reshape(-1).cpu(), presence])
    flats = [torch.cat([_flat_gradients(tensors, kind), tail.to(kind)]) for kind in kinds]
    for pending in [group.sum_over_trainers(flat, "dense gradients") for flat in flats]:
        pending.wait()
    present = flats[0][-len(tensors) :].tolist()
    means = {kind: flat.div_(group.num_trainers) for kind, flat in zip(kinds, flats, strict=True)}
    ends = dict.fromkeys(kinds, 0)
    for tensor, trainers in zip(tensors, present, strict=True):
        begin = ends[tensor.dtype]
        end = ends[tensor.dtype] = begin + tensor.numel()
        mean = means[tensor.dtype][begin:end].view_as(tensor)
        tensor.grad = mean.to(tensor.device, non_blocking=True) if trainers else None
    if beside is not None:
        begin = ends[torch.float32]
        beside.detach().copy_(means[torch.float32][begin : begin + beside.numel()].view_as(beside))


def _flat_gradients(tensors: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    """On the host; of a device they come in one copy."""
    flat = [
        tensor.new_zeros(tensor.numel()) if tensor.grad is None else tensor.grad.reshape(-1)
        for tensor in tensors
        if tensor.dtype is kind
    ]
    return torch.cat(flat).cpu() if flat else torch.empty(0, dtype=kind)
