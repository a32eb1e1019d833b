"""A CUDA device that is only pretended: the processor does what is asked of it, at once, and its order is checked.

Whatever is begun in one queue and touched from another, or from the host, has to be put in order by marks; on the
processor everything happens to be in order. So each access to memory is kept with the moments that must come before it
(vector clocks), and two of them that nothing puts in order are reported, as on a device they would be a matter of luck.

Reported are
- two accesses to one memory, one of them writing, that may happen in either order;
- memory of the device that is given away while another queue than the one it was allocated in may still use it;
- operators with operands on both sides.
What makes the host wait without being asked to (`item`, copies that are not page-locked) is counted in `waits`.

What other threads of the host would do is done by the one that asks: the pool's at once, and what waits for the device
as late as somebody wants to know of it, so that the device is as far ahead as it can be.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.slots.ordered_thread import done_here

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten

Moments = dict[str, int]  # of every actor (the host, the queues), how far it has come


def _join(here: Moments, there: Moments) -> None:
    for actor, moment in there.items():
        here[actor] = max(here.get(actor, 0), moment)


@dataclass(frozen=True)
class Access:
    """rows: that were touched, all of them where that is None."""

    actor: str
    moment: int
    place: str
    writes: bool
    rows: frozenset[int] | None

    def conflicts(self, other: Access) -> bool:
        if not (self.writes or other.writes):
            return False
        return self.rows is None or other.rows is None or not self.rows.isdisjoint(other.rows)


@dataclass
class Memory:
    """Of one storage."""

    alive: StorageWeakRef
    home: str | None  # the queue in which it was allocated, None on the host
    is_pinned: bool = False
    accesses: list[Access] = field(default_factory=list)
    kept_by: set[str] = field(default_factory=set)


class Machine:
    """The host, the device's queues, and their memory. problems: what is wrong, in words."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.waits: list[str] = []
        self._moments: dict[str, Moments] = {"host": {}}
        self._memory: dict[int, Memory] = {}
        self._current = [TracedQueue(self, "compute")]
        self._num_queues = 0
        self.makes_on_device = False
        self.makes_pinned = False

    # Queues.

    def new_queue(self, device: torch.device) -> TracedQueue:
        self._num_queues += 1
        return TracedQueue(self, f"queue {self._num_queues}")

    def current_queue(self, device: torch.device) -> TracedQueue:
        return self._current[-1]

    def moments(self, actor: str) -> Moments:
        self.collect()
        moments = self._moments.setdefault(actor, {})
        _join(moments, self._moments["host"])  # what the host begins is begun after all that it has seen
        return moments

    def wait_for(self, moments: Moments) -> None:
        self.collect()
        _join(self._moments["host"], moments)

    # Memory.

    def of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            home = self._current[-1].name if self.makes_on_device else None
            self._memory[storage._cdata] = Memory(StorageWeakRef(storage), home, self.makes_pinned)
        return self._memory[storage._cdata]

    def is_on_device(self, tensor: Tensor) -> bool:
        known = self._memory.get(tensor.untyped_storage()._cdata)
        return known is not None and known.home is not None

    def touch(
        self,
        actor: str,
        what: str,
        reads: list[Tensor],
        writes: list[Tensor],
        rows: tuple[Tensor, frozenset[int]] | None = None,
    ) -> None:
        """rows: of one of the tensors; of the others all are touched."""
        now = self.moments(actor)
        now[actor] = now.get(actor, 0) + 1
        place = f"{what} of {actor}{_place()}"
        for tensor in (*reads, *writes):
            memory = self.of(tensor)
            own_rows = rows[1] if rows is not None and rows[0] is tensor else None
            access = Access(actor, now[actor], place, any(tensor is written for written in writes), own_rows)
            for earlier in memory.accesses:
                if access.conflicts(earlier) and now.get(earlier.actor, 0) < earlier.moment:
                    self.problems.append(f"not in order: {earlier.place}, and {place}")
            if access.writes and access.rows is None:
                memory.accesses.clear()
            memory.accesses.append(access)

    def collect(self) -> None:
        """Looks at memory that was given away since the last time."""
        for key, memory in list(self._memory.items()):
            if not memory.alive.expired():
                continue
            del self._memory[key]
            if memory.home is None:
                continue  # torch gives page-locked memory away when the copies that it was used in are over
            next_user = dict(self._moments["host"])
            _join(next_user, self._moments.get(memory.home, {}))
            for access in memory.accesses:
                if access.actor not in memory.kept_by and next_user.get(access.actor, 0) < access.moment:
                    self.problems.append(f"given away by {memory.home} before it was over: {access.place}")


