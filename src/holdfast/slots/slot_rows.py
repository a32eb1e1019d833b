"""Rows in slots of the device's memory: the scratchpad of an accelerator.

    announce: plan → slots → missing rows read from the pool → copied over, and into their slots
    lookup, update: on the device, in the slots; the updated rows start on their way back
    retire (write_behind.py): the pool gets them

Invariants
- When a batch is captured every one of its rows has a slot, and the bytes of those that were missing are ordered before
  its lookup: in the train stage a miss is impossible.
- A slot is written by the arrival of its row, and by updates; never while an earlier step on the device may still read
  it as another row's: it is held until that step is retired.
- The numbers do not depend on which slot a row has, on how many there are, or on the window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast import _core
from holdfast.device import kernels
from holdfast.device.arrivals import Arriving
from holdfast.device.faults import device_errors
from holdfast.device.queues import Work, current_queue, host_empty, new_queue
from holdfast.errors import StepError, WindowTooLarge
from holdfast.pools.pool import Pool
from holdfast.rows.row_access import BatchIds, PlannedFeatures, check_under_way, plan_here
from holdfast.slots.home_mapping import HomeMapping
from holdfast.slots.slot_batch import Part, Returning, SlotBatch, bytes_of, floats_of, unpack
from holdfast.slots.slot_group import SlotGroup, row_bytes

_FETCHED_FIRST = 2  # batches that a pool on a disk fetches rows of, before they are wanted in slots
_MOST_SLOTS = 2**31 - 1  # their numbers are int32

COMPUTING = "device"  # names of queues, as a trace shows them
_ROWS_IN = "device, rows in"
_ROWS_BACK = "device, rows back"


class SlotRows:
    """See row_access.RowAccess.

    numbers: of the collection's tables in the pool. num_bytes: of device memory for rows and their state.
    mapping: where the device reads the pool's own memory (the direct way).

    Raises OutOfDeviceMemory; WindowTooLarge, where one batch has more rows than there is room for.
    """

    takes_hints = False  # a batch that is left out would hold its slots
    answers_late = False

    def __init__(
        self,
        pool: Pool,
        collection: _core.Collection,
        numbers: Sequence[int],
        features: Sequence[tuple[str, int]],
        *,
        device: torch.device,
        num_bytes: int,
        mapping: HomeMapping | None = None,
    ) -> None:
        self.device = device
        self._pool = pool
        self._collection = collection
        self._behind = pool.write_behind()
        self._mapping = mapping
        specs = [pool.core.tables[number] for number in numbers]
        alike: dict[tuple[int, int, int], list[int]] = {}
        for table, spec in enumerate(specs):
            alike.setdefault((spec.embedding_dim, spec.dtype, spec.pooling), []).append(table)
        wanted = [sum(row_bytes(specs[t]) * specs[t].num_embeddings for t in tables) for tables in alike.values()]
        share = min(1.0, num_bytes / sum(wanted))
        self._num_bytes = num_bytes
        with device_errors("the scratchpad", bytes_wanted=math.ceil(share * sum(wanted))):
            self._groups = [
                SlotGroup(
                    collection,
                    tables,
                    [specs[t] for t in tables],
                    [f for f, (_, table) in enumerate(features) if table in tables],
                    num_slots=min(max(1, int(share * bytes_wanted) // row_bytes(specs[tables[0]])), _MOST_SLOTS),
                    share=bytes_wanted / sum(wanted),
                    keep=mapping is None,
                    device=device,
                )
                for tables, bytes_wanted in zip(alike.values(), wanted, strict=True)
            ]
        # Of the columns of pooled vectors; with 4 they are read and written 16 bytes at a time.
        self._alignment = math.gcd(4, *(spec.embedding_dim for spec in specs))
        self._seed = int(pool.core.header["seed"])
        self._to_device = new_queue(device)
        self._to_host = new_queue(device)
        self._waiting: deque[PlannedFeatures] = deque()  # announced, and without slots yet
        self._arriving: dict[int, SlotBatch] = {}  # by id of the plan
        self._captured: list[SlotBatch] = []  # of the step that is under way
        self._gradient: tuple[SlotBatch, Tensor] | None = None  # of the step's one forward pass
        self._sums: list[Tensor] | None = None
        self._updated: Returning | None = None
        self._num_delayed = 0  # announced batches that had to wait for slots
        self._bytes_in = 0
        self._bytes_out = 0
        self._behind.add(self)

    @property
    def num_slots(self) -> int:
        return sum(group.directory.num_slots for group in self._groups)

    @property
    def description(self) -> str:
        read = "through staging" if self._mapping is None else "from the pool's own memory"
        return f"on {self.device}, rows in {self.num_slots:,} slots of its memory, read {read}"

    # Before a batch's step.

    @property
    def looks_forward(self) -> bool:
        return True

    def plan(self, batch: BatchIds, *, ahead: bool) -> _core.Plan:
        return plan_here(self._collection, batch, ahead=ahead)

    def announce(self, planned: PlannedFeatures) -> None:
        if self._pool.looks_forward:
            self._pool.core.announce(planned.plan)
        self._waiting.append(planned)
        leave = _FETCHED_FIRST if self._pool.looks_forward else 0
        self._admit_waiting(leave)
        self._num_delayed += len(self._waiting) > leave

    def _admit_waiting(self, leave: int) -> None:
        """Gives slots to the batches that were announced, but for the newest `leave`, as far as there is room."""
        while len(self._waiting) > leave:
            planned = self._waiting.popleft()  # one that fails waits no more
            batch = self._admit(planned)
            if batch is None:
                self._waiting.appendleft(planned)
                return
            self._arriving[id(planned.plan)] = batch

    def _admit(self, planned: PlannedFeatures) -> SlotBatch | None:
        """None where there is no room before a step is retired."""
        admissions: list[_core.Admission] = []
        try:
            for group in self._groups:
                admission = group.directory.admit(planned.plan)
                if admission is None:
                    self._forget(admissions)
                    return None
                admissions.append(admission)
            with device_errors("a batch's rows"), self._to_device as queue:
                began = queue.mark(timed=True)
                if self._mapping is not None and any(admission.num_missing for admission in admissions):
                    self._mapping.materialize(planned.plan)
                parts = [
                    self._bring(group, admission) for group, admission in zip(self._groups, admissions, strict=True)
                ]
                arrived = queue.mark(timed=True)
                return SlotBatch(planned, parts, arrived, [Work("rows in", _ROWS_IN, began, arrived)])
        except WindowTooLarge as error:
            self._forget(admissions)
            raise WindowTooLarge(f"{error}; {self._bytes_wanted(planned.plan)}") from error
        except BaseException:
            self._forget(admissions)
            raise

    def _forget(self, admissions: list[_core.Admission]) -> None:
        """Of the first groups: their bytes do not come."""
        for group, admission in zip(self._groups, admissions, strict=False):
            group.directory.forget(admission)

    def _bytes_wanted(self, plan: _core.Plan) -> str:
        wanted = math.ceil(max(group.bytes_wanted(plan) / group.share for group in self._groups))
        there = f"device.scratchpad_bytes is {self._num_bytes:,}"
        return f"{there}, this batch alone wants {wanted:,}, a window of several as many times that"

    def _bring(self, group: SlotGroup, admission: _core.Admission) -> Part:
        """What the device needs to know of the batch, and the rows that it lacks, are on their way."""
        packed = host_empty((admission.packed_bytes,), torch.uint8, self.device)
        places = admission.pack(packed.numpy())
        there = packed.to(self.device, non_blocking=True)
        arrays = unpack(there, places)
        part = Part(group, admission, arrays)
        self._bytes_in += packed.nbytes
        if admission.num_missing == 0:
            return part
        slots, missing = arrays["slots"], arrays["missing"]
        if self._mapping is not None:
            kernels.gather_home(
                self._mapping.bases(), arrays["tables"], arrays["rows"], missing, slots, group.weights, group.state
            )
            self._bytes_in += admission.num_missing * group.row_bytes
            return part
        weights, state = group.empty_rows(admission.num_missing, host=True)
        self._pool.core.read_missing(admission, bytes_of(weights), floats_of(state))
        self._bytes_in += admission.num_missing * group.row_bytes
        kernels.scatter_rows(
            weights.to(self.device, non_blocking=True),
            None if state is None else state.to(self.device, non_blocking=True),
            slots,
            missing,
            group.weights,
            group.state,
        )
        return part

    # A step.

    def capture(self, planned: PlannedFeatures) -> SlotBatch:
        self._behind.check()
        key = id(planned.plan)
        if key not in self._arriving and not any(waiting.plan is planned.plan for waiting in self._waiting):
            self.announce(planned)
        if key not in self._arriving:
            later = [waiting.plan for waiting in reversed(self._waiting)].index(planned.plan)
            self._admit_waiting(leave=later)
            while key not in self._arriving:
                if len(self._behind) == 0:
                    raise StepError(
                        f"the rows of a batch find no room among the {self.num_slots} slots of the scratchpad: earlier "
                        "batches hold them that were announced or looked up, and not committed; commit those, or give "
                        "device.scratchpad_bytes more"
                    )
                self._behind.retire()
                self._admit_waiting(leave=later)
        batch = self._arriving.pop(key)
        batch.step = self._pool.step + 1
        self._captured.append(batch)
        return batch

    def capture_ahead(self, planned: PlannedFeatures) -> bool:
        return False

    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None:
        raise StepError("lookup_ahead goes with device.rows = 'near_memory' alone")

    def lookup(self, captured: SlotBatch) -> Tensor:
        check_under_way(captured, self._pool.step, "lookup with a capture")
        plan = captured.planned.plan
        queue = current_queue(self.device)
        queue.follow(captured.arrived)
        began = queue.mark(timed=True)
        out = torch.empty(plan.num_bags, plan.output_width, device=self.device)
        for part in captured.parts:
            arrays = part.arrays
            kernels.pooled_lookup(
                part.group.weights,
                arrays["lookup_slot"],
                arrays["bag_start"],
                arrays["columns"],
                out,
                scale=arrays.get("lookup_scale"),
                mean=part.group.mean,
                alignment=self._alignment,
            )
        captured.work.append(Work("lookup", COMPUTING, began, queue.mark(timed=True)))
        return out

    def evaluate(self, planned: PlannedFeatures) -> Tensor:
        self._pool.drain()
        self._behind.check()
        plan = planned.plan
        out = host_empty((plan.num_bags, plan.output_width), torch.float32, self.device)
        self._pool.core.evaluate(plan, out.numpy())
        return out.to(self.device)

    def add_gradient(self, captured: SlotBatch, grad: Tensor) -> Tensor:
        check_under_way(captured, self._pool.step, "backward through a forward")
        if self._gradient is not None:
            raise StepError(
                "a second forward pass of one collection in one step: rows in slots are updated from one; accumulate "
                "over several with device.rows = 'near_memory'"
            )
        grad = grad.to(torch.float32).contiguous()
        self._gradient = (captured, grad)
        return torch.where(kernels.all_finite(grad), 1.0, float("nan"))

    def weight_gradient(self, captured: SlotBatch, grad: Tensor, out: Tensor) -> None:
        spans = captured.planned.plan.spans
        grad = grad.to(torch.float32).contiguous()
        for part in captured.parts:
            arrays = part.arrays
            found = kernels.scale_gradients(
                part.group.weights,
                arrays["lookup_slot"],
                arrays["bag_start"],
                arrays["columns"],
                grad,
                mean=part.group.mean,
                alignment=self._alignment,
            )
            there = Arriving(found, self._to_host).wait()
            begin = 0
            for feature in part.group.features:
                first, last = spans[feature]
                out[first:last] += there[begin : begin + last - first]
                begin += last - first

    def square_of_gradients(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for sums in self._summed():
            total += sums.double().square().sum()
        return total

    @property
    def has_gradients(self) -> bool:
        return self._gradient is not None

    def update(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None:
        assert self._gradient is not None
        batch = self._gradient[0]
        numbers = kernels.Hyperparameters(step=self._behind.row_updates + 1, **hyperparameters)
        returning = Returning(batch)
        queue = current_queue(self.device)
        with device_errors("updated rows"):
            began = queue.mark(timed=True)
            for part, sums in zip(batch.parts, self._summed(), strict=True):
                weights, state = part.group.empty_rows(part.admission.num_unique)
                kernels.update_rows(
                    part.group.optimizer,
                    part.group.weights,
                    part.group.state,
                    part.arrays["slots"],
                    sums,
                    hyperparameters=numbers,
                    gradient_scale=gradient_scale,
                    rounding=(self._seed, part.arrays["tables"], part.arrays["rows"]),
                    fresh_weights=weights,
                    fresh_state=state,
                )
                returning.add(weights, state, self._to_host)
                self._bytes_out += part.admission.num_unique * part.group.row_bytes
            updated = queue.mark(timed=True)
            self._to_host.follow(updated)
            returning.back = self._to_host.mark(timed=True)
            batch.work.append(Work("update", COMPUTING, began, updated))
            batch.work.append(Work("rows back", _ROWS_BACK, updated, returning.back))
        self._updated = returning
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._gradient = None
        self._sums = None

    def _summed(self) -> list[Tensor]:
        if self._sums is None:
            assert self._gradient is not None
            batch, grad = self._gradient
            self._sums = [
                kernels.segment_sum(
                    grad,
                    part.arrays["row_start"],
                    part.arrays["gradient_offset"],
                    part.group.dim,
                    scale=part.arrays.get("gradient_scale"),
                    max_occurrences=part.admission.max_occurrences,
                    alignment=self._alignment,
                )
                for part in batch.parts
            ]
        return self._sums

    def work_of(self, captured: SlotBatch) -> list[Work]:
        return captured.work

    # After it.

    def take_step(self) -> tuple[Returning | None, Callable[[], None]]:
        """See write_behind.Issuing."""
        updated, self._updated = self._updated, None
        others = [batch for batch in self._captured if updated is None or batch is not updated.batch]
        self._captured = []
        self.drop_gradients()
        if not others:
            return updated, lambda: None
        done = current_queue(self.device).mark()

        def let_go() -> None:
            done.wait()
            for batch in others:
                batch.release()

        return updated, let_go

    def traffic(self) -> dict[str, float]:
        directories = [group.directory for group in self._groups]
        return {
            "device_rows_hit": sum(directory.rows_hit for directory in directories),
            "device_rows_missed": sum(directory.rows_missed for directory in directories),
            "device_window_shrunk": self._num_delayed,
            "device_bytes_in": self._bytes_in,
            "device_bytes_out": self._bytes_out,
            "device_slots": self.num_slots,
        }
