"""Group: torch.distributed with deadlines, and with errors that name the rank.

Invariants
- Every wait ends: when the work is done, when a connection breaks, when `timeout` seconds have passed, or soon after
  the process was asked to stop. The latter three raise GroupError, which says what was waited for, in which step, and
  which ranks do not answer.
- Collectives are issued from one thread, in one order on all ranks.
- What is gathered is JSON or plain tensors: nothing that another rank sends is unpickled.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from holdfast import errors
from holdfast.errors import ConfigError, GroupError, HoldfastError
from holdfast.group.meeting import meet, stay_on_one_machine
from holdfast.group.roles import Roles

_SLICE = timedelta(seconds=0.25)  # how soon a wait notices that the process was asked to stop
_LEAST_PATIENCE = 2.0  # seconds
_GRACE_WHEN_STOPPED = 0.2
_GRACE_SECONDS = 3.0  # for the others to say that they are there, once something broke
_Answer = TypeVar("_Answer")
_NOT_YET = "Operation timed out"  # what Work.wait says when its own timeout passed and the work goes on
_DOING, _DONE = "at it, ", "done"  # what rank 0 says of long work
_GAVE_UP = "gave up"  # begins the word that a rank leaves whose wait timed out


class Pending:
    """A collective on its way. Keep its tensors until `wait` has returned."""

    def __init__(self, group: Group, work: dist.Work | None, what: str) -> None:
        self._group = group
        self._work = work
        self._what = what

    def wait(self) -> None:
        if self._work is not None:
            self._group.await_work(self._work, self._what)


class Group:
    """The ranks that train one pool together.

    store: of torch.distributed, where ranks say what became of them. timeout: seconds that any of them may keep the
    others waiting. stopping: whether this process was asked to stop.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        roles: Roles,
        timeout: float,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = rank
        self.roles = roles
        self.timeout = timeout
        self.stopping = stopping
        self.step = 0  # that is under way, for messages
        self.sent_bytes: Counter[str] = Counter()  # to other ranks, by what
        self._store = store
        self._broken = False
        self._is_closed = False
        self._longest_wait = 0.0  # seconds, of those that went well
        # Where the script has a process group already, the group's own lies beside it.
        self._is_guest = dist.is_initialized()
        self._world: dist.ProcessGroup | None = None  # the default group
        self._trainers: dist.ProcessGroup | None = None
        self._told: dist.ProcessGroup | None = None  # rank 0, and the ranks that do what it says
        deadline = timedelta(seconds=timeout)
        try:
            if self._is_guest:
                self._world = dist.new_group(backend="gloo", timeout=deadline)
            else:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=roles.world_size, timeout=deadline)
            self._check_roles()
            self._trainers = dist.new_group(list(roles.trainers), timeout=deadline, backend="gloo")
            if roles.memory_ranks:
                self._told = dist.new_group([0, *roles.owners], timeout=deadline, backend="gloo")
        except RuntimeError as error:  # dist.DistError is one
            failure = self._failure("all ranks to be there", error)
            self.close()
            raise failure from None

    def _check_roles(self) -> None:
        everyones = self.gather(self.roles.memory_ranks, "everyone's role")
        for rank, memory_ranks in enumerate(everyones):
            if memory_ranks != everyones[0]:
                self.close()
                raise ConfigError(
                    f"rank {rank} has --memory-ranks {memory_ranks}, rank 0 has {everyones[0]}: make them the same"
                )

    @classmethod
    def from_environment(
        cls, *, memory_ranks: int, timeout: float, stopping: Callable[[], bool] = lambda: False
    ) -> Group:
        """The group that the script initialised already, or that torchrun (or RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT) describes; without these, a group of this process alone."""
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            store: Store = PrefixStore("holdfast", dist.distributed_c10d._get_default_store())
        elif dist.is_available() and "RANK" in os.environ:
            stay_on_one_machine()
            try:
                met, rank, world_size = meet(timedelta(seconds=timeout))
            except dist.DistError as error:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                waited = "the others' word at" if os.environ["RANK"] == "0" else "rank 0 at"
                raise GroupError(
                    f"rank {os.environ['RANK']} waited {timeout:g} s for {waited} {where}: {_first_line(error)}"
                ) from None
            # torchrun may keep its store when it starts the ranks again: what an earlier life left there is not ours.
            store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", met)
        elif (started := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"WORLD_SIZE = {started}, and there is no RANK: start the processes with torchrun, which sets both; or "
                "unset WORLD_SIZE for a process alone"
            )
        else:
            store, rank, world_size = HashStore(), 0, 1
        roles = Roles(world_size=world_size, memory_ranks=memory_ranks)
        return cls(store=store, rank=rank, roles=roles, timeout=timeout, stopping=stopping)

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
        return self._begin(
            lambda: dist.all_to_all_single(
                received, sent, list(received_splits), list(sent_splits), group=self._world, async_op=True
            ),
            what,
        )

    def sum_over_trainers(self, values: Tensor, what: str) -> Pending:
        """Adds `values` up over the trainers, in place; the same order at every call, the same bits on all of them."""
        trainers = len(self.roles.trainers)
        if trainers == 1:
            return Pending(self, None, what)
        # A ring sends each part around twice, but for the one that it ends on.
        self.sent_bytes[what] += 2 * (trainers - 1) * values.nbytes // trainers
        return self._begin(lambda: dist.all_reduce(values, group=self._trainers, async_op=True), what)

    def sum_over_all(self, values: Tensor, what: str) -> Pending:
        if self.world_size == 1:
            return Pending(self, None, what)
        return self._begin(lambda: dist.all_reduce(values, group=self._world, async_op=True), what)

    def gather(self, value: Any, what: str) -> list[Any]:
        """A JSON value of every rank, by rank."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode(), what)]

    def gather_numbers(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Some numbers of every trainer, by rank; as many of each."""
        if self.num_trainers == 1:
            return [list(numbers)]
        rows = torch.empty(self.num_trainers, len(numbers), dtype=torch.int64)
        mine = torch.tensor(numbers, dtype=torch.int64)
        self._begin(lambda: dist.all_gather(list(rows), mine, self._trainers, async_op=True), what).wait()
        everyones: list[list[int]] = rows.tolist()
        return everyones

    def tell_memory_ranks(self, numbers: Tensor, what: str) -> Pending:
        """Rank 0's numbers, on the ranks that do nothing but own rows, in place. These call it, too."""
        return self._begin(lambda: dist.broadcast(numbers, 0, self._told, async_op=True), what)

    def gather_bytes(self, data: bytes, what: str, *, among_trainers: bool = False) -> list[bytes]:
        """Some bytes of every rank, or of every trainer, by rank; none has to have as many as another."""
        num_ranks = len(self.roles.trainers) if among_trainers else self.world_size
        if num_ranks == 1:
            return [data]
        group = self._trainers if among_trainers else self._world
        sizes = torch.empty(num_ranks, 1, dtype=torch.int64)
        size = torch.tensor([len(data)])
        self._begin(lambda: dist.all_gather(list(sizes), size, group, async_op=True), what).wait()
        width = max(1, int(sizes.max()))
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]
        parts = torch.empty(num_ranks, width, dtype=torch.uint8)
        self._begin(lambda: dist.all_gather(list(parts), padded, group, async_op=True), what).wait()
        return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes | None, what: str) -> bytes:
        """Rank 0's bytes, on all ranks."""
        if self.world_size == 1:
            return data or b""
        size = torch.tensor([len(data or b"")])
        self._begin(lambda: dist.broadcast(size, 0, group=self._world, async_op=True), what).wait()
        if int(size) == 0:
            return b""
        buffer = torch.frombuffer(bytearray(data or b""), dtype=torch.uint8) if self.rank == 0 else _bytes(int(size))
        self._begin(lambda: dist.broadcast(buffer, 0, group=self._world, async_op=True), what).wait()
        return bytes(buffer.numpy())

    def barrier(self, what: str) -> None:
        self.gather_bytes(b"", what)

    @contextmanager
    def _saying_that_it_lives(self, what: str) -> Iterator[None]:
        """Four times in a timeout, from another thread: this one may be in the core for long."""
        if self.world_size == 1:
            yield
            return
        is_over = Event()

        def say() -> None:
            for beat in itertools.count():
                with suppress(RuntimeError):
                    self._store.set(_done_key(what), f"{_DOING}{beat}")
                if is_over.wait(self.timeout / 4):
                    return

        saying = Thread(target=say, name="holdfast-alive", daemon=True)
        saying.start()
        try:
            yield
        finally:
            is_over.set()
            saying.join()
            self._store.set(_done_key(what), _DONE)

    def _await_rank_0(self, what: str) -> None:
        key = _done_key(what)
        heard, since = b"", time.monotonic()
        pause = 0.001  # seconds: most of what rank 0 does is over soon
        while True:
            try:
                said = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"")
            except (RuntimeError, TimeoutError):
                self._broken = True
                raise self._cut_off(what) from None
            if said == _DONE.encode():
                return
            if said != heard:
                heard, since = said, time.monotonic()
            if self.stopping():
                raise GroupError(f"stopped while waiting for {what}")
            if time.monotonic() - since > self.timeout:
                raise self._failure(what, TimeoutError(f"{_NOT_YET}: rank 0 was silent"))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def all_or_none(self, work: Callable[[], Any], what: str) -> Any:
        """Runs `work` on every rank. Where it fails on one, all raise that error, whose message names the rank."""
        result, failure = _attempt(work)
        self.agree_that_none_failed(failure, what)
        return result

    def let_rank_0(self, work: Callable[[], _Answer], what: str) -> _Answer | None:
        """Runs `work` on rank 0, however long it takes while rank 0 lives, and returns there what it returned. Where
        it fails, all raise its error."""
        result, failure = None, None
        if self.rank == 0:
            with self._saying_that_it_lives(what):
                result, failure = _attempt(work)
        else:
            self._await_rank_0(what)
        self.agree_that_none_failed(failure, what)
        return result

    def agree_that_none_failed(self, failure: HoldfastError | None, what: str) -> None:
        """Raises what any rank has to tell: its own error where it is this one."""
        told = None if failure is None else [type(failure).__name__, str(failure)]
        failures = [(rank, found) for rank, found in enumerate(self.gather(told, what)) if found is not None]
        if failure is not None:
            raise failure
        if failures:
            rank, (kind, message) = failures[0]
            raise _error_class(kind)(f"rank {rank}: {message}")

    # Waiting, and what breaks.

    def _begin(self, collective: Callable[[], Any], what: str) -> Pending:
        try:
            return Pending(self, collective(), what)
        except RuntimeError as error:
            raise self._failure(what, error) from None

    def await_work(self, work: dist.Work, what: str) -> None:
        began = time.monotonic()
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                waited = time.monotonic() - began
                if _NOT_YET not in str(error) or work.is_completed():
                    raise self._failure(what, error) from None
                # A process that was asked to stop waits for as long as a step that goes well may take.
                patience = min(self.timeout, max(_LEAST_PATIENCE, 2 * self._longest_wait))
                if waited > (patience if self.stopping() else self.timeout):
                    raise self._failure(what, error) from None
            else:
                self._longest_wait = max(self._longest_wait, time.monotonic() - began)
                return

    def _failure(self, what: str, error: Exception) -> GroupError:
        """What to raise when a collective did not work: finds out which ranks do not answer any more."""
        self._broken = True
        self.tell(f"{_GAVE_UP} on {what}" if _is_timeout(error) else f"lost a connection, waiting for {what}")
        answers: dict[int, str] = {}

        def look() -> None:
            for rank in range(self.world_size):
                if rank not in answers and self._store.check([_key(rank)]):
                    answers[rank] = self._store.get(_key(rank)).decode()

        began = time.monotonic()
        while len(answers) < self.world_size:
            try:
                self._ask(look)
            except (RuntimeError, TimeoutError):
                return self._cut_off(what)
            grace = _GRACE_WHEN_STOPPED if self.stopping() else _GRACE_SECONDS
            if time.monotonic() - began > grace:
                break
            time.sleep(0.05)
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        failed = {rank: text for rank, text in answers.items() if text.startswith("failed: ")}
        where = f"step {self.step}, waiting for {what}"
        if failed:
            rank, text = min(failed.items())
            return GroupError(f"{where}: rank {rank} {text}")
        if silent:
            became = what_became_of(silent, error, answers.values(), self.timeout)
            return GroupError(f"{where}: {became}; the pool goes on from its newest durable step when it is opened")
        return GroupError(f"{where}: the connection between ranks that are all there broke ({_first_line(error)})")

    def tell(self, what: str) -> None:
        """Leaves word of what became of this rank, where ranks look that miss it. Never raises."""
        with suppress(RuntimeError, TimeoutError):
            self._ask(lambda: self._store.set(_key(self.rank), what))

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """What the store answers. Raises TimeoutError where it does not: over a cable that was cut it never would."""
        answer: Future[_Answer] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except RuntimeError as error:  # dist.DistError is one
                answer.set_exception(error)

        Thread(target=ask, name="holdfast-store", daemon=True).start()
        return answer.result(1.0 if self.stopping() else max(1.0, _GRACE_SECONDS))

    def _cut_off(self, what: str) -> GroupError:
        return GroupError(
            f"step {self.step}: rank {self.rank} ({socket.gethostname()}) waited for {what} and reaches neither the "
            "others nor the group's store: its network is cut off, or the store's is"
        )

    def tell_failure(self, error: BaseException) -> None:
        """This rank is about to end with `error`."""
        if not isinstance(error, GroupError):
            self.tell(f"failed: {type(error).__name__}: {_first_line(error)}")

    def close(self) -> None:
        """Ends it; waits for nobody. Nothing that has threads is left, for a forked child that collects this would wait
        for them."""
        if self._is_closed:
            return
        self._is_closed = True
        if dist.is_initialized():
            self._end_process_groups()
        self._world = self._trainers = self._told = None
        self._store = HashStore()

    def _end_process_groups(self) -> None:
        ours = [group for group in (self._world, self._trainers, self._told) if group is not None]
        if self._broken:
            for process_group in [*ours, *([] if self._is_guest else [dist.group.WORLD])]:
                _keep_for_good(process_group)
            for process_group in ours if self._is_guest else [None]:
                with suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group(process_group)
        elif self._is_guest:
            for process_group in ours:
                dist.destroy_process_group(process_group)
        else:
            dist.destroy_process_group()


