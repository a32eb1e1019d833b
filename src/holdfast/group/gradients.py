"""Dense gradients of all trainers, averaged.

All of them travel in one flat buffer of a kind of number: the same layout, so the same order of summation, in every
step of every life. DistributedDataParallel cannot do that: its buckets change after the first step of a process. They
travel from device to device where the group has DeviceSums, else from host to host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.group.group import Group

_HOST = torch.device("cpu")
_Kind = tuple[torch.dtype, torch.device]
"""Of numbers that travel in one buffer: their type, and where they are added up."""


def average(
    group: Group, parameters: Sequence[Tensor], anchors: Sequence[Tensor], beside: Tensor | None = None
) -> None:
    """Replaces the gradients of `parameters` by their mean over the trainers; on a device, in the memory where they
    are. One that a trainer does not have counts as zeros; one that none has stays away.

    anchors: of the collections of rows (RowOptimizer): if their gradient is NaN on one trainer it is on all, so that
    a GradScaler skips the step everywhere. beside: float32, averaged with them, in place.
    """
    if group.num_trainers == 1:
        return
    known = set(map(id, parameters))
    tensors = [tensor for tensor in parameters if tensor.requires_grad]
    tensors += [anchor for anchor in anchors if id(anchor) not in known]
    kinds = [(tensor.dtype, group.device_of_sums(tensor.device)) for tensor in tensors]
    of_kinds = {kind: [t for t, of in zip(tensors, kinds, strict=True) if of == kind] for kind in dict.fromkeys(kinds)}
    presence = torch.tensor([float(tensor.grad is not None) for tensor in tensors])
    tail = presence if beside is None else torch.cat([beside.detach().reshape(-1).cpu(), presence])
    # Through the hosts float32 goes in any case: with it travels who has a gradient. What goes there is waited for
    # first, since it is that way that a rank which is gone is noticed soon; so what goes another way is begun before.
    on_hosts = dict.fromkeys([(torch.float32, _HOST), *(kind for kind in of_kinds if kind[1] == _HOST)])
    on_devices = [kind for kind in of_kinds if kind[1] != _HOST]
    flats = {kind: _flat(of_kinds[kind]) for kind in on_devices}
    flats |= {
        kind: torch.cat([_flat(of_kinds.get(kind, [])).to(kind[1], kind[0]), tail.to(kind[0])]) for kind in on_hosts
    }
    pending = {kind: group.sum_over_trainers(flat, "dense gradients") for kind, flat in flats.items()}
    for kind in (*on_hosts, *on_devices):
        pending[kind].wait()
    summed = flats[torch.float32, _HOST]
    summed_tail = summed[len(summed) - len(tail) :]
    trainers_with = summed_tail[len(tail) - len(tensors) :].tolist()
    has_gradient = {id(tensor): count > 0 for tensor, count in zip(tensors, trainers_with, strict=True)}
    for kind, of_kind in of_kinds.items():
        _spread(flats[kind] / group.num_trainers, of_kind, [has_gradient[id(tensor)] for tensor in of_kind])
    if beside is not None:
        beside.detach().copy_((summed_tail[: beside.numel()] / group.num_trainers).view_as(beside))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Of one kind: where they are."""
    flat = [tensor.new_zeros(tensor.numel()) if tensor.grad is None else tensor.grad.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0)


def _spread(means: Tensor, tensors: Sequence[Tensor], has_gradient: Sequence[bool]) -> None:
    """A device's gradients stay where they are: replays read them there (device/graphs.py)."""
    there: dict[torch.device, Tensor] = {}  # by one copy to each device
    begin = 0
    for tensor, exists in zip(tensors, has_gradient, strict=True):
        if tensor.device not in there:
            there[tensor.device] = means.to(tensor.device, non_blocking=True)
        mean = there[tensor.device][begin : begin + tensor.numel()].view_as(tensor)
        begin += tensor.numel()
        if not exists:
            tensor.grad = None
        elif tensor.grad is None or tensor.device == _HOST:
            tensor.grad = mean
        else:
            tensor.grad.copy_(mean)