class TracedQueue:
    """See holdfast.device.queues.Queue."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine, self.name = machine, name

    def mark(self, *, timed: bool = False) -> TracedMark:
        moments = self._machine.moments(self.name)
        moments[self.name] = moments.get(self.name, 0) + 1
        return TracedMark(self._machine, dict(moments), timed)

    def follow(self, mark: TracedMark) -> None:
        _join(self._machine.moments(self.name), mark.moments)

    def keep(self, tensor: Tensor) -> None:
        self._machine.of(tensor).kept_by.add(self.name)

    def __enter__(self) -> Self:
        self._machine._current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._machine._current.pop() is self


class TracedMark:
    def __init__(self, machine: Machine, moments: Moments, timed: bool) -> None:
        self._machine, self.moments, self._timed = machine, moments, timed

    def wait(self) -> None:
        self._machine.wait_for(self.moments)

    def is_reached(self) -> bool:
        self.wait()
        return True

    def was_waited_for(self) -> bool:
        host = self._machine._moments["host"]
        return all(host.get(actor, 0) >= moment for actor, moment in self.moments.items())

    def seconds_since(self, earlier: TracedMark) -> float:
        if not (self._timed and earlier._timed and self.was_waited_for() and earlier.was_waited_for()):
            self._machine.problems.append("the time of a mark that need not be reached yet")
        return 0.0


class _Accesses(TorchDispatchMode):
    """What operators read and write, and which queue they run in."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = self._machine, kwargs or {}
        machine.collect()
        reads, writes = [], []
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        for tensor in (*reads, *writes):
            machine.of(tensor)
        outcome = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        if any(alias is not None and not alias.is_write for alias in (r.alias_info for r in func._schema.returns)):
            return outcome  # a view touches nothing
        alone = [tensor for tensor in reads if tensor.dim() == 0 and not machine.is_on_device(tensor)]  # as a number is
        sides = {machine.is_on_device(t) for t in (*reads, *writes) if not any(t is number for number in alone)}
        on_device = machine.makes_on_device or any(machine.is_on_device(tensor) for tensor in (*reads, *writes))
        is_copy = func is _aten.copy_.default
        if len(sides) > 1 and not is_copy:
            machine.problems.append(f"{func} has operands on both sides{_place()}")
        before, machine.makes_on_device = machine.makes_on_device, on_device
        for tensor in made:
            machine.of(tensor)
        machine.makes_on_device = before
        if func in (_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default):
            return outcome
        actor = machine.current_queue(CUDA).name if on_device else "host"
        machine.touch(actor, str(func), reads, [*writes, *made], _rows_of(func, args))
        crosses = is_copy and len(sides) > 1
        if crosses:
            host = next(tensor for tensor in (*reads, *writes) if not machine.is_on_device(tensor))
            waits = not (len(args) > 2 and args[2]) or not machine.of(host).is_pinned
        if on_device and (func is _aten._local_scalar_dense.default or (crosses and waits)):
            machine.waits.append(f"{func}{_place()}")
            machine.wait_for(machine.moments(actor))
        return outcome


class _Devices(TorchFunctionMode):
    """Answers where tensors are, and brings them there."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = self._machine, dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return CUDA if machine.is_on_device(args[0]) else torch.device("cpu")
        if name == "is_pinned":
            return machine.of(args[0]).is_pinned
        if name == "numpy":
            machine.touch("host", "numpy", [], [args[0]])
        if func is Tensor.backward:
            gradient = kwargs.get("gradient")
            gradient = torch.ones_like(args[0]) if gradient is None else gradient
            with self:  # what functions do in their backward is seen, too
                _engine_run_backward(
                    args[:1], (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            return None
        if name == "pin_memory":
            with self._making(pinned=True):
                return args[0].clone()
        if name in ("to", "cpu") and isinstance(args[0], Tensor):
            return self._brought(func, name, args, kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
            with self._making(on_device=True):
                return func(*args, **kwargs)
        with self._making(on_device=machine.makes_on_device, pinned=pinned or machine.makes_pinned):
            return func(*args, **kwargs)

    def _brought(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        wanted = torch.device("cpu") if name == "cpu" else kwargs.pop("device", None)
        for value in [v for v in rest if isinstance(v, (str, torch.device))]:
            wanted = torch.device(value)
            rest.remove(value)
        non_blocking = bool(kwargs.pop("non_blocking", False))
        if rest[:1] == [None]:  # nn.Module.to says the dtype by place, and None
            del rest[0]
        if rest and isinstance(rest[-1], bool):
            non_blocking = rest.pop()
        converted = func(tensor, *rest, **kwargs) if name == "to" and (rest or kwargs) else tensor
        if wanted is None or (torch.device(wanted).type == "cuda") == self._machine.is_on_device(converted):
            return converted
        with self._making(on_device=torch.device(wanted).type == "cuda"):
            there = torch.empty(converted.shape, dtype=converted.dtype)
        there.copy_(converted, non_blocking)
        return there

    @contextmanager
    def _making(self, *, on_device: bool = False, pinned: bool = False) -> Iterator[None]:
        machine = self._machine
        before = machine.makes_on_device, machine.makes_pinned
        machine.makes_on_device, machine.makes_pinned = on_device, pinned
        try:
            yield
        finally:
            machine.makes_on_device, machine.makes_pinned = before


class _Here:
    """See holdfast.slots.ordered_thread.OrderedThread. is_late: nothing is done before it is wanted."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._undone: deque[_Late] = deque()

    def ask(self, work: Callable[[], Any]) -> _Late:
        self._undone.append(_Late(self, work))
        future = self._undone[-1]
        if not self._is_late:
            self.settle()
        return future

    def settle(self) -> None:
        if self._undone:
            self.do_until(self._undone[-1])

    def do_until(self, last: _Late) -> None:
        while not last.done():
            self._undone.popleft().run()

    def close(self) -> None:
        self.settle()


