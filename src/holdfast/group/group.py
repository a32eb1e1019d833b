"""Group: torch.distributed with deadlines, and with errors that name the rank.

Invariants
- Every wait ends: when the work is done, when a connection breaks, when `timeout` seconds have passed, or soon after
  the process was asked to stop. The latter three raise GroupError, which says what was waited for, in which step, and
  which ranks do not answer.
- Collectives are issued from one thread, in one order on all ranks.
- What is gathered is JSON or plain tensors: nothing that another rank sends is unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from holdfast import errors
from holdfast.device.options import AllReduce
from holdfast.errors import ConfigError, GroupError, HoldfastError, StepError
from holdfast.group import process_groups
from holdfast.group.attaching import attach
from holdfast.group.device_sums import DeviceSums, open_device_sums
from holdfast.group.meeting import await_others, choose_interface, how_gloo_connects, meet, of_this_group
from holdfast.group.neighbours import Neighbours, meet_neighbours
from holdfast.group.notices import NOT_YET, EndedElsewhereError, Notices
from holdfast.group.options import GroupOptions
from holdfast.group.roles import Roles
from holdfast.group.store_answers import asked
from holdfast.group.transport import Transport, Waitable

_SLICE = timedelta(seconds=0.25)  # how soon a wait notices that the process was asked to stop
_LEAST_PATIENCE = 2.0  # seconds
_STOPPED_SECONDS = 1.0  # more than a slice of a wait can take in a process that runs
_LOOK_SECONDS = 1.0  # between two looks at what the others say, in a wait that is long
_Answer = TypeVar("_Answer")


class Pending:
    """A collective on its way. Keep its tensors until `wait` has returned."""

    def __init__(self, group: Group, work: Waitable | None, what: str) -> None:
        self._group = group
        self._work = work
        self._what = what

    def wait(self) -> None:
        if self._work is not None:
            self._group.await_work(self._work, self._what)


class Group:
    """The ranks that train one pool together.

    store: of torch.distributed, where ranks say what became of them. timeout: seconds that any of them may keep the
    others waiting. stopping: whether this process was asked to stop. are_apart: memory ranks run by themselves, and
    learn from the trainers what they do (outliving.py). shared_memory: see transport.py; of all ranks, or of none.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        roles: Roles,
        timeout: float,
        stopping: Callable[[], bool] = lambda: False,
        are_apart: bool = False,
        shared_memory: bool = True,
    ) -> None:
        self.rank = rank
        self.roles = roles
        self.are_apart = are_apart
        self.timeout = timeout
        self.stopping = stopping
        self.sent_bytes: Counter[str] = Counter()  # to other ranks, by what
        # A memory rank that runs by itself has to be there for the next trainers soon.
        is_patient = not (are_apart and rank not in roles.trainers)
        self.notices = Notices(
            store,
            rank=rank,
            world_size=roles.world_size,
            timeout=timeout,
            stopping=stopping,
            is_patient=is_patient,
        )
        self._is_closed = False
        self._longest_wait = 0.0  # seconds, of those that went well
        self._default: Any = None  # the default process group, where a Group made it
        self._world: dist.ProcessGroup | None = None  # of all ranks; None: the default one
        self._device_sums: DeviceSums | None = None
        self._neighbours = Neighbours({}, {}, [[]] * roles.world_size)
        self._transports: list[Transport] = []
        deadline, advice = timedelta(seconds=timeout), ""
        try:
            await_others(store, rank, roles.world_size, timeout, stopping)
            advice = how_gloo_connects()
            lies_beside = dist.is_initialized()
            self._default = process_groups.default_group.enter(lambda: self._init(store, deadline))
            if lies_beside:
                self._world = self._make(lambda: dist.new_group(backend="gloo", timeout=deadline))
            self._check_roles()
            advice = ""
            if roles.world_size > 1:
                self._neighbours = meet_neighbours(rank, self.gather, wanted=shared_memory)
            self._everyone = Transport(self._world, range(roles.world_size), rank, self._neighbours)
            self._transports.append(self._everyone)
            self._between_trainers = self._between(roles.trainers)
            if roles.memory_ranks:
                self._to_told = self._between([0, *roles.owners])  # those that do what rank 0 says
                self._to_keeper = self._between([0, roles.keeper])  # of rank 0's dense states
        except BaseException as error:
            failure: BaseException = error
            if isinstance(error, (RuntimeError, TimeoutError)):  # dist.DistError is the former
                failure = GroupError(f"{self.notices.failure('all ranks to be there', error)}{advice}")
            self.close()
            raise failure from None

    def _init(self, store: Store, deadline: timedelta) -> None:
        # By which ranks name what they look for; one that could not be made has left it where it was.
        dist.distributed_c10d._world.group_count = 0
        size = self.roles.world_size
        init = partial(dist.init_process_group, "gloo", store=store, rank=self.rank, world_size=size, timeout=deadline)
        self._make(init)

    def _make(self, process_group: Callable[[], _Answer]) -> _Answer:
        """All ranks are there. Raises TimeoutError where the store does not answer in time."""
        return asked(process_group, self.timeout, self.stopping)

    def _between(self, ranks: Sequence[int]) -> Transport:
        deadline = timedelta(seconds=self.timeout)
        process_group = self._make(lambda: dist.new_group(list(ranks), timeout=deadline, backend="gloo"))
        self._transports.append(Transport(process_group, ranks, self.rank, self._neighbours))
        return self._transports[-1]

    def _check_roles(self) -> None:
        everyones = self.gather(self.roles.memory_ranks, "everyone's role")
        for rank, memory_ranks in enumerate(everyones):
            if memory_ranks != everyones[0]:
                raise ConfigError(
                    f"rank {rank} has --memory-ranks {memory_ranks}, rank 0 has {everyones[0]}: make them the same"
                )

    @classmethod
    def from_environment(cls, options: GroupOptions, *, stopping: Callable[[], bool] = lambda: False) -> Group:
        """The group that the script initialised already, or that torchrun (or RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT) describes; without these, a group of this process alone. Memory ranks that run by themselves join
        it."""
        timeout, addresses = options.timeout, options.memory_ranks_at
        make = partial(cls, timeout=timeout, stopping=stopping, shared_memory=options.shared_memory)
        if addresses:
            store, rank, trainers = attach(addresses, timeout=timeout, stopping=stopping)
            roles = Roles(world_size=trainers + len(addresses), memory_ranks=len(addresses))
            return make(store=store, rank=rank, roles=roles, are_apart=True)
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            store = of_this_group(dist.distributed_c10d._get_default_store(), rank, world_size, timeout, stopping)
        elif dist.is_available() and "RANK" in os.environ:
            choose_interface()
            met, rank, world_size = meet(timeout, stopping)
            store = of_this_group(met, rank, world_size, timeout, stopping)
        elif (started := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"WORLD_SIZE = {started}, and there is no RANK: start the processes with torchrun, which sets both; or "
                "unset WORLD_SIZE for a process alone"
            )
        else:
            store, rank, world_size = HashStore(), 0, 1
        roles = Roles(world_size=world_size, memory_ranks=options.memory_ranks)
        return make(store=store, rank=rank, roles=roles)

    @property
    def world_size(self) -> int:
        return self.roles.world_size

    @property
    def num_trainers(self) -> int:
        return len(self.roles.trainers)

    @property
    def is_trainer(self) -> bool:
        return self.rank in self.roles.trainers

    @property
    def is_owner(self) -> bool:
        return self.rank in self.roles.owners

    @property
    def way(self) -> str:
        """That rows and their gradients travel between the ranks, in words."""
        return "through memory" if self._everyone.is_through_memory else "over gloo"

    # Collectives.

    def all_to_all(
        self, received: Tensor, received_splits: Sequence[int], sent: Tensor, sent_splits: Sequence[int], what: str
    ) -> Pending:
        """Element counts by rank; one-dimensional tensors of one dtype."""
        to_others = sum(sent_splits) - sent_splits[self.rank]
        self.sent_bytes[what] += to_others * sent.element_size()
        if self.world_size == 1:
            received.copy_(sent)
            return Pending(self, None, what)
        return self._begin(lambda: self._everyone.all_to_all(received, received_splits, sent, sent_splits), what)

    def sum_over_trainers(self, values: Tensor, what: str) -> Pending:
        """Adds `values` up over the trainers, in place; the same order at every call, the same bits on all of them."""
        trainers = len(self.roles.trainers)
        if trainers == 1:
            return Pending(self, None, what)
        # Each part goes around twice, but for the one that it ends on.
        self.sent_bytes[what] += 2 * (trainers - 1) * values.nbytes // trainers
        sums = self._sums_on(values.device)
        if sums is not None:
            return self._begin(lambda: sums.begin(values), what)
        return self._begin(lambda: self._between_trainers.sum(values), what)

    def sum_on_devices(self, device: torch.device, wanted: AllReduce) -> None:
        """Has what is on the trainers' devices, of which this one's is `device`, added up there from now on, where that
        can be. All trainers call it. Raises what open_device_sums does."""
        self._device_sums = open_device_sums(self, device, wanted)

    def device_of_sums(self, device: torch.device) -> torch.device:
        """Where `sum_over_trainers` takes what is on `device`: it, or the host."""
        return torch.device("cpu") if self._sums_on(device) is None else device

    def _sums_on(self, device: torch.device) -> DeviceSums | None:
        sums = self._device_sums
        return sums if sums is not None and sums.device == device else None

    def sum_over_all(self, values: Tensor, what: str) -> Pending:
        if self.world_size == 1:
            return Pending(self, None, what)
        return self._begin(lambda: self._everyone.sum(values.view(-1)), what)

    def gather(self, value: Any, what: str, *, among_trainers: bool = False) -> list[Any]:
        """A JSON value of every rank, or of every trainer, by rank."""
        said = json.dumps(value).encode()
        return [json.loads(data) for data in self.gather_bytes(said, what, among_trainers=among_trainers)]

    def gather_numbers(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Some numbers of every trainer, by rank; as many of each."""
        if self.num_trainers == 1:
            return [list(numbers)]
        count, trainers = len(numbers), self.num_trainers
        rows = torch.empty(trainers * count, dtype=torch.int64, device="cpu")
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._begin(lambda: self._between_trainers.all_gather(rows, [count] * trainers, mine), what).wait()
        everyones: list[list[int]] = rows.view(trainers, count).tolist()
        return everyones

    def tell_memory_ranks(self, numbers: Tensor, what: str) -> Pending:
        """Rank 0's numbers, on the ranks that do nothing but own rows, in place. These call it, too."""
        return self._begin(lambda: self._to_told.broadcast(numbers), what)

    def to_keeper(self, data: Tensor, what: str) -> Pending:
        """Rank 0's tensor, on another rank that keeps the dense states, in place. Both call it."""
        self.sent_bytes[what] += data.nbytes if self.rank == 0 else 0
        return self._begin(lambda: self._to_keeper.broadcast(data), what)

    def gather_bytes(self, data: bytes, what: str, *, among_trainers: bool = False) -> list[bytes]:
        """Some bytes of every rank, or of every trainer, by rank; none has to have as many as another."""
        num_ranks = len(self.roles.trainers) if among_trainers else self.world_size
        if num_ranks == 1:
            return [data]
        group = self._between_trainers.process_group if among_trainers else self._world
        sizes = torch.empty(num_ranks, 1, dtype=torch.int64, device="cpu")
        size = torch.tensor([len(data)], device="cpu")
        self._begin(lambda: dist.all_gather(list(sizes), size, group, async_op=True), what).wait()
        width = max(1, int(sizes.max()))
        padded = torch.zeros(width, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]
        parts = torch.empty(num_ranks, width, dtype=torch.uint8, device="cpu")
        self._begin(lambda: dist.all_gather(list(parts), padded, group, async_op=True), what).wait()
        return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes | None, what: str, source: int = 0) -> bytes:
        """The bytes of rank `source`, on all ranks."""
        if self.world_size == 1:
            return data or b""
        size = torch.tensor([len(data or b"")], device="cpu")
        self._begin(lambda: dist.broadcast(size, source, group=self._world, async_op=True), what).wait()
        if int(size) == 0:
            return b""
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data or b""), dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._begin(lambda: dist.broadcast(buffer, source, group=self._world, async_op=True), what).wait()
        return bytes(buffer.numpy())

    def barrier(self, what: str) -> None:
        self.gather_bytes(b"", what)

    def all_or_none(self, work: Callable[[], Any], what: str, *, among_trainers: bool = False) -> Any:
        """Runs `work` on every rank, or every trainer. Where it fails on one, all raise that error, whose message names
        the rank."""
        result, failure = _attempt(work)
        self.agree_that_none_failed(failure, what, among_trainers=among_trainers)
        return result

    def let_rank_0(self, work: Callable[[], _Answer], what: str) -> _Answer | None:
        """Runs `work` on rank 0, however long it takes while rank 0 lives, and returns there what it returned. Where
        it fails, all raise its error."""
        result, failure = None, None
        if self.rank == 0:
            with self.notices.saying_that_it_lives(what):
                result, failure = _attempt(work)
        else:
            self.notices.await_rank_0(what)
        self.agree_that_none_failed(failure, what)
        return result

    def agree_that_none_failed(self, failure: HoldfastError | None, what: str, *, among_trainers: bool = False) -> None:
        """Raises what any rank has to tell: its own error where it is this one."""
        told = None if failure is None else [type(failure).__name__, str(failure)]
        everyones = self.gather(told, what, among_trainers=among_trainers)
        failures = [(rank, found) for rank, found in enumerate(everyones) if found is not None]
        if failure is not None:
            raise failure
        if failures:
            rank, (kind, message) = failures[0]
            raise errors.by_name(kind)(f"rank {rank}: {message}")

    # Waiting, and what breaks.

    def _begin(self, collective: Callable[[], Any], what: str) -> Pending:
        if self._is_closed:
            raise StepError("the pool is closed")
        try:
            return Pending(self, collective(), what)
        except RuntimeError as error:
            raise self.notices.failure(what, error) from None

    def await_work(self, work: Waitable, what: str) -> None:
        began = looked = time.monotonic()
        while True:
            has_ended = work.is_completed()  # before the wait: then what the wait says is the work's own word
            turn = time.monotonic()
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                if NOT_YET not in str(error) or has_ended:
                    raise self.notices.failure(what, error) from None
                took = time.monotonic() - turn
                if took > _SLICE.total_seconds() + _STOPPED_SECONDS:
                    began += took  # it was stopped; all of them may have been, as by a pause of their container
                waited = time.monotonic() - began
                if work.is_completed():
                    continue  # just when the wait ran out, as it does where both ends were stopped for a while
                # A process that was asked to stop waits for as long as a step that goes well may take.
                patience = min(self.timeout, max(_LEAST_PATIENCE, 2 * self._longest_wait))
                if waited > (patience if self.stopping() else self.timeout):
                    raise self.notices.failure(what, error) from None
                if time.monotonic() - looked > _LOOK_SECONDS:
                    if self.notices.is_over():
                        raise self.notices.failure(what, EndedElsewhereError()) from None
                    looked = time.monotonic()
            else:
                self._longest_wait = max(self._longest_wait, time.monotonic() - began)
                return

    def close(self) -> None:
        """Ends it; waits for nobody. Nothing that has threads is left, for a forked child that collects this would wait
        for them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._neighbours.close()
        if dist.is_initialized():
            self._end_process_groups()
        for transport in self._transports:
            transport.process_group = None
        self._default = self._world = self._device_sums = None
        self.notices.close()

    def _end_process_groups(self) -> None:
        on_devices = None if self._device_sums is None else self._device_sums.process_group
        everything = (self._world, *(transport.process_group for transport in self._transports[1:]), on_devices)
        ours = [group for group in everything if group is not None]
        process_groups.end(ours, self._default, have_failed=self.notices.any_failure, timeout=self.timeout)


def _attempt(work: Callable[[], _Answer]) -> tuple[_Answer | None, HoldfastError | None]:
    """What `work` returned, or how it failed."""
    try:
        return work(), None
    except HoldfastError as error:
        return None, error
