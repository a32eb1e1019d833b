"""Checkpoint: everything of a training run that is neither row nor cursor, tied to the pool step by step.

Invariants
- What a dense slot holds is the state at the end of one step: model, optimizers, schedulers, scaler, loader position,
  random number generators. It is copied before `commit` returns, so the next step may change it at once.
- Where a device is ahead of the pool, what is copied is a snapshot, taken in the order of the device's work: the next
  step may change the state as soon as it was asked for.
- State that cannot be written down is found when the Checkpoint is made, not at step 10,000.
- The cursor of the pool's commit record wins over the loader position in the slot: under relaxed recovery they differ.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data.loader import Loader
from holdfast.device.arrivals import ArrivingLoss
from holdfast.device.queues import Queue, new_queue
from holdfast.errors import ConfigError, StateError, StepError
from holdfast.group.rank_states import RankStates, check_same_batches
from holdfast.pools.dense_state import DenseState
from holdfast.pools.directory import check_pool
from holdfast.pools.pool import Pool
from holdfast.rows.collection import RowCollection
from holdfast.rows.look_ahead import LookAhead
from holdfast.state.generators import set_rng_state
from holdfast.train.training_state import SeekableLoader, Stateful, TrainingState


class _Kept(dict[str, Any]):
    """See Pool.kept: a dict to which there are weak references."""


class Checkpoint:
    """Makes a training loop durable: ``resume`` once before it, ``commit`` at the end of every step.

    model: the dense part (tables in the pool are no part of its state_dict).
    optimizer: of the dense part, one or several. The collections' row optimizers are found through the pool, and may be
    among them.
    scheduler, scaler, loader: where there are any. Of a ``holdfast.data.Loader`` without a transform the coming batches
    are planned, and their rows fetched, from now on; `holdfast.prefetch` makes others do so.
    extra: more objects with state_dict, random number generators (torch.Generator, numpy.random.Generator,
    random.Random), or plain values, by name. All but plain values are put back in place by `resume`; `saved` gives
    these.

    What is not named here is not kept but for the global generators of torch, Python and NumPy: docs/STATE.md lists
    what a loop may hold besides. A pool has one dense state, that of the Checkpoint that was made or resumed last.

    Raises StateError that names what cannot be written down (a lambda in a scheduler, an open file), or a parameter
    that an optimizer steps and nothing holds; ConfigError for an argument of another kind.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Stateful | Sequence[Stateful] | None = (),
        scaler: Stateful | None = None,
        loader: SeekableLoader | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        check_pool(pool)
        _refuse_parallel(model)
        _refuse_rows_of_others(pool, model)
        self._pool = pool
        self._loader = loader
        if isinstance(loader, Loader):
            loader.look_ahead(LookAhead(pool))
        elif loader is not None and not hasattr(loader, "seek"):
            raise ConfigError(
                f"loader: a {type(loader).__name__} has no position to be sought: give a holdfast.data.Loader, or make "
                "batches from pool.step and leave it out; a loader that has a state_dict may be among extra"
            )
        self._losses: Queue | None = None
        self._collections = list(pool.collections)
        self._has_resumed = False
        self._state = TrainingState(
            model=model,
            optimizers=_several("optimizer", optimizer, "param_groups"),
            row_optimizers=[collection.optimizer for collection in pool.collections],
            schedulers=_several("scheduler", () if scheduler is None else scheduler, "state_dict"),
            scaler=scaler,
            loader=loader,
            extra=extra,
            snapshots=pool.commits_behind,
        )
        self._scaler = scaler
        self._ranks = RankStates(pool.group, self._state)
        self._kept = _Kept({f"extra[{name!r}]": value for name, value in (extra or {}).items()} | {"loader": loader})
        pool.kept = weakref.ref(self._kept)

    def resume(self) -> int:
        """Goes on where the pool is: loads the dense state of its newest step, seeks the loader. In a new pool writes
        the initial state, so that a crash in the first step is recovered like any other. Returns the step.

        Called again after an interrupt, it begins the step under way anew, gradients of its rows included; rows that
        were updated already are taken back when the pool is opened again, and until then a forward pass is StepError.
        So is a resume where steps were committed since the newest dense state, as with a ``dense_interval``.

        Raises StateError where the saved state does not fit the objects; names them; and for a collection that was made
        after the Checkpoint, which does not have its row optimizer. ConfigError where the loaders of several ranks have
        different batches.
        """
        if late := [rows for rows in self._pool.collections if rows not in self._collections]:
            raise StateError(
                f"the collection of table '{late[0].tables[0].name}' was made after the Checkpoint, which would not "
                "keep the settings of its row optimizer: make all collections before"
            )
        self._has_resumed = False  # until all of it is: what is loaded by halves is not to be committed
        self._pool.kept = weakref.ref(self._kept)
        for collection in self._pool.collections:
            collection.drop_gradients()  # of a step that this process began and left: they are no part of the pool's
        saved = self._pool.dense_state()
        step = self._pool.step
        if self._pool.with_dense and step not in self._pool.with_dense:
            raise StepError(
                f"the pool is at step {step}, and its newest dense state is of an earlier one (dense_interval): close "
                "the pool and open it again, which goes back to that"
            )
        if saved is None:
            if step > 0:
                raise StateError(
                    f"{self._pool.directory} holds rows of step {step}, but no dense state: it was trained "
                    "without a Checkpoint"
                )
            self._pool.write_dense(self._dense_state())
            self._pool.with_dense = (0,)
            if self._pool.group.world_size == 1:
                self._begin_life()
                return 0
            saved = self._pool.dense_state()  # rank 0's: all ranks begin with its parameters
            assert saved is not None
        generators = self._ranks.load(*saved)
        if isinstance(self._loader, Loader):
            check_same_batches(self._pool.group, self._loader.batch_size)
        if self._loader is not None:
            self._loader.seek(self._pool.cursor)
        set_rng_state(generators)
        self._pool.with_dense = (step,)
        self._begin_life()
        return step

    def saved(self, name: str) -> Any:
        """A plain value of `extra` as it was saved with the pool's newest dense state; None where there is none. Of
        several ranks each has its own, and one that was not there yet rank 0's."""
        saved = self._pool.dense_state()
        return None if saved is None else self._ranks.saved(f"extra[{name!r}]", *saved)

    def commit(self, cursor: int | None = None, *, loss: Tensor | float | None = None) -> int:
        """Ends the step: returns its number at once; ``pool.durable_step`` follows.

        cursor: samples consumed by committed steps; default: the loader's position, or without a loader the number of
        steps. The position counts every batch that was handed out: where a trainer takes one before the step of the one
        before is committed, give ``batch.first_sample + loader.batch_size`` of the one that was trained; else a resume
        leaves out what was taken.
        loss: of one element, or a number; a step whose loss is not finite does not count, nor one whose rows were
        updated with gradients that are not or became so, or whose dense state
        has a parameter that is not, whatever its loss. Where rows are updated on a device, that is found some
        steps later, without making the device wait.
        Raises NonFiniteLoss: the pool stays at the step before. Rows that were updated with it are taken back when the
        pool is opened again; to leave such a batch out and go on, look at the loss before the optimizers step.
        StepError without a `resume` before, for a loss of several elements, and where another Checkpoint of the pool
        was made since.
        """
        if loss is None:
            return self.commit_with(cursor, None)
        if not isinstance(loss, Tensor):
            try:
                loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            except (TypeError, ValueError) as error:
                raise StepError(f"loss: {loss!r:.60}; a step has one, a tensor of one element or a number") from error
        if loss.numel() != 1:
            raise StepError(f"a loss of {loss.numel()} elements: a step has one, their mean or sum")
        if self._losses is None:
            self._losses = new_queue(loss.device)
        return self.commit_with(cursor, ArrivingLoss(loss, self._losses))

    def differs_from_told(self) -> bool:
        """Whether rank 0 has to be told of something that is this rank's own before the next dense state."""
        return self._ranks.differs_from_told()

    def commit_with(self, cursor: int | None, loss: ArrivingLoss | None, *, exchange: bool = True) -> int:
        """The same, with a loss that is on its way already. exchange: ranks tell rank 0 what is their own; False where
        all of them know that none has anything to tell."""
        self._check_writes()
        if cursor is None:
            cursor = self._pool.step + 1 if self._loader is None else self._loader.samples
        try:
            cursor = operator.index(cursor)
        except TypeError as error:
            raise StepError(
                f"cursor: {cursor!r:.60}; it is a number of samples, and the loss is given by name: commit(loss=loss)"
            ) from error
        dense = None
        if self._pool.dense_due:
            dense = self._dense_state(cursor, exchange=exchange)
            last = max((step for step in self._pool.with_dense if step <= self._pool.step), default=0)
            self._pool.with_dense = (last, self._pool.step + 1)  # before: Ctrl-C may come when it is committed
            self._pool.watch_parameters(self._state.parameters)
        return self._pool.commit(cursor, dense, loss)

    def flush(self) -> int:
        """Makes the newest committed step durable, its dense state included, whatever the dense interval; waits for it.

        Call it between steps: before a planned stop, at the end. Returns the step.
        """
        self._check_writes()
        self._pool.flush_with(lambda: self._dense_state(self._pool.cursor))
        self._pool.with_dense = (self._pool.step,)
        return self._pool.step

    def _begin_life(self) -> None:
        """All is loaded: steps may come, whose losses are scaled as the scaler says."""
        self._has_resumed = True
        scaler: Any = self._scaler
        if hasattr(scaler, "get_scale") and scaler.is_enabled():
            for collection in self._pool.collections:
                collection.expect_scaled(scaler.get_scale())

    def _check_writes(self) -> None:
        """Raises StepError where the objects do not hold the pool's dense state, which is another Checkpoint's, or was
        not loaded: what some run has to go on from would be written over."""
        if not self._has_resumed:
            raise StepError(
                "commit without resume, or after one that failed: the dense state of this run would take the place of "
                "the pool's; call checkpoint.resume() once, before the first step"
            )
        if self._pool.kept() is not self._kept:
            raise StepError(
                "another Checkpoint of this pool was made since, and a pool has one dense state, for all that is "
                "trained in it: give the other model to extra and all optimizers to one Checkpoint, or, to go on with "
                "this one, call its resume()"
            )

    def _dense_state(self, cursor: int | None = None, *, exchange: bool = True) -> DenseState | None:
        """Rank 0's to save; None elsewhere."""
        if exchange:
            self._ranks.exchange()
        return self._ranks.collect(cursor)


