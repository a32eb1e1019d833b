"""RowCollection: rows of tables in a pool, as an ``nn.Module``; what collections have in common, pooled or not.

A training forward captures the batch's rows (undo log and working set in one) and looks up in them; backward keeps the
gradient of what was looked up; ``optimizer.step()`` updates the rows and writes them home; ``Checkpoint.commit`` makes
the step durable. A forward in ``eval()`` mode or under ``torch.no_grad()`` reads rows and leaves no trace.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from holdfast.data.batch import Bags, JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.device.queues import Work
from holdfast.errors import ConfigError, DataError, NonFiniteLoss, StateError, StepError, level_of_caller
from holdfast.pools.directory import check_pool
from holdfast.pools.optim import RowOptimizer, RowOptimizerSpec, RowWiseAdagrad, check_spec
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.anchor import Anchor
from holdfast.rows.coming import Coming
from holdfast.rows.features import KeyedJagged, offsets_of, on_host, plain
from holdfast.rows.lookup import Lookup
from holdfast.rows.row_access import BatchIds, PlannedFeatures
from holdfast.rows.untraced import check_not_recorded, refuse_recording, untraced

_READ_AT_ONCE_FLOATS = 4 << 20


class RowCollection(nn.Module):
    """Tables in a pool, and the way to their rows. A batch's ids lie in bags, so many of each *column*: a name that one
    of ``tables`` has among its ``feature_names``.

    tables: as ``normalize_all`` makes them.
    """

    def __init__(
        self,
        pool: Pool,
        tables: list[EmbeddingBagConfig],
        optimizer: RowOptimizerSpec | None,
        device: DeviceConfig | None,
    ) -> None:
        super().__init__()
        check_pool(pool)
        spec = RowWiseAdagrad() if optimizer is None else check_spec(optimizer)
        self._tables = tables
        self._columns = [column for table in tables for column in table.feature_names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._access = pool.open_rows(tables, spec, device or DeviceConfig())
        self.anchor = Anchor.of(self._access)  # no parameter of the module
        self._blocks: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._coming: list[Coming] = []
        self._updated_with: float | None = None  # the factor of the step's gradients, once its rows have them
        self._scale_of_loss: float | None = None  # until an update has shown what becomes of it
        self._warned_of_unused = False
        self._process = os.getpid()
        self.optimizer = RowOptimizer(self, spec)
        pool.collections.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module of its own over the same rows, which lie in the pool once: what averages or keeps a model copies it
        (``AveragedModel``), and `eval` of the one leaves the other in training."""
        other = self.__new__(type(self))
        other.__dict__ = {name: copy(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        other._coming = []  # what is expected is the original's
        return other

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "a collection cannot be pickled, its rows lie in a pool: save model.state_dict() for the dense part, and "
            "copy the pool with `holdfast snapshot`, or its tables with `holdfast export`"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_recording()  # torch.jit.script asks for what it is to script in the module's place

    @property
    def tables(self) -> Sequence[EmbeddingBagConfig]:
        """By their place in the collection, see `read`."""
        return self._tables

    def keys(self) -> list[str]:
        """The features that a batch has to have."""
        return self._columns

    @property
    def has_keys(self) -> bool:
        """Whether ids of some table are keys: new ones get their rows in the order in which batches are planned."""
        return any(table.keys is not None for table in self._tables)

    def plan(
        self,
        features: KeyedJagged | Mapping[str, Bags],
        *,
        ahead: bool = True,
        evaluates: bool = False,
    ) -> PlannedFeatures:
        """The plan verb: the batch's unique rows and where they occur. Needs the ids alone, so it may run in another
        thread (`ahead`), for every batch that is on its way.

        evaluates: the batch is not going to be trained. Of a table with keys, a plan to train gives new keys their
        rows, in the order in which batches are planned; to evaluate, they get none.

        Raises IdError (names feature, sample and value), DataError, ConfigError; PoolFull where new keys find no rows;
        StepError in a fork of the process, from which no plan finds its way back.
        """
        needed = ("keys", "values", "weights_or_none")
        if not isinstance(features, Mapping) and not all(hasattr(features, name) for name in needed):
            raise DataError(
                f"features are a dict {{feature: ids}} or {{feature: (ids, offsets)}}, or a KeyedJaggedTensor, "
                f"not a {type(features).__name__}"
            )
        there = list(features.keys())
        refuse_missing(self.keys(), there)
        if twice := [feature for feature in self.keys() if there.count(feature) > 1]:
            raise DataError(f"the batch has feature '{twice[0]}' more than once: which of them is meant is not known")
        jagged, parts = self._bags_of(on_host(features, self.keys()))
        return self._plan(jagged, parts, ahead=ahead, evaluates=evaluates)

    def _bags_of(self, features: KeyedJagged | Mapping[str, Bags]) -> tuple[KeyedJagged, Any]:
        """The ids in bags by columns, and PlannedFeatures.parts."""
        raise NotImplementedError

    def _plan(self, jagged: KeyedJagged, parts: Any, *, ahead: bool, evaluates: bool) -> PlannedFeatures:
        if os.getpid() != self._process:
            raise StepError(
                "the collection was made by the process of which this one is a fork (a worker of a DataLoader?), and a "
                "plan is of use only there: let workers give ids"
            )
        keys = tuple(jagged.keys())
        block_of = self._blocks.get(keys)
        if block_of is None:
            block_of = self._blocks[keys] = tuple(keys.index(column) for column in self._columns)
        weights = jagged.weights_or_none()
        try:
            batch = BatchIds(
                ids=plain(jagged.values(), "ids", torch.int64),
                offsets=plain(offsets_of(jagged), "offsets", None),
                weights=None if weights is None else plain(weights.detach(), "weights", torch.float32),
                blocks=block_of,
                num_keys=len(keys),
            )
            plan = self._access.plan(batch, ahead=ahead, evaluates=evaluates)
        except (ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"a batch's ids, offsets and weights do not fit together: {error}") from error
        return PlannedFeatures(plan, weights, parts)

    @untraced
    def _look_up(self, features: KeyedJagged | Mapping[str, Bags] | PlannedFeatures) -> tuple[Tensor, PlannedFeatures]:
        """What a forward does: the pooled columns, and the plan that they are of. Raises StepError in a transform of
        torch.func, which has stand-ins for tensors, and where a forward is recorded, to be run without the pool."""
        check_not_recorded(features)
        if torch._C._functorch.get_dynamic_layer_stack_depth():
            raise StepError(
                "a forward pass in a transform of torch.func (grad, jacrev, jvp, vmap), which does not reach rows: "
                "look them up outside and give the function their vectors; vectors.backward(gradient) gives rows theirs"
            )
        trains = self.training and torch.is_grad_enabled()
        planned = features if isinstance(features, PlannedFeatures) else self._planned(features, evaluates=not trains)
        return self.lookup(self.capture(planned), planned) if trains else self._access.evaluate(planned), planned

    def _planned(self, features: KeyedJagged | Mapping[str, Bags], *, evaluates: bool) -> PlannedFeatures:
        coming = next((coming for coming in self._coming if coming.is_of(features)), None)
        return self.plan(features, ahead=False, evaluates=evaluates) if coming is None else coming.planned

    @property
    def device(self) -> torch.device:
        """Where pooled vectors are, and their gradients."""
        return self._access.device

    @property
    def description(self) -> str:
        """Where rows are looked up and updated, in words; empty where that is the processor that trains."""
        return self._access.description

    @property
    def looks_forward(self) -> bool:
        """Whether rows come through a scratchpad, so that it helps to announce batches."""
        return self._access.looks_forward

    @property
    def answers_late(self) -> bool:
        """Whether it helps to compute something between a capture and its lookup, which waits for other ranks."""
        return self._access.answers_late

    def announce(self, planned: PlannedFeatures) -> None:
        """Says that `planned` is going to be captured, after the batches that were announced before: where rows come
        through a scratchpad, they are fetched while earlier batches train. Keep `planned` until then."""
        self._access.announce(planned)

    @property
    def takes_hints(self) -> bool:
        """Whether a batch that is announced may be left out after all."""
        return self._access.takes_hints

    def expect(self, coming: Coming) -> None:
        """Announces a batch that may come, and keeps its plan until `forget`: a forward of the very features has it."""
        self._coming.append(coming)
        self.announce(coming.planned)

    def forget(self, coming: Coming) -> None:
        """It is over, or does not come."""
        self._coming = [kept for kept in self._coming if kept is not coming]

    def capture(self, planned: PlannedFeatures) -> Any:
        """The capture verb: the plan's rows are the step's working set. Beside the pool's processor they are copied
        into the step's log record, whose sealing is on its way when this returns; in a device's scratchpad they have
        their slots. Raises BatchTooLarge, WindowTooLarge, PoolFull, StepError."""
        return self._access.capture(planned)

    def capture_ahead(self, planned: PlannedFeatures) -> bool:
        """Captures the next step's rows on the pool's own thread while this step computes; the rows that both steps
        update are handed over by this step's update. Call it after this step's forward. Returns False where it is not
        possible now; the next forward then captures as usual."""
        return self._access.capture_ahead(planned)

    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None:
        """Relaxed lookup: pools what the batch `following` reads of rows that the step of `current` does not update.
        The lookup of `following`, if it is the next, adds the others: the same sums in another order, which the ids of
        both batches decide. Raises StepError where rows lie in slots of a device."""
        self._access.lookup_ahead(following, current)

    def lookup(self, captured: Any, planned: PlannedFeatures) -> Tensor:
        """The lookup verb: pools from the captured rows. float32 ``[batch_size, output_width]`` on `device`."""
        out: Tensor = Lookup.apply(self.anchor, planned.weights, self._access, captured)  # type: ignore[no-untyped-call]
        return out

    def gradient_norm(self) -> Tensor:
        """L2 norm of this step's row gradients, each row's summed over its occurrences: float32, of no dimension."""
        if not self._access.has_gradients:
            return torch.zeros((), device=self.device)
        factor = 1.0 if self.anchor.grad is None else self.anchor.grad.abs().double()
        return (factor * self._access.square_of_gradients().sqrt()).float()

    def update_rows(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None:
        """The update verb, as ``optimizer.step()`` calls it."""
        if self._access.has_gradients:
            factor = gradient_scale.as_subclass(Tensor)
            if self._scale_of_loss is not None:
                self._warn_of_scaled(factor, self._scale_of_loss)
            self._updated_with = self._access.update(gradient_scale=factor, **hyperparameters)
            self.drop_gradients()

    def expect_scaled(self, by: float) -> None:
        """Says that the loss is multiplied by so much: an update with gradients that nothing divides again warns, once.
        On a device it has to be waited for, at the first update."""
        self._scale_of_loss = by if by != 1.0 else None

    def _warn_of_scaled(self, factor: Tensor, scale: float) -> None:
        """Where nothing multiplied the gradients, nothing unscaled them. Clipped ones say nothing."""
        self._scale_of_loss = None
        if factor == 1.0:
            warnings.warn(
                f"the rows of table '{self._tables[0].name}' are updated with gradients that are {scale:g} times too "
                "large: the GradScaler multiplied the loss, and nothing divided them again. Call "
                "scaler.step(rows.optimizer) in place of rows.optimizer.step(), before scaler.update()",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )

    def check_update(self, step: int) -> None:
        """Raises NonFiniteLoss where the rows of `step`, which ends, had gradients that are not finite."""
        if self._updated_with is not None:
            NonFiniteLoss.check_gradient(self._updated_with, step)

    def end_step(self) -> None:
        """Forgets the gradients that the step left, when it is committed. Warns of the first that no update had."""
        self._warn_of_unused()
        self.drop_gradients()
        self._updated_with = None

    def _warn_of_unused(self) -> None:
        """Of gradients that are not finite a loop that scales its loss makes no use; on a device nobody waits for them
        to be looked at."""
        unused = self.anchor.grad
        if self._warned_of_unused or unused is None or unused.device.type != "cpu" or not unused.isfinite():
            return
        self._warned_of_unused = True
        warnings.warn(
            f"a commit drops gradients of rows (table '{self._tables[0].name}') that no rows.optimizer.step() had: "
            "call that before, and commit at the end of an accumulation, never within one. Where rows are meant to "
            "stay as they are, rows.optimizer.zero_grad() before the commit says so",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )

    def drop_gradients(self) -> None:
        """Forgets the row gradients since the last update."""
        self.anchor.grad = None

    def traffic(self) -> dict[str, float]:
        """Rows and bytes that a device's scratchpad moved since the collection was made; empty where there is none."""
        return self._access.traffic()

    def work_of(self, captured: Any) -> list[Work]:
        """What a device did for the rows of a capture; to be read when the pool has its step."""
        return self._access.work_of(captured)

    def read(self, table: int, ids: Tensor) -> Tensor:
        """Rows as an evaluation sees them: float32 ``[len(ids), embedding_dim]``.

        table: its place among the collection's. ids: int64, or keys.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 1:  # type: ignore[redundant-expr]
            raise DataError(f"ids to read are a tensor of one dimension, int64, not {ids!r:.80}")
        of_table = self._tables[table]
        column = self._columns.index(next(iter(of_table.feature_names)))
        begin = sum(self._dims[:column])
        out = torch.empty((len(ids), of_table.embedding_dim), dtype=torch.float32, device="cpu")
        at_once = max(1, _READ_AT_ONCE_FLOATS // sum(self._dims))  # an evaluation has columns for every feature
        for first in range(0, len(ids), at_once):
            some = ids[first : first + at_once]
            bags = torch.arange(len(self._columns) * len(some) + 1, device="cpu")
            jagged = JaggedFeatures(self._columns, some, (bags - column * len(some)).clamp(0, len(some)))
            with torch.no_grad():
                pooled = self._access.evaluate(self._plan(jagged, None, ahead=False, evaluates=True))
            out[first : first + len(some)] = pooled[:, begin : begin + of_table.embedding_dim].cpu()
        return out


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    collections: RowCollection | Sequence[RowCollection],
    max_norm: float,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over dense and row gradients together: returns the total norm.

    parameters: of the dense part, wherever they are; or one of them. Those of the collections' row optimizers may be
    among them. Call it once, after the last backward of the step and before ``optimizer.step()``: a backward
    between the two is a StepError.

    A norm that is not finite makes the gradients of all of them so, or 0; but a GradScaler skips by optimizer, and
    steps those whose own were finite when they were unscaled. So leave out ``scaler.step`` of all of them then, and
    call ``scaler.update()`` as ever.
    """
    group = [collections] if isinstance(collections, RowCollection) else list(collections)
    # A tensor is an iterable of tensors, too: of its slices, which have no gradients.
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    anchors = {id(collection.anchor) for collection in group}
    gradients = [p.grad for p in given if p.grad is not None and id(p) not in anchors]
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    norms += [collection.gradient_norm() for collection in group]
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), torch.device("cpu"))
    total = (
        torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
        if norms
        else torch.zeros((), device=device)
    )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    factors = {device: factor.to(device) for device in {gradient.device for gradient in gradients}}
    for gradient in gradients:
        gradient.mul_(factors[gradient.device])
    for collection in group:
        if collection.anchor.grad is not None:
            collection.anchor.grad.mul_(factor.to(collection.anchor.device))
    return total


def refuse_missing(wanted: Iterable[str], there: Iterable[str]) -> None:
    """Raises ConfigError for the first feature that is not there."""
    there = dict.fromkeys(there)
    missing = [feature for feature in wanted if feature not in there]
    if missing:
        raise ConfigError(f"the batch has no feature '{missing[0]}' (it has {', '.join(map(str, there))})")
