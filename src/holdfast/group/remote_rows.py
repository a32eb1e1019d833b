"""RemoteRows: rows that are looked up and updated at the ranks that own them.

A trainer routes the ids of its part of a batch to their owners, and joins what comes back. An owner plans, captures,
pools and updates the rows that it has, for all trainers, in the order of the whole batch: so whole tables are trained
with the bits that one process gives them, however many trainers there are.

Invariants
- Every rank makes the same calls in the same order, but for `plan`; a rank that only owns rows makes them as rank 0
  says (serving.py), without a batch of its own.
- Batches are captured in the order in which they were announced. Each goes on by a stage (counts, ids, plan) at fixed
  places of that order, so that the ranks' collectives meet, and a batch travels while earlier ones compute.
- A gradient that was sent has come back before it is used or dropped.
- Only pooled vectors and their gradients are ever on a trainer's device: they travel from host to host, and cross over
  in queues of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.device.arrivals import Arriving
from holdfast.device.faults import open_device
from holdfast.device.options import DeviceConfig
from holdfast.device.queues import Work, host_empty, new_queue, sent
from holdfast.errors import ConfigError, StepError
from holdfast.group.exchange import Exchange, Travelling, num_ids_in
from holdfast.group.group import Pending
from holdfast.group.own_part import OwnPart
from holdfast.group.owned_rows import OwnedInSlots, OwnedNearMemory, OwnedRows
from holdfast.group.roles import Roles
from holdfast.group.serving import HYPERPARAMETERS, Verb
from holdfast.pools.tables import EmbeddingBagConfig, features_of
from holdfast.rows.row_access import BatchIds, PlannedFeatures, check_under_way, second_pass
from holdfast.slots.access import open_slots

if TYPE_CHECKING:
    from holdfast.group.shared_pool import SharedPool


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """Vectors to a trainer, or gradients to an owner. sent: is read until they are there."""

    pending: Pending
    received: Tensor
    sent: Tensor | None


@dataclass(frozen=True, slots=True)
class RemoteCapture:
    """The rows of one forward. number: among those of its step. local: of an owner (owned_rows.py). vectors:
    pooled from them; they are on their way as soon as they are captured."""

    number: int
    step: int
    batch: Travelling
    local: Any
    vectors: _OnTheirWay

    @property
    def bytes(self) -> int:
        """That they take in this rank's log."""
        num_bytes: int = 0 if self.local is None else self.local.bytes
        return num_bytes


def device_of_ranks(config: DeviceConfig, roles: Roles) -> DeviceConfig:
    """The same, with what follows from the ranks decided: memory ranks have no device to keep rows on.

    Raises ConfigError for what a device cannot do where several ranks share the rows.
    """
    if config.rows == "auto" and roles.memory_ranks:
        config = replace(config, rows="near_memory")
    if config.way != "near_memory" and roles.memory_ranks:
        raise ConfigError(
            f"device.rows = {config.way!r}: memory ranks own the rows, and have no device to keep some of them on; set "
            "device.rows = 'near_memory', or let the ranks that train own the rows (without memory ranks)"
        )
    return config