class _Late:
    """As much of a Future as is used."""

    def __init__(self, thread: _Here, work: Callable[[], Any]) -> None:
        self._thread, self._work = thread, work
        self._done: Future[Any] | None = None

    def run(self) -> None:
        self._done = done_here(self._work)

    def done(self) -> bool:
        return self._done is not None

    def exception(self) -> BaseException | None:
        self._thread.do_until(self)
        assert self._done is not None
        return self._done.exception()

    def result(self) -> Any:
        self._thread.do_until(self)
        assert self._done is not None
        return self._done.result()


@contextmanager
def pretended_cuda(monkeypatch: Any) -> Iterator[Machine]:
    """Inside, "cuda" is a device like any other, for everything that asks holdfast.device.queues for its queues."""
    from holdfast.device import arrivals, kernels, queues
    from holdfast.group import device_sums, owned_rows, remote_rows
    from holdfast.rows import near_memory
    from holdfast.run import assembly as run
    from holdfast.slots import access, home_mapping, slot_rows, write_behind
    from holdfast.state import provenance
    from holdfast.train import checkpoint, dense_snapshot, trainer, training_state

    machine = Machine()
    for module in (
        queues, slot_rows, arrivals, near_memory, device_sums, owned_rows, remote_rows, trainer, checkpoint,
        dense_snapshot,
    ):  # fmt: skip
        for name in ("new_queue", "current_queue"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(machine, name))
    monkeypatch.setattr(write_behind, "OrderedThread", lambda name: _Here(is_late="device" in name))
    for module in (access, run, remote_rows):
        monkeypatch.setattr(module, "open_device", lambda name: CUDA if name == "cuda" else torch.device("cpu"))
    monkeypatch.setattr(home_mapping, "_register", lambda *_: "")
    monkeypatch.setattr(home_mapping, "_unregister", lambda *_: None)
    monkeypatch.setattr(
        device_sums, "_why_not", lambda device, wanted: "" if wanted != "host" else "it is asked not to"
    )
    monkeypatch.setattr(device_sums, "_name_of", lambda device: str(os.getpid()))
    monkeypatch.setattr(device_sums, "_meet", _meet_in_place_of_nccl)
    monkeypatch.setattr(run, "prepare_device", lambda device: [])
    monkeypatch.setattr(training_state, "check_model", lambda model: [])  # of a device that was prepared
    monkeypatch.setattr(provenance, "device_settings", lambda device: {})
    for name in kernels.__all__:
        if callable(function := getattr(kernels, name)) and not isinstance(function, type):
            monkeypatch.setattr(kernels, name, _unwatched_waits(machine, function))
    with ExitStack() as stack:
        stack.enter_context(_Devices(machine))
        stack.enter_context(_Accesses(machine))
        yield machine


def _meet_in_place_of_nccl(group: Any) -> Any:
    """Gloo's collectives do with the device's memory what NCCL's would."""
    return torch.distributed.new_group(list(group.roles.trainers), backend="gloo", use_local_synchronization=True)


def _unwatched_waits(machine: Machine, kernel: Any) -> Any:
    """A twin in plain torch waits for the device; what Triton's kernel does, it does without."""

    def call(*args: Any, **options: Any) -> Any:
        num_waits = len(machine.waits)
        host = dict(machine._moments["host"])
        result = kernel(*args, **options)
        del machine.waits[num_waits:]
        machine._moments["host"] = host
        return result

    return call


def _rows_of(func: Any, args: Any) -> tuple[Tensor, frozenset[int]] | None:
    """The rows of its first operand that an operator with an index touches."""
    if func not in (_aten.index.Tensor, _aten.index_put_.default) or len(args[1]) != 1 or args[1][0].dim() != 1:
        return None
    return args[0], frozenset(args[1][0].tolist())


def _place() -> str:
    """The lines of holdfast that are being run."""
    lines = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in traceback.extract_stack(limit=40)
        if "/holdfast/" in frame.filename
    ]
    return " at " + " < ".join(reversed(lines[-3:])) if lines else ""