def _keep_for_good(process_group: Any) -> None:
    """Gloo's destructor waits until what is on its way has timed out, even when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def what_became_of(silent: Sequence[int], error: Exception, words: Iterable[str], timeout: float) -> str:
    """Of the ranks that left no word, as far as a rank whose wait ended with `error` can tell. words: of the others."""
    # Who gives up closes its connections to all: a broken one then says nothing about those who are silent.
    somebody_gave_up = any(word.startswith(_GAVE_UP) for word in words)
    names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    if _is_broken_connection(error) and not somebody_gave_up:
        return f"{names} died or {'was' if len(silent) == 1 else 'were'} stopped"
    return f"{names} {'does' if len(silent) == 1 else 'do'} not answer within {timeout:g} s"


def _is_timeout(error: Exception) -> bool:
    """Whether a wait of ours passed its time, by Work.wait's word or gloo's."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def _is_broken_connection(error: Exception) -> bool:
    return any(word in str(error) for word in ("closed", "reset"))


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _attempt(work: Callable[[], _Answer]) -> tuple[_Answer | None, HoldfastError | None]:
    """What `work` returned, or how it failed."""
    try:
        return work(), None
    except HoldfastError as error:
        return None, error


def _key(rank: int) -> str:
    return f"holdfast/rank-{rank}"


def _done_key(what: str) -> str:
    return f"holdfast/done/{what}"


def _error_class(name: str) -> type[HoldfastError]:
    found = getattr(errors, name, GroupError)
    return found if isinstance(found, type) and issubclass(found, HoldfastError) else GroupError


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
