"""Dense gradients of all trainers, averaged.

All of them travel in one flat buffer of a kind of number: the same layout, so the same order of summation, in every
step of every life. DistributedDataParallel cannot do that: its buckets change after the first step of a process. They
travel from device to device where the group has DeviceSums, else from host to host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.group.group import Group

_HOST = torch.device("cpu")
_Kind = tuple[torch.dtype, torch.device]
"""Of numbers that travel in one buffer: their type, and where they are added up."""


class GradientAverage:
    """Of a group's trainers. Its buffers are kept from one step to the next: memory that is always new costs more than
    what is done in it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffers: dict[_Kind, Tensor] = {}

    def take(
        self,
        parameters: nn.Module | Iterable[Tensor],
        anchors: Sequence[Tensor],
        beside: Tensor | None = None,
    ) -> None:
        """Makes the gradients of `parameters` their mean over the trainers, in the memory where they are. One that a
        trainer does not have counts as zeros; one that none has stays away.

        anchors: of the collections of rows (RowOptimizer): if their gradient is NaN on one trainer it is on all, so
        that a GradScaler skips the step everywhere. beside: float32, averaged with them, in place.

        Raises ConfigError that names a parameter whose gradient is sparse.
        """
        if self._group.num_trainers == 1:
            return
        given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        known = set(map(id, given))
        tensors = [tensor for tensor in given if tensor.requires_grad]
        tensors += [anchor for anchor in anchors if id(anchor) not in known]
        _refuse_sparse(tensors, parameters)
        of_kinds: dict[_Kind, list[Tensor]] = {}
        for tensor in tensors:
            of_kinds.setdefault((tensor.dtype, self._group.device_of_sums(tensor.device)), []).append(tensor)
        presence = torch.tensor(
            [float(tensor.grad is not None) for tensor in tensors], dtype=torch.float32, device="cpu"
        )
        tail = presence if beside is None else torch.cat([beside.detach().reshape(-1).cpu(), presence])
        # Through the hosts float32 goes in any case: with it travels who has a gradient. What goes there is waited for
        # first, since it is that way that a rank which is gone is noticed soon; so what goes another way begins before.
        on_devices = [kind for kind in of_kinds if kind[1] != _HOST]
        on_hosts = dict.fromkeys([(torch.float32, _HOST), *(kind for kind in of_kinds if kind[1] == _HOST)])
        flats = {kind: self._flat(kind, of_kinds[kind]) for kind in on_devices}
        flats |= {kind: self._flat(kind, of_kinds.get(kind, []), tail) for kind in on_hosts}
        pending = {kind: self._group.sum_over_trainers(flat, "dense gradients") for kind, flat in flats.items()}
        for kind in (*on_hosts, *on_devices):
            pending[kind].wait()
        means = {kind: flat.div_(self._group.num_trainers) for kind, flat in flats.items()}
        mean_tail = means[torch.float32, _HOST][-len(tail) :]
        shares = mean_tail[-len(tensors) :].tolist()  # of the trainers, that have each
        without = {id(tensor) for tensor, share in zip(tensors, shares, strict=True) if share == 0}
        for kind, of_kind in of_kinds.items():
            _spread(means[kind], of_kind, without)
        if beside is not None:
            beside.detach().copy_(mean_tail[: beside.numel()].view_as(beside))

    def _flat(self, kind: _Kind, tensors: Sequence[Tensor], tail: Tensor | None = None) -> Tensor:
        """Gradients of one kind, and behind them the tail, one after the other in a buffer of the kind's."""
        parts = [
            tensor.new_zeros(tensor.numel()) if tensor.grad is None else tensor.grad.reshape(-1) for tensor in tensors
        ]
        if tail is not None:
            parts.append(tail.to(kind[0]))
        if any(part.device != kind[1] for part in parts):  # of a device: in one copy
            parts = [part.to(kind[1]) for part in _joined_by_device(parts)]
        count = sum(map(len, parts))
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[kind] = torch.empty(count, dtype=kind[0], device=kind[1])
        return torch.cat(parts, out=buffer[:count])


def _refuse_sparse(tensors: Iterable[Tensor], parameters: nn.Module | Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.grad is not None and tensor.grad.layout is not torch.strided:
            named = parameters.named_parameters() if isinstance(parameters, nn.Module) else ()
            name = next((f"'{name}'" for name, parameter in named if parameter is tensor), f"of {tuple(tensor.shape)}")
            raise ConfigError(
                f"the gradient of parameter {name} is sparse (nn.Embedding(sparse=True)), ranks average dense ones: "
                "leave sparse=True out, or make it a table of the pool (EmbeddingCollection)"
            )


def _joined_by_device(parts: Sequence[Tensor]) -> list[Tensor]:
    """Neighbours on one device as one."""
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.device)]
    return [torch.cat(run) for run in runs]


def _spread(means: Tensor, tensors: Sequence[Tensor], without: AbstractSet[int]) -> None:
    """without: the ids of tensors that have no gradient on any trainer."""
    there: dict[torch.device, Tensor] = {}  # by one copy to each device
    begin = 0
    for tensor in tensors:
        if tensor.device not in there:
            there[tensor.device] = means.to(tensor.device, non_blocking=True)
        mean = there[tensor.device][begin : begin + tensor.numel()].view_as(tensor)
        begin += tensor.numel()
        if id(tensor) in without:
            tensor.grad = None
        elif tensor.grad is None:
            tensor.grad = mean.clone()
        else:
            tensor.grad.copy_(mean)