def _several(name: str, given: Any, needed: str) -> list[Any]:
    """One, or several, as a list. Raises ConfigError for one that does not have what is needed."""
    is_one = hasattr(given, needed) or isinstance(given, Mapping) or not isinstance(given, Iterable)
    several = [given] if is_one else list(given)
    for item in several:
        if not hasattr(item, needed):
            raise ConfigError(
                f"{name}: a {type(item).__name__} has no {needed}: give those of torch.optim themselves, one or a list "
                "of several or none ([]); what wraps them belongs into extra"
            )
    return several


def _refuse_rows_of_others(pool: Pool, model: nn.Module) -> None:
    """Raises ConfigError where all collections that the model trains have their rows in another pool: steps of this one
    would be committed without a row, and what the other's learnt never."""
    own = [collection.optimizer for collection in pool.collections]
    collections = [module for module in model.modules() if isinstance(module, RowCollection) and module.training]
    if collections and not any(collection.optimizer in own for collection in collections):
        raise ConfigError(
            f"model: the rows of table '{collections[0].tables[0].name}' are none of the pool in {pool.directory}: "
            "give the Checkpoint the pool with which the collection was made"
        )


def _refuse_parallel(model: nn.Module) -> None:
    """Raises ConfigError for a model that torch divides or averages, and for what is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: a {type(model).__name__}; it must be an nn.Module: give several as one nn.ModuleDict or "
            "nn.ModuleList, or all but one to extra"
        )
    whole = "give the module as it is, whole on every rank, and call pool.average_gradients(model) after backward"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "model: DistributedDataParallel adds gradients up in another order after a resume, so no run would end "
            f"with the same bits: {whole}"
        )
    sharded = [name for name, module in model.named_modules() if type(module).__name__ == "FullyShardedDataParallel"]
    sharded += [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "DTensor"]
    if sharded:
        raise ConfigError(
            f"model: a part of '{sharded[0]}' is on each rank (FSDP, tensor parallelism), but rank 0 writes the dense "
            f"part for all of them: {whole}"
        )
