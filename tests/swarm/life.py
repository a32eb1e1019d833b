"""One opening of a pool until it ends: the process that is killed, and what it finds and says on its way.

A life is forked from the process that has the model, so it compares with it what it finds at opening, and what every
forward gives. What it has to say outlives it in shared memory (Progress), and in a file where it fails.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import checks
from defects import LYING_DISK
from draw import BIG, ERRORS, Episode, Fault, Life
from holdfast import Checkpoint, EmbeddingBagCollection, Pool, VictimCache, _core
from holdfast.errors import (
    BatchTooLarge,
    IdError,
    NonFiniteLoss,
    PoolBusy,
    PoolError,
    PoolFull,
    UntrustedPool,
)
from holdfast.pools.directory import exists
from holdfast.rows.row_access import PlannedFeatures
from model import SEED_OF_POOL, Dense, Model, configs_of, seed_everything, spec_of
from tiny_run import log_apart
from twin import jagged

_COUNTED = 1 << 40


class Wrong(AssertionError):
    """A promise was broken."""


class Progress:
    """What a life has come to, in memory that it shares with whoever forked it."""

    FIELDS = ("opened", "step", "dense_step", "attempted", "durable", "ended", "struck", "term")

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def __getattr__(self, name: str) -> int:
        return int(self._words[self.FIELDS.index(name)])

    def __setattr__(self, name: str, value: int) -> None:
        if name == "_words":
            object.__setattr__(self, name, value)
        else:
            self._words[self.FIELDS.index(name)] = value


class Raised(Exception):
    """What a user's loop raises in the middle of a step."""


def shim() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "holdfast_fault") else None


