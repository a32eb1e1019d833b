"""DeviceSums: dense gradients of all trainers, added up on their GPUs. NCCL brings them from one to the other.

Invariants
- All trainers use it or none does: they tell each other which GPUs they have before it is made.
- NCCL moves numbers and adds none up: each trainer does that for a part of them, in the order of the ranks. So the bits
  depend neither on the way that NCCL takes nor on its version, and are the same on all trainers.
- No call waits for NCCL without a deadline: whether numbers have come is asked again and again (`DeviceSum.wait`).
  NCCL's watchdog in PyTorch, which ends the process of who waits for a rank that is gone, leaves that to the group.
- NCCL listens on the interface that gloo does, where nobody said another.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.device.options import AllReduce
from holdfast.device.queues import Mark, current_queue
from holdfast.errors import ConfigError
from holdfast.group.notices import NOT_YET
from holdfast.group.transport import add_up

if TYPE_CHECKING:
    from holdfast.group.group import Group

_PAUSE = 20e-6  # seconds, between two looks at whether numbers have come
_MOST_BEHIND = 1.0  # seconds, from the end of NCCL's work to that of what is behind it on the device
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NCCL_INTERFACE, _GLOO_INTERFACE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


class DeviceSum:
    """A sum on its way; as much of a dist.Work as a group waits for. mark: behind it, in the device's queue. work:
    NCCL's last."""

    def __init__(self, work: dist.Work, mark: Mark) -> None:
        self._work = work
        self._mark = mark
        self._ended: float | None = None  # when NCCL was done with it, or gave it up

    def is_completed(self) -> bool:
        """Whether it is there, or never will be."""
        return self._mark.is_reached() or self._is_lost()

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError where it is not there after `timeout`, or never will be."""
        ends = time.monotonic() + timeout.total_seconds()
        while not self._mark.is_reached():
            if self._is_lost():
                raise RuntimeError("NCCL lost a connection between GPUs")
            if time.monotonic() > ends:
                raise RuntimeError(NOT_YET)
            time.sleep(_PAUSE)

    def _is_lost(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._ended is None:
            self._ended = time.monotonic()
        return time.monotonic() - self._ended > _MOST_BEHIND


class DeviceSums:
    """Over the trainers of a group. process_group: of them alone. device: this rank's."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, num_trainers: int) -> None:
        self.process_group = process_group
        self.device = device
        self._num_trainers = num_trainers

    def begin(self, values: Tensor) -> DeviceSum:
        """Adds `values`, one-dimensional, up over the trainers, in place: what is begun on the device after this finds
        the sums. Each number goes out and comes back once, but for the part that a trainer adds up itself."""
        width = -(-values.numel() // self._num_trainers)
        parts = values.new_zeros(self._num_trainers, width)
        parts.view(-1)[: values.numel()] = values
        of_all = torch.empty_like(parts)
        dist.all_to_all_single(of_all.view(-1), parts.view(-1), group=self.process_group)
        total = add_up(of_all, of_all[0])
        work = dist.all_gather_into_tensor(parts.view(-1), total, group=self.process_group, async_op=True)
        work.wait()  # on the device: what follows there is behind it
        values.copy_(parts.view(-1)[: values.numel()])
        return DeviceSum(work, current_queue(self.device).mark())


def open_device_sums(group: Group, device: torch.device, wanted: AllReduce) -> DeviceSums | None:
    """What adds gradients up on the trainers' devices; None where they are added up through the hosts, and on ranks
    that do not train. All trainers call it. device: where this one's are.

    Raises ConfigError where NCCL is `wanted` and a trainer cannot have it, GroupError where it does not come about.
    """
    if group.num_trainers == 1 or not group.is_trainer:
        return None
    told = {"why_not": _why_not(device, wanted), "gpu": _name_of(device), "insists": wanted == "nccl"}
    everyones = group.gather(told, "everyone's GPU", among_trainers=True)
    insists = any(fact["insists"] for fact in everyones)
    reasons = [f"rank {rank}: {fact['why_not']}" for rank, fact in enumerate(everyones) if fact["why_not"]]
    if not reasons and not insists:  # who insists may have told NCCL how to share one
        shared = [gpu for gpu, count in Counter(fact["gpu"] for fact in everyones).items() if count > 1]
        reasons = [f"several ranks have the GPU {gpu}" for gpu in shared]
    if reasons and insists:
        raise ConfigError(f"device.all_reduce = 'nccl': {'; '.join(reasons)}; set it to 'auto' or 'host'")
    if reasons:
        return None
    sums = DeviceSums(_meet(group), device, group.num_trainers)
    # NCCL connects at the first call: not in the first step.
    what = "NCCL to connect the trainers' GPUs (device.all_reduce = 'host' does without)"
    group.await_work(sums.begin(torch.zeros(1, device=device)), what)
    return sums


def _meet(group: Group) -> dist.ProcessGroup:
    if _NCCL_INTERFACE not in os.environ and (interface := os.environ.get(_GLOO_INTERFACE)):
        os.environ[_NCCL_INTERFACE] = f"={interface}"
    try:
        with _without_watchdog():
            # The group's own deadline comes first.
            made = dist.new_group(
                list(group.roles.trainers),
                backend="nccl",
                timeout=timedelta(seconds=2 * group.timeout),
                use_local_synchronization=True,
            )
    except RuntimeError as error:
        raise group.notices.failure("NCCL to begin", error) from None
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """For process groups that are made inside. What the user says of it holds."""
    if _WATCHDOG in os.environ:
        yield
        return
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        del os.environ[_WATCHDOG]


def _why_not(device: torch.device, wanted: AllReduce) -> str:
    """Empty where it can."""
    if wanted == "host":
        return "it has device.all_reduce = 'host'"
    if device.type != "cuda":
        return f"its device is {device}"
    return "" if dist.is_nccl_available() else f"this PyTorch ({torch.__version__}) has no NCCL"


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