class RemoteRows:
    """See row_access.RowAccess. number: of the collection among the pool's. config: where a trainer wants
    vectors, and how the ranks that own rows reach theirs."""

    looks_forward = True
    takes_hints = False  # the other ranks wait for what one announces
    answers_late = True

    def __init__(
        self, pool: SharedPool, number: int, tables: Sequence[EmbeddingBagConfig], config: DeviceConfig
    ) -> None:
        self.config = config
        self.device = open_device(config.kind if pool.group.is_trainer else "cpu")
        self._to_device = new_queue(self.device)
        self._to_host = new_queue(self.device)
        self._pool = pool
        self._number = number
        self.tables = list(tables)
        self._features = features_of(tables)
        self._width = sum(tables[t].embedding_dim for _, t in self._features)
        self._announced: deque[Travelling] = deque()
        self._captured: list[RemoteCapture] = []  # of the newest step that has any
        self._gradients: list[tuple[RemoteCapture, _OnTheirWay]] = []
        self._owned: OwnedRows | None = None
        self._collection: _core.Collection | None = None

    @property
    def description(self) -> str:
        if self._owned is not None and self._owned.description:
            return f"rows at their owners, {self._owned.description}"
        return "" if self.device.type == "cpu" else f"on {self.device}, rows at their owners"

    def bind(self) -> None:
        """To the pool's parts, now that they are open."""
        opened = self._pool.opened
        numbers = {entry.name: number for number, entry in enumerate(opened.manifest.tables)}
        mine = [numbers[table.name] for table in self.tables]
        # Memory ranks do most of a step's work, so trainers take from them what they can.
        apart = opened.group.roles.memory_ranks > 0
        self._router = opened.manifest.router(mine, self._features, numbers_ids=apart)
        if opened.part is not None:
            self._collection = opened.part.core.collection(mine, self._features)
            self._owned = self._own(opened.part, mine, opened.most_rows(mine))
        self._exchange = Exchange(opened.group, self._router, len(self._features), self._plan_routed)

    def _own(self, part: OwnPart, numbers: list[int], most_rows: list[int]) -> OwnedRows:
        assert self._collection is not None
        if self.config.way == "near_memory":
            return OwnedNearMemory(part.core, looks_forward=part.looks_forward)
        slots = open_slots(
            part, self._collection, numbers, self._features, self.config, device=self.device, most_rows=most_rows
        )
        return OwnedInSlots(slots, part.core, self.device)

    def _plan_routed(self, counts: NDArray[np.int64], messages: NDArray[np.int32], *, evaluates: bool) -> _core.Plan:
        assert self._collection is not None
        return self._collection.plan_routed(counts, messages, True, evaluates)

    # Before a batch's step.

    def plan(self, batch: BatchIds, *, ahead: bool, evaluates: bool) -> _core.Route:
        """Where the ids of this trainer's part go. Raises IdError (names feature, sample and value)."""
        _ = self._pool.opened
        num_bags = (len(batch.offsets) - 1) // batch.num_keys
        return self._router.route(batch.ids, batch.offsets, batch.weights, batch.blocks, batch.num_keys, 0, num_bags)

    def announce(self, planned: PlannedFeatures | None) -> None:
        self._pool.tell(Verb.ANNOUNCE, self._number)
        self._go_on()
        self._announced.append(self._begin(planned))

    def _begin(self, planned: PlannedFeatures | None) -> Travelling:
        return self._exchange.send_counts(None if planned is None else planned.plan, self._pool.status())

    def _go_on(self) -> None:
        """Takes each announced batch one stage on."""
        for batch in self._announced:
            if not batch.is_planned:
                self._take_on(batch, trains=True)

    def _take_on(self, batch: Travelling, *, trains: bool) -> None:
        if batch.ids is None:
            self._exchange.send_ids(batch)
            self._pool.take_note(batch.statuses)
            return
        self._exchange.plan(batch, evaluates=not trains)
        if trains and self._owned is not None and batch.plan is not None:
            self._owned.announce(batch.plan)

    def capture(self, planned: PlannedFeatures | None) -> RemoteCapture:
        self._pool.tell(Verb.CAPTURE, self._number)
        batch = self._announced.popleft() if self._announced else self._begin(planned)
        if planned is not None and batch.route is not planned.plan:
            raise StepError("a batch is captured before one that was announced earlier; keep their order")
        while not batch.is_planned:
            self._take_on(batch, trains=True)
        step = self._pool.step + 1
        if self._captured and self._captured[-1].step != step:
            self._captured = []
        local = pooled = None
        if self._owned is not None and batch.plan is not None:
            local = self._owned.capture(batch.plan)
            pooled = self._owned.lookup(local)
        self._captured.append(RemoteCapture(len(self._captured), step, batch, local, self._send(batch, pooled)))
        return self._captured[-1]

    def capture_ahead(self, planned: PlannedFeatures | None) -> bool:
        """On all owners, each as far as its own part can; awaits the ids of the batch, which comes next. Returns
        whether this rank's part has."""
        self._pool.tell(Verb.CAPTURE_AHEAD, self._number)
        batch = self._next(planned)
        return self._owned is not None and batch.plan is not None and self._owned.capture_ahead(batch.plan)

    def _next(self, planned: PlannedFeatures | None) -> Travelling:
        """The batch that is captured next, planned."""
        if not self._announced:
            self._announced.append(self._begin(planned))
        batch = self._announced[0]
        if planned is not None and batch.route is not planned.plan:
            raise StepError("a batch is captured ahead of one that was announced earlier; keep their order")
        while not batch.is_planned:
            self._take_on(batch, trains=True)
        return batch

    # A step.

    def lookup(self, captured: RemoteCapture) -> Tensor:
        """Of this trainer's part."""
        self._pool.tell(Verb.LOOKUP, self._number, captured.number)
        return self._joined(captured.batch, captured.vectors)

    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None:
        """By the owners, of what `following` asks each for."""
        is_known = bool(self._captured) and self._captured[-1].batch.route is current.plan
        self._pool.tell(Verb.LOOKUP_AHEAD, self._number, is_known)
        self.pool_ahead(following, self.before(current, is_known=is_known))

    def before(self, current: PlannedFeatures | None, *, is_known: bool) -> _core.Plan | None:
        """An owner's plan of the batch before the next; is_known: it was captured last. Else it is of the step before
        the first of this life, and travels now."""
        if is_known:
            return self._captured[-1].batch.plan
        batch = self._begin(current)
        while not batch.is_planned:
            self._take_on(batch, trains=False)
        return batch.plan

    def pool_ahead(self, following: PlannedFeatures | None, before: _core.Plan | None) -> None:
        batch = self._next(following)
        if self._owned is not None and batch.plan is not None and before is not None:
            self._owned.lookup_ahead(batch.plan, before)

    def evaluate(self, planned: PlannedFeatures | None) -> Tensor:
        self._pool.tell(Verb.EVALUATE, self._number)
        batch = self._begin(planned)
        while not batch.is_planned:
            self._take_on(batch, trains=False)
        pooled = None
        if batch.plan is not None:
            assert self._owned is not None
            pooled = self._owned.evaluate(batch.plan)
        return self._joined(batch, self._send(batch, pooled))

    def _send(self, batch: Travelling, pooled: Tensor | None) -> _OnTheirWay:
        """An owner's pooled vectors to their trainers."""
        pending, received = self._exchange.send_vectors(batch, pooled)
        return _OnTheirWay(pending, received, pooled)

    def _joined(self, batch: Travelling, vectors: _OnTheirWay) -> Tensor:
        """A trainer's, once they are there; announced batches go on meanwhile."""
        self._go_on()
        vectors.pending.wait()
        if batch.route is None:
            return torch.empty(0, self._width, dtype=torch.float32, device="cpu")
        out = host_empty((batch.route.num_bags, self._width), torch.float32, self.device)
        batch.route.combine(vectors.received.numpy(), out.numpy())
        return sent(out, self.device, self._to_device)

    def add_gradient(self, captured: RemoteCapture, grad: Tensor | None) -> Tensor:
        """The gradient of what this rank looked up; it travels while the dense part goes on."""
        check_under_way(captured, self._pool.step, "backward through a forward")
        self._pool.tell(Verb.ADD_GRADIENT, self._number, captured.number)
        first = not self._gradients
        takes_one_pass = self._owned is not None and self._owned.takes_one_pass
        if takes_one_pass and any(of is not captured for of, _ in self._gradients):
            raise second_pass()
        if self._owned is not None:
            self._owned.drop()
        spread, is_finite, route = None, True, captured.batch.route
        if route is not None and grad is not None:
            arrived = Arriving(grad.to(torch.float32).contiguous(), self._to_host).wait().numpy()
            is_finite = _core.all_finite(arrived)
            spread = torch.empty(sum(route.block_floats), dtype=torch.float32, device="cpu")
            route.spread(arrived, spread.numpy())
        pending, received = self._exchange.send_gradients(captured.batch, spread)
        self._gradients.append((captured, _OnTheirWay(pending, received, spread)))
        self._go_on()
        return torch.tensor(float(first) if is_finite else float("nan"), device=self.device)

    def weight_gradient(self, captured: RemoteCapture, grad: Tensor | None, out: Tensor | None) -> None:
        """From the owners, who have the gradients of the vectors since `add_gradient`. StepError without that."""
        if not any(of is captured for of, _ in self._gradients):
            raise StepError(
                "the gradient of per-sample weights alone: rows of other ranks give it with their own, call backward"
            )
        self._pool.tell(Verb.WEIGHT_GRADIENT, self._number, captured.number)
        of_weights = None
        if captured.local is not None:
            arrived = next(gradients for of, gradients in reversed(self._gradients) if of is captured)
            arrived.pending.wait()
            assert self._owned is not None and captured.batch.counts is not None
            of_weights = self._owned.weight_gradients(
                captured.local, arrived.received, num_ids_in(captured.batch.counts)
            )
        pending, received = self._exchange.send_weight_gradients(captured.batch, of_weights)
        pending.wait()
        if out is not None and captured.batch.route is not None:
            captured.batch.route.gather_weights(received.numpy(), out.numpy())

    def captured(self, number: int) -> RemoteCapture:
        """Of the step that is under way."""
        return self._captured[number]

    def square_of_gradients(self) -> Tensor:
        """Of all owners' rows."""
        self._pool.tell(Verb.NORM, self._number)
        arrived = self._arrived()
        square = 0.0
        if self._owned is not None:
            square = self._owned.sum_of_squares(arrived)
        total = torch.tensor(square / self._pool.group.num_trainers**2, dtype=torch.float64, device="cpu")
        self._pool.group.sum_over_all(total, "the gradients' norm").wait()
        return total.to(self.device)

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def update(self, *, gradient_scale: Tensor | float, **hyperparameters: float) -> float:
        """Each trainer's gradients count as they do in the mean over all, as the dense ones do."""
        scale = float(gradient_scale)
        how = [self._number, scale, *(hyperparameters[name] for name in HYPERPARAMETERS)]
        self._pool.tell(Verb.UPDATE, *how)
        arrived = self._arrived()
        self._pool.opened.note_update(how)
        if self._owned is not None:
            self._owned.update(arrived, gradient_scale=scale / self._pool.group.num_trainers, **hyperparameters)
        return scale

    def drop_gradients(self) -> None:
        if self._gradients:
            self._pool.tell(Verb.DROP, self._number)
            self._arrived()
        self._gradients = []
        if self._owned is not None:
            self._owned.drop()

    def _arrived(self) -> list[tuple[Any, Tensor]]:
        """This owner's."""
        for _, gradients in self._gradients:
            gradients.pending.wait()
        return [
            (captured.local, gradients.received)
            for captured, gradients in self._gradients
            if captured.local is not None
        ]

    def finish(self) -> None:
        """Takes what travels to where it goes: nothing is captured any more."""
        if self._announced:
            self._pool.tell(Verb.FINISH, self._number)
        for batch in self._announced:
            while not batch.is_planned:
                self._take_on(batch, trains=False)
        self._announced.clear()
        self.drop_gradients()

    def forget(self) -> None:
        """Lets go of what travelled, now that the group is closed: it holds on to the group's connections."""
        self._announced.clear()
        self._captured = []
        self._gradients = []
        if self._owned is not None:
            self._owned.forget()

    def traffic(self) -> dict[str, float]:
        return {} if self._owned is None else self._owned.traffic()

    def work_of(self, captured: RemoteCapture) -> list[Work]:
        return [] if self._owned is None or captured.local is None else self._owned.work_of(captured.local)