class LifeOf:
    """Runs a Life over the pool in `directory`. floor, ceiling: the steps between which it must open; trusts: after a
    sync that failed; may_mix: the life before may have been a relaxed recovery that died before it said so."""

    def __init__(
        self,
        episode: Episode,
        life: Life,
        directory: Path,
        model: Model,
        progress: Progress,
        *,
        floor: int,
        ceiling: int,
        trusts: bool,
        may_mix: bool,
        may_distrust: bool,
        exact_touched: bool,
    ) -> None:
        self.run, self.life, self.directory = episode.run, life, directory
        self.plant = episode.plant
        self.model, self.progress = model, progress
        self.floor, self.ceiling = floor, ceiling
        self.trusts, self.may_mix, self.may_distrust = trusts, may_mix, may_distrust
        self.exact_touched = exact_touched
        self._upcoming: deque[tuple[int, list[PlannedFeatures]]] = deque()
        self._before: list[PlannedFeatures] | None = None
        self._split = -1  # the batch whose lookup was split ahead
        self._stopped = False
        self._marker = directory.parent.name

    def lead(self) -> str:
        """Returns how it ended: an error's name, or one word."""
        try:
            return self._lead()
        except PoolError as error:
            self._judge(error)
            return type(error).__name__

    def _lead(self) -> str:
        run, life = self.run, self.life
        torch.set_num_threads(1)
        _core.set_num_threads(life.threads)
        signal.signal(signal.SIGTERM, self._stop)
        seed_everything(run.seed)
        victims = self._victims()
        self._prepare_troubles()
        self._reach("opening")
        with Pool(
            self.directory,
            seed=SEED_OF_POOL,
            medium="auto" if exists(self.directory) else run.medium,  # type: ignore[arg-type]
            log_bytes=run.log_bytes,
            log=log_apart(str(self.directory)) if run.log_apart and not exists(self.directory) else None,
            row_checksums=run.row_checksums and run.medium == "memory" and not exists(self.directory),
            scratchpad_bytes=life.scratchpad_bytes,
            victims=victims,
            dense_interval=life.dense_interval,
            recovery=life.recovery,  # type: ignore[arg-type]
            trust_after_reboot=self.trusts,
        ) as self.pool:
            self._open()
            try:
                self._train()
            except Raised:
                return "raised"
            except PoolError as error:
                self._check_refuses(error)
                raise
            if life.end == "exit":
                os._exit(0)
            if life.end == "close":
                self.checkpoint.flush()
                self._note_durable()
            self._reach("closing")
            self.pool.close()
        self.progress.ended = 1
        return "stopped" if self._stopped else "closed"

    def _victims(self) -> VictimCache | None:
        """None for a pool in place, which refuses them; a snapshot may have been restored to the other store."""
        if self.life.victim_bytes == 0:
            return None
        medium = _core.Reader(str(self.directory)).medium if exists(self.directory) else self.run.medium
        return VictimCache(bytes=self.life.victim_bytes) if medium == "block" else None

    def _judge(self, error: PoolError) -> None:
        library = shim()
        struck = library.holdfast_faults_struck() if library is not None else 0
        self.progress.struck = struck
        distrusts = isinstance(error, UntrustedPool) and self.may_distrust
        # A log of a size that holdfast chose, or of many steps, has room for every batch.
        is_small = self.run.log_bytes is not None and self.run.log_bytes < BIG
        if struck == 0 and not distrusts and not (isinstance(error, BatchTooLarge) and is_small):
            raise Wrong(f"{type(error).__name__} without a cause: {error}") from error

    def _stop(self, *_: Any) -> None:
        self._stopped = True

    def _check_refuses(self, error: PoolError) -> None:
        """A pool that failed takes no further step; what was a refusal changed nothing."""
        if isinstance(error, BatchTooLarge | PoolFull):
            return
        try:
            self._forward(self._plan(0))
        except PoolError:
            return
        raise Wrong(f"a step was taken after {type(error).__name__}: {error}")

    # Opening.

    def _open(self) -> None:
        pool, run = self.pool, self.run
        self.collections = [
            EmbeddingBagCollection(pool, configs_of(run, c), optimizer=spec_of(run, c))
            for c in range(len(run.collections))
        ]
        self.dense = Dense(run, [rows.optimizer for rows in self.collections])
        self.checkpoint = Checkpoint(
            pool, model=self.dense.network, optimizer=self.dense.optimizer, scheduler=self.dense.schedules
        )
        step = self.checkpoint.resume()
        dense_step = self._check_found(step)
        if dense_step != step:
            self.model.put_back(step, dense_step)
        self.progress.step, self.progress.dense_step = step, dense_step
        self.progress.attempted = step
        self.progress.durable = pool.durable_step
        self.progress.opened = 1
        self._planned = pool.core.cursor
        if run.relaxed_lookup and self._planned > 0:
            self._before = self._plan(self._planned - 1)
        if self.life.threads == 2:
            self._check_lock()

    def _check_lock(self) -> None:
        try:
            Pool(self.directory)
        except PoolBusy:
            return
        raise Wrong("a pool was opened twice")

    def _check_found(self, step: int) -> int:
        """Returns of which step the dense state is."""
        if not self.floor <= step <= self.ceiling:
            raise Wrong(f"opened at step {step}, durable was {self.floor}, the newest {self.ceiling}")
        state = self.model.states[step]
        core = self.pool.core
        if (core.cursor, core.row_updates) != (state.cursor, state.row_updates):
            raise Wrong(f"cursor, row updates {core.cursor, core.row_updates}: {state.cursor, state.row_updates}")
        if (bad := checks.rows_differ(self.directory, state, exact_touched=self.exact_touched)) is not None:
            raise Wrong(f"opened at step {step}: {bad}")
        mixes = self.life.recovery == "relaxed" or self.may_mix
        found = checks.dense_of(self.dense, self.collections)
        bad = None
        for earlier in range(step, (self.floor if mixes else step) - 1, -1):
            bad = checks.dense_differs(found, self.model.states[earlier])
            if bad is None:
                return earlier
        raise Wrong(f"opened at step {step}: {bad}")

    # Training.

    def _train(self) -> None:
        while self.pool.step < self.life.until and not self._stopped:
            number = self.pool.step + 1
            self._reach(str(number))
            self._step(number)
            if self.life.flush_every and number % self.life.flush_every == 0:
                self.checkpoint.flush()
                self._note_durable()
                if self.pool.durable_step != number:
                    raise Wrong(f"flushed at step {number}, durable {self.pool.durable_step}")

    def _step(self, number: int) -> None:
        script, life = self.run.scripts[number - 1], self.life
        cursor = self.pool.core.cursor
        self.dense.optimizer.zero_grad()
        self._spend_for_nothing(number, cursor)
        for part in range(script.micro_batches):
            pooled = self._forward(self._take(cursor + part))
            wanted = self.model.states[number].pooled[part]
            if not checks.same_bits(pooled.detach(), wanted):
                raise Wrong(f"step {number}: the forward of batch {cursor + part} differs")
            self._point("pooled")
            self.dense.loss(pooled).backward()
            self._point("backward")
        if script.evaluates:
            self._evaluate(number, cursor)
        self._look_ahead()
        for rows, updates in zip(self.collections, script.updates, strict=True):
            if updates:
                rows.optimizer.step()
        self._point("rows updated")
        if life.end == "raise" and number == life.until:
            raise Raised
        self.dense.end_step()
        self.progress.attempted = number
        self.checkpoint.commit(cursor + script.micro_batches)
        self._note_durable()
        self._point("committed")

    def _note_durable(self) -> None:
        durable = self.pool.durable_step
        if not self.progress.durable <= durable <= self.progress.attempted:
            raise Wrong(f"durable {durable} after {self.progress.durable}, at step {self.progress.attempted}")
        self.progress.durable = durable

    def _spend_for_nothing(self, number: int, cursor: int) -> None:
        """What leaves no trace."""
        script = self.run.scripts[number - 1]
        if script.bad_ids:
            self._bring_bad_ids()
        if script.thrown_away:
            self._forward(self._plan(10_000 + number))
        if script.nan:
            self._forward(self._plan(cursor))
            try:
                self.checkpoint.commit(cursor, loss=torch.tensor(float("nan")))
                raise Wrong("a loss of NaN was committed")
            except NonFiniteLoss:
                pass
        self._point("planned")

    def _bring_bad_ids(self) -> None:
        tables = self.run.collections[0].tables
        if all(table.keyed for table in tables):
            return  # to which no id is bad
        bags = {}
        for c, t, feature in self.run.features():
            table = self.run.collections[c].tables[t]
            bags[feature] = [[table.id_of(0) if table.keyed else 1 << 30]]
        try:
            self.collections[0].plan(jagged(bags))
            raise Wrong("an id out of range was taken")
        except IdError:
            pass

    def _plan(self, number: int) -> list[PlannedFeatures]:
        together = jagged(*self.run.fed(number))
        return [rows.plan(together) for rows in self.collections]

    def _take(self, number: int) -> list[PlannedFeatures]:
        """The plans of batch `number`; those behind it are announced."""
        while len(self._upcoming) < max(1, self.life.window):
            planned = self._plan(self._planned)
            if self.life.window > 0:
                for rows, of in zip(self.collections, planned, strict=True):
                    rows.announce(of)
            self._upcoming.append((self._planned, planned))
            self._planned += 1
        found, planned = self._upcoming.popleft()
        assert found == number
        if self.run.relaxed_lookup:
            if self._before is not None and self._split != number:
                self._split_lookup(planned)
            self._before = planned
        return planned

    def _split_lookup(self, planned: list[PlannedFeatures]) -> None:
        assert self._before is not None
        for rows, of, before in zip(self.collections, planned, self._before, strict=True):
            rows.lookup_ahead(of, before)

    def _forward(self, planned: list[PlannedFeatures]) -> torch.Tensor:
        pooled = []
        for rows, of in zip(self.collections, planned, strict=True):
            pooled.append(rows.lookup(rows.capture(of), of))
        return torch.cat(pooled, dim=1)

    def _look_ahead(self) -> None:
        """Captures the next batch, or pools what this step leaves alone of it, while this step computes."""
        splits = self.run.relaxed_lookup and self.life.split_early
        if not self.life.capture_ahead and not splits:
            return
        if not self._upcoming:
            self._upcoming.append((self._planned, self._plan(self._planned)))
            self._planned += 1
        number, planned = self._upcoming[0]
        if splits:
            self._split_lookup(planned)
            self._split = number
        if self.life.capture_ahead:
            for rows, of in zip(self.collections, planned, strict=True):
                rows.capture_ahead(of)

    def _evaluate(self, number: int, cursor: int) -> None:
        rows_then = self.model.states[number - 1].rows
        with torch.no_grad():
            found = torch.cat([rows(jagged(*self.run.fed(cursor + 3))).values() for rows in self.collections], dim=1)
        if not checks.same_bits(found, self.model.pool(cursor + 3, rows_then, plain=True)):
            raise Wrong(f"the evaluation in step {number} differs")

    # Troubles.

    def _prepare_troubles(self) -> None:
        _core.kill_at_persist_point(_COUNTED)
        library = shim()
        if library is None:
            return
        if self.life.refuse_rings:
            library.holdfast_limit_rings(ctypes.c_long(0))
        if self.life.slow_us:
            library.holdfast_slow(self._marker.encode(), ctypes.c_long(self.life.slow_us))

    def _reach(self, stage: str) -> None:
        kill, fault = self.life.kill, self.life.fault
        if kill is not None and kill.stage == stage:
            if kill.how == "persist point":
                _core.kill_at_persist_point(kill.nth)
            if kill.how == "call" and (library := shim()) is not None:
                library.holdfast_kill_at_call(self._marker.encode(), ctypes.c_long(kill.nth))
        if self.plant == LYING_DISK and stage == "1" and (library := shim()) is not None:
            library.holdfast_lie(b"row-log", ctypes.c_long(3))
        if fault is not None and fault.stage == stage:
            _arm(fault, self._marker)

    def _point(self, name: str) -> None:
        kill = self.life.kill
        if kill is None or kill.point != name or str(self.pool.step + (name != "committed")) != kill.stage:
            return
        os.kill(os.getpid(), signal.SIGTERM if kill.how == "term" else signal.SIGKILL)


def _arm(fault: Fault, marker: str) -> None:
    library = shim()
    if library is None:
        return
    file = "" if fault.call == "pthread_create" else fault.file or marker
    error = 0 if fault.error == "short" else ERRORS[fault.error]
    numbers = map(ctypes.c_long, (fault.nth, fault.times))
    library.holdfast_fault(
        fault.call.encode(), file.encode(), *numbers, error, ctypes.c_long(fault.most_bytes), ctypes.c_long(-1)
    )
