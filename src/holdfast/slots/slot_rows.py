"""Rows in slots of the device's memory: the scratchpad of an accelerator.

    announce (staging.py): plan → slots → missing rows read from the pool → copied over, and into their slots
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from holdfast import _core
from holdfast.device import kernels
from holdfast.device.arrivals import Arriving
from holdfast.device.faults import device_errors
from holdfast.device.queues import Work, current_queue, host_empty, new_queue
from holdfast.errors import StepError
from holdfast.rows.row_access import BatchIds, KeptGradient, PlannedFeatures, check_under_way, plan_here, second_pass
from holdfast.slots.home_mapping import HomeMapping
from holdfast.slots.keys_in_slots import KeysInSlots
from holdfast.slots.slot_batch import Part, Returning, SlotBatch, unpack
from holdfast.slots.slot_group import SlotGroup, TableHere, shares_of
from holdfast.slots.slot_pool import SlotPool
from holdfast.slots.staging import Coming, StagedPart, Staging

COMPUTING = "device"  # names of queues, as a trace shows them
_ROWS_IN = "device, rows in"
_ROWS_BACK = "device, rows back"


class SlotRows:
    """See row_access.RowAccess.

    numbers: of the collection's tables in the pool. num_bytes: of device memory for rows and their state.
    mapping: where the device reads the pool's own memory (the direct way). most_rows: of each table, that this
    process may have; None: all of them.

    Raises OutOfDeviceMemory; WindowTooLarge, where one batch has more rows than there is room for.
    """

    takes_hints = False  # a batch that is left out would hold its slots
    answers_late = False

    def __init__(
        self,
        pool: SlotPool,
        collection: _core.Collection,
        numbers: Sequence[int],
        features: Sequence[tuple[str, int]],
        *,
        device: torch.device,
        num_bytes: int,
        mapping: HomeMapping | None = None,
        most_rows: Sequence[int] | None = None,
    ) -> None:
        self.device = device
        self.tables = numbers
        self._pool = pool
        self._collection = collection
        self._behind = pool.write_behind()
        self._mapping = mapping
        specs = [pool.core.tables[number] for number in numbers]
        most_rows = [spec.num_embeddings for spec in specs] if most_rows is None else most_rows
        here = [TableHere(*of_table) for of_table in zip(specs, most_rows, strict=True)]
        alike: dict[tuple[int, int, bool, int], list[int]] = {}
        for table, (spec, takes_mean) in enumerate(zip(specs, collection.takes_mean, strict=True)):
            alike.setdefault((spec.embedding_dim, spec.dtype, takes_mean, spec.keys), []).append(table)
        shares = shares_of([[here[t] for t in tables] for tables in alike.values()], num_bytes)
        bytes_of_slots = sum(share.num_slots * share.row_bytes for share in shares)
        with device_errors("the scratchpad", bytes_wanted=bytes_of_slots):
            self._groups = [
                SlotGroup(
                    collection,
                    tables,
                    [specs[t] for t in tables],
                    [f for f, (_, table) in enumerate(features) if table in tables],
                    takes_mean=collection.takes_mean[tables[0]],
                    num_slots=share.num_slots,
                    share=share.of_bytes,
                    keep=mapping is None,
                    device=device,
                )
                for tables, share in zip(alike.values(), shares, strict=True)
            ]
        # Of the columns of pooled vectors; with 4 they are read and written 16 bytes at a time.
        self._alignment = math.gcd(4, *(spec.embedding_dim for spec in specs))
        self._seed = int(pool.core.header["seed"])
        self._keys = KeysInSlots(pool, numbers, device) if any(spec.keys for spec in specs) else None
        self._to_device = new_queue(device)
        self._to_host = new_queue(device)
        self._staging = Staging(pool, self._groups, mapping, device, num_bytes, self._bring)
        self._captured: list[SlotBatch] = []  # of the step that is under way
        self._gradient: tuple[SlotBatch, KeptGradient] | None = None  # of the step's one forward pass
        self._sums: list[Tensor] | None = None
        self._updating = 0  # the newest step that began to update rows in their slots
        self._updated: Returning | None = None
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

    def plan(self, batch: BatchIds, *, ahead: bool, evaluates: bool) -> _core.Plan:
        return plan_here(self._collection, batch, ahead=ahead, evaluates=evaluates)

    def announce(self, planned: PlannedFeatures) -> None:
        self._staging.announce(planned)

    def _bring(self, coming: Coming) -> SlotBatch:
        """What the device needs to know of the batch, and the rows that it lacks, are on their way."""
        with device_errors("a batch's rows"), self._to_device as queue:
            began = queue.mark(timed=True)
            parts = [self._bring_part(*of_group) for of_group in zip(self._groups, coming.parts, strict=True)]
            arrived = queue.mark(timed=True)
        return SlotBatch(coming.planned, parts, arrived, [Work("rows in", _ROWS_IN, began, arrived)])

    def _bring_part(self, group: SlotGroup, staged: StagedPart) -> Part:
        arrays = unpack(staged.packed.to(self.device, non_blocking=True), staged.places)
        slots, missing = arrays["slots"], arrays["missing"]
        self._bytes_in += staged.packed.nbytes + staged.admission.num_missing * group.row_bytes
        if staged.weights is not None:
            kernels.scatter_rows(
                staged.weights.to(self.device, non_blocking=True),
                None if staged.state is None else staged.state.to(self.device, non_blocking=True),
                slots,
                missing,
                group.weights,
                group.state,
            )
        elif self._mapping is not None and staged.admission.num_missing:
            bases, places = self._mapping.bases(), arrays.get("places", arrays["rows"])
            kernels.gather_home(bases, arrays["tables"], places, missing, slots, group.weights, group.state)
        return Part(group, staged.admission, arrays)

    # A step.

    def capture(self, planned: PlannedFeatures) -> SlotBatch:
        self._behind.check()
        self._behind.check_last(self)
        step = self._pool.step + 1
        if self._updating == step:
            raise StepError(
                f"step {step} has updated its rows already: commit it before the next forward pass, or open the pool "
                "again to take it back"
            )
        if self._keys is not None:
            self._keys.reach(step)
        while (batch := self._staging.take(planned)) is None:
            if len(self._behind) == 0:
                raise StepError(
                    f"the rows of a batch find no room among the {self.num_slots} slots of the scratchpad: earlier "
                    "batches hold them that were announced or looked up, and not committed; commit those, or give "
                    "device.scratchpad_bytes more"
                )
            self._behind.retire()
        batch.step = self._pool.step + 1
        self._captured.append(batch)
        return batch

    def capture_ahead(self, planned: PlannedFeatures) -> bool:
        return False

    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None:
        raise StepError("lookup_ahead goes with device.rows = 'near_memory' alone")

    def lookup(self, captured: SlotBatch) -> Tensor:
        self._behind.check()
        check_under_way(captured, self._pool.step, "lookup with a capture")
        plan = captured.planned.plan
        queue = current_queue(self.device)
        queue.follow(captured.arrived)
        began = queue.mark(timed=True)
        if self._keys is not None:
            for part in captured.parts:
                self._keys.start(part)
        out = torch.empty(plan.num_bags, plan.output_width, dtype=torch.float32, device=self.device)
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

    def drain(self) -> None:
        """Waits until the pool has every issued step. Raises PoolFailed where it does not get them."""
        self._pool.drain()
        self._behind.check()

    def evaluate(self, planned: PlannedFeatures) -> Tensor:
        self.drain()
        plan = planned.plan
        out = host_empty((plan.num_bags, plan.output_width), torch.float32, self.device)
        self._pool.core.evaluate(plan, out.numpy())
        return out.to(self.device)

    def add_gradient(self, captured: SlotBatch, grad: Tensor) -> Tensor:
        check_under_way(captured, self._pool.step, "backward through a forward")
        kept, first = KeptGradient.of(grad), self._gradient is None
        if self._gradient is not None:  # another loss of the same forward
            batch, before = self._gradient
            if batch is not captured:
                raise second_pass()
            kept = KeptGradient.of(before.unchanged() + kept.made)
        self._gradient, self._sums = (captured, kept), None
        return torch.where(kernels.all_finite(kept.made), float(first), float("nan"))

    def weight_gradient(self, captured: SlotBatch, grad: Tensor, out: Tensor) -> None:
        spans = captured.planned.plan.spans
        for features, found in self.lookup_gradients(captured, grad.to(torch.float32).contiguous()):
            begin = 0
            for feature in features:
                first, last = spans[feature]
                out[first:last] += found[begin : begin + last - first]
                begin += last - first

    def lookup_gradients(self, captured: SlotBatch, grad: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """d loss / d weight of each lookup of some of the collection's features, feature by feature; on the host."""
        self._behind.check()
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
            yield part.group.features, Arriving(found, self._to_host).wait()

    def square_of_gradients(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for sums in self._summed():
            total += sums.double().square().sum()
        return total

    @property
    def has_gradients(self) -> bool:
        return self._gradient is not None

    def update(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None:
        self._behind.check()
        assert self._gradient is not None
        self._behind.check_last(self)
        batch = self._gradient[0]
        if self._updating == batch.step:
            raise StepError(
                f"the rows of step {batch.step} were updated already, by an earlier optimizer.step(), and a commit "
                "would leave that out: open the pool again, and step the optimizer once, after the last backward"
            )
        numbers = kernels.Hyperparameters(step=self._behind.row_updates + 1, **hyperparameters)
        queue = current_queue(self.device)
        with device_errors("updated rows"):
            sums_of_parts = self._summed()
            self._updating = batch.step
            returning = Returning(batch, Arriving(gradient_scale, self._to_host))
            began = queue.mark(timed=True)
            for part, sums in zip(batch.parts, sums_of_parts, strict=True):
                weights, state = part.group.empty_rows(part.admission.num_unique)
                kernels.update_rows(
                    part.group.optimizer,
                    part.group.weights,
                    part.group.state,
                    part.arrays["slots"],
                    sums,
                    hyperparameters=numbers,
                    gradient_scale=gradient_scale,
                    rounding=(
                        self._seed,
                        part.arrays["tables"],
                        part.arrays["keys" if part.group.has_keys else "rows"],
                    ),
                    fresh_weights=weights,
                    fresh_state=state,
                    keyed=None if self._keys is None else self._keys.update_of(part, batch.step),
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
            batch, kept = self._gradient
            grad = kept.unchanged()
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
        if self._updated is None and self._updating == self._pool.step + 1:
            raise StepError(
                f"step {self._updating} was interrupted while it updated its rows, some of which it has: open the pool "
                "again to take it back"
            )
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

    def let_go(self) -> None:
        """See write_behind.Issuing."""
        # Rows of batches that were announced are on their way to slots; of a device that is lost, no more.
        with suppress(RuntimeError), self._to_device as queue:
            queue.mark().wait()
        self._staging.forget_all()
        self._captured = []
        self._updated = None
        self.drop_gradients()
        for group in self._groups:
            group.let_go()

    def traffic(self) -> dict[str, float]:
        return {
            "device_rows_hit": self._staging.rows_hit,
            "device_rows_missed": self._staging.rows_missed,
            "device_window_shrunk": self._staging.num_delayed,
            "device_bytes_in": self._bytes_in,
            "device_bytes_out": self._bytes_out,
            "device_slots": self.num_slots,
        }
