"""What others do with a pool, beside a run and after it, and what must come of it."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import checks
from draw import Run
from holdfast import EmbeddingBagCollection, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.repair import problems_of, repair_pool
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.errors import Overtaken, PoolNotFound
from holdfast.pools.read_only import ReadOnlyPool, at_rest
from holdfast.pools.tables import TORCH_DTYPES
from life import Progress, Wrong
from model import Model, State, configs_of, spec_of
from twin import jagged


@dataclass(frozen=True, kw_only=True)
class Verb:
    """floor, ceiling: of the step that it finds. recovered: the pool was recovered already, so both are one.
    snapshots: those there are, the newest last."""

    run: Run
    model: Model
    directory: Path
    scratch: Path
    seed: int
    floor: int
    ceiling: int
    snapshots: list[Path]
    exact_touched: bool

    def do(self, name: str) -> int | None:
        """Returns at which step the pool is, where the verb recovers it."""
        return getattr(self, f"_{name}")()

    def _state(self, step: int) -> State:
        if not self.floor <= step <= self.ceiling:
            raise Wrong(f"found step {step}, durable was {self.floor}, the newest {self.ceiling}")
        return self.model.states[step]

    def _verify(self) -> None:
        if problems := problems_of(self.directory):
            raise Wrong(f"verify: {problems}")

    def _repair(self) -> None:
        report = repair_pool(self.directory)
        if report.done or report.left or report.backup:
            raise Wrong(f"repair of a whole pool: {report}")

    def _inspect(self) -> None:
        found = inspect_pool(self.directory)
        recovery = found["recovery"]
        if "exact_step" in recovery:
            self._state(recovery["exact_step"])

    def _eval(self) -> None:
        self._pooled()

    def _pooled(self) -> torch.Tensor:
        pool = ReadOnlyPool(self.directory)
        collections = [
            EmbeddingBagCollection(pool, configs_of(self.run, c), optimizer=spec_of(self.run, c)).eval()  # type: ignore[arg-type]
            for c in range(len(self.run.collections))
        ]
        return torch.cat([rows(jagged(*self.run.fed(3))).values() for rows in collections], dim=1)

    def _digest(self) -> int:
        with at_rest(self.directory) as (reader, _):
            found = digest_pool(reader)
            state = self._state(found.step)
            if (found.cursor, found.row_updates) != (state.cursor, state.row_updates):
                raise Wrong(f"digest: {found}")
            if (bad := checks.rows_differ(self.directory, state, exact_touched=self.exact_touched)) is not None:
                raise Wrong(f"digest: {bad}")
            if (bad := checks.stored_dense_differs(self.directory, state)) is not None:
                raise Wrong(f"digest: {bad}")
            if not checks.same_bits(self._pooled(), self.model.pool(3, state.rows, plain=True)):
                raise Wrong("eval of a pool at rest: pooled otherwise")
        return found.step

    def _export(self) -> int:
        out = self.scratch / "export.safetensors"
        with at_rest(self.directory) as (reader, _):
            step = reader.commit["step"]
            export_pool(reader, out, overwrite=True)
            has_dense = reader.dense_state() is not None
            names = [table.name for table in reader.tables]
            dtypes = [TORCH_DTYPES[table.dtype] for table in reader.tables]
        state = self._state(step)
        data = out.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        if header["__metadata__"]["holdfast.step"] != str(step):
            raise Wrong(f"export of step {step}: {header['__metadata__']}")

        def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
            begin, end = header[name]["data_offsets"]
            raw = np.frombuffer(data[8 + length + begin : 8 + length + end], np.uint8).copy()
            return torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)

        for number, (name, dtype, (weights, _)) in enumerate(zip(names, dtypes, state.rows, strict=True)):
            if (keys := state.keys[number]) is not None:
                # Those that the pool has, in their order.
                places = sorted(state.touched[number], key=keys.__getitem__)
                weights = weights[places]
                found = tensor(f"embedding_bags.{name}.keys", torch.int64).tolist()
                if found != [keys[row] for row in places]:
                    raise Wrong(f"export: {name} has keys {found} at step {step}")
            if not checks.same_bits(tensor(f"embedding_bags.{name}.weight", dtype).float(), weights.reshape(-1)):
                raise Wrong(f"export: {name} is not that of step {step}")
        if not has_dense and step > 0:
            raise Wrong(f"export of step {step}: no dense state")
        for name, wanted in state.dense["network"].items() if has_dense else ():
            if not checks.same_bits(tensor(f"model.{name}", torch.float32), wanted.reshape(-1)):
                raise Wrong(f"export: {name} is not that of step {step}")
        return step

    def _snapshot(self) -> None:
        """A snapshot, on top of an earlier one or not, restored: it is the pool of one step."""
        rng = random.Random(self.seed)
        since = rng.choice([None, *self.snapshots])
        to = self.scratch / f"snapshot-{self.seed}"
        try:
            summary = take_snapshot(self.directory, to, since=since)
        except (Overtaken, PoolNotFound):
            return
        state = self._state(summary.step)
        restored = self.scratch / f"restored-{self.seed}"
        restore_snapshot(to, restored, medium=rng.choice(("memory", "block")))  # type: ignore[arg-type]
        if (bad := checks.rows_differ(restored, state, exact_touched=False)) is not None:
            raise Wrong(f"snapshot of step {summary.step} since {since}: {bad}")
        if (bad := checks.stored_dense_differs(restored, state)) is not None:
            raise Wrong(f"snapshot of step {summary.step} since {since}: {bad}")
        commit = _core.Reader(str(restored)).commit
        if (commit["cursor"], commit["row_updates"]) != (state.cursor, state.row_updates):
            raise Wrong(f"snapshot of step {summary.step}: {commit}")
        shutil.rmtree(restored)

    def _restore(self) -> int | None:
        """The pool goes on from a snapshot of itself, in the same medium or the other."""
        rng = random.Random(self.seed)
        to, restored = self.scratch / f"snapshot-{self.seed}", self.scratch / "restored"
        summary = take_snapshot(self.directory, to)
        self._state(summary.step)
        restore_snapshot(to, restored, medium=rng.choice(("memory", "block")))  # type: ignore[arg-type]
        shutil.rmtree(self.directory)
        restored.rename(self.directory)
        return summary.step


def wait_for(progress: Progress, step: int, seconds: float = 5.0) -> None:
    """Until a life has come so far, or ended."""
    end = time.monotonic() + seconds
    while not progress.ended and (not progress.opened or progress.attempted < step) and time.monotonic() < end:
        time.sleep(0.0005)
