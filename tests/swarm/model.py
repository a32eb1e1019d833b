"""What must be there: every step's rows, row state, dense state and random numbers, by the slow reference alone.

Rows come from tests/numerics/row_reference.py; the dense part is plain PyTorch. Nothing of holdfast's computes here.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draw import Run, Table
from holdfast import SGD, Adagrad, Adam, EmbeddingBagConfig, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.optim import RowOptimizerSpec
from row_reference import RowGradients, TableReference, f32

_SPECS: dict[str, type[RowOptimizerSpec]] = {
    "sgd": SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "adam": Adam,
    "rowwise_adam": RowWiseAdam,
}
SEED_OF_POOL = 7


def spec_of(run: Run, number: int) -> RowOptimizerSpec:
    collection = run.collections[number]
    return _SPECS[collection.optimizer](lr=collection.lr, weight_decay=collection.weight_decay)


def configs_of(run: Run, number: int) -> list[EmbeddingBagConfig]:
    """As a user declares the tables: where keys stay there is a row for each, and no more."""
    return [
        replace(
            counted,
            num_embeddings=None,
            capacity=40 * table.rows if table.leaves_keys else table.rows,
            ttl_steps=table.ttl_steps or None,
            max_keys=table.max_keys or None,
            admit_after=table.admit_after or None,
            stay="lfu" if table.lfu else None,
        )
        if table.keyed
        else counted
        for table, counted in zip(run.collections[number].tables, counted_configs_of(run, number), strict=True)
    ]


def counted_configs_of(run: Run, number: int) -> list[EmbeddingBagConfig]:
    """The same tables with as many rows as there are ids."""
    configs = []
    for t, table in enumerate(run.collections[number].tables):
        low, high = table.init or ((-0.125, 0.125) if table.leaves_keys else (None, None))
        configs.append(
            EmbeddingBagConfig(
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                name=f"c{number}t{t}",
                feature_names=[f"c{number}t{t}f{f}" for f in range(table.features)],
                data_type=table.dtype,
                pooling=table.pooling,
                weight_init_min=low,
                weight_init_max=high,
            )
        )
    return configs


def rng_now() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  (it is part of a run)


def set_rng(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])


class Dense:
    """The dense part, as a user would write it: the same code in a life and in the model."""

    def __init__(self, run: Run, row_optimizers: list[torch.optim.Optimizer]) -> None:
        width = sum(run.collections[c].tables[t].dim for c, t, _ in run.features())
        self.network = nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 1))
        kinds: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "momentum": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
            "adagrad": torch.optim.Adagrad,
            "rmsprop": torch.optim.RMSprop,
            "nadam": torch.optim.NAdam,
        }
        more = {"momentum": 0.9} if run.optimizer == "momentum" else {}
        self.optimizer = kinds[run.optimizer](self.network.parameters(), lr=0.05, foreach=run.foreach, **more)
        driven = [self.optimizer, *row_optimizers] if run.lr_step else []
        self.schedules = [torch.optim.lr_scheduler.StepLR(item, run.lr_step, 0.7) for item in driven]

    def loss(self, pooled: Tensor) -> Tensor:
        noise = random.random() + float(np.random.random())  # noqa: NPY002
        return (torch.tanh(self.network(pooled)) - noise).square().mean()  # bounded: no run of chance diverges

    def end_step(self) -> None:
        self.optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


@dataclass(frozen=True, kw_only=True)
class State:
    """At the end of a step. rows: weights (16-bit ones widened) and state of every table. touched: rows that an update
    has written, but for keys that are left behind: the step of the newest update, and how many there were. keys: of the
    rows, where they have any. lrs: of the row optimizers."""

    step: int
    cursor: int
    row_updates: int
    rows: list[tuple[Tensor, Tensor]]
    touched: list[dict[int, tuple[int, int]]]
    keys: list[list[int] | None]
    dense: dict[str, Any]
    lrs: list[float]
    rng: tuple[Any, ...]
    pooled: list[Tensor] = field(default_factory=list)  # of the step's micro-batches


class Model:
    """states[s] is what a pool at step s holds."""

    def __init__(self, run: Run) -> None:
        self.run = run
        seed_everything(run.seed)
        self.tables: list[list[TableReference]] = []
        for c in range(len(run.collections)):
            first = sum(len(tables) for tables in self.tables)
            spec = spec_of(run, c)
            drawn = zip(run.collections[c].tables, counted_configs_of(run, c), strict=True)
            self.tables.append(
                [
                    TableReference(config, number, SEED_OF_POOL, spec, _keys_of(table))
                    for number, (table, config) in enumerate(drawn, first)
                ]
            )
        self._flat = [table for tables in self.tables for table in tables]
        self._drawn = [table for collection in run.collections for table in collection.tables]
        # Stand-ins that schedules drive; their learning rates are the rows'.
        self._row_optimizers = [
            torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=collection.lr) for collection in run.collections
        ]
        self.dense = Dense(run, list(self._row_optimizers))
        self.states = [self._snapshot(0, 0, 0, [{} for _ in self._flat], [])]
        self.extend()

    def extend(self) -> None:
        while len(self.states) <= self.run.steps:
            self._step(self.states[-1])

    def put_back(self, step: int, dense_step: int) -> None:
        """Relaxed recovery: the rows of `step` beside the dense state of `dense_step`, and what follows from it. Leaves
        this process's random numbers as they are."""
        rng = rng_now()
        earlier = self.states[dense_step]
        mixed = replace(self.states[step], dense=earlier.dense, lrs=earlier.lrs, rng=earlier.rng)
        self.states = [*self.states[:step], mixed]
        self.dense.load(mixed.dense)
        for optimizer, lr in zip(self._row_optimizers, mixed.lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr
        for table, (weights, state) in zip(self._flat, mixed.rows, strict=True):
            table.weights, table.state = weights.clone(), state.clone()
        self.extend()
        set_rng(rng)

    def _snapshot(
        self, step: int, cursor: int, row_updates: int, touched: list[dict[int, tuple[int, int]]], pooled: list[Tensor]
    ) -> State:
        return State(
            step=step,
            cursor=cursor,
            row_updates=row_updates,
            rows=[(table.weights.clone(), table.state.clone()) for table in self._flat],
            touched=touched,
            keys=[None if table.keys is None else list(table.keys) for table in self._flat],
            dense=copy.deepcopy(self.dense.state()),
            lrs=[optimizer.param_groups[0]["lr"] for optimizer in self._row_optimizers],
            rng=rng_now(),
            pooled=pooled,
        )

    def _step(self, before: State) -> None:
        script = self.run.scripts[before.step]
        set_rng(before.rng)
        self.dense.optimizer.zero_grad()
        sums: list[list[RowGradients]] = [[{} for _ in tables] for tables in self.tables]
        outputs = []
        for part in range(script.micro_batches):
            number = before.cursor + part
            pooled = self.pool(number)
            outputs.append(pooled.clone())
            pooled.requires_grad_()
            self.dense.loss(pooled).backward()
            assert pooled.grad is not None
            self._add_gradients(sums, number, pooled.grad)
        step = before.step + 1
        touched = [dict(of_table) for of_table in before.touched]
        flat = 0
        for c, tables in enumerate(self.tables):
            for table, of_table in zip(tables, sums[c], strict=True):
                if script.updates[c]:
                    lr = self._row_optimizers[c].param_groups[0]["lr"]
                    touched[flat] |= {row: (step, touched[flat].get(row, (0, 0))[1] + 1) for row in of_table}
                    admitted = [row for row in of_table if touched[flat][row][1] >= self._drawn[flat].admit_after]
                    table.update({row: of_table[row] for row in admitted}, before.row_updates + 1, lr=lr)
                self._leave_behind(flat, touched[flat], step)
                flat += 1
        self.dense.end_step()
        cursor, updates = before.cursor + script.micro_batches, before.row_updates + any(script.updates)
        self.states.append(self._snapshot(step, cursor, updates, touched, outputs))

    def _leave_behind(self, flat: int, touched: dict[int, tuple[int, int]], step: int) -> None:
        """Keys of the lowest scores begin anew: those that are too old, then those that are too many. A score is the
        newest step that updated the key, and what its updates are worth."""
        drawn, table = self._drawn[flat], self._flat[flat]
        if not touched:
            return
        score = {
            row: newest + ((1 << updates.bit_length() - 1) - 1 if drawn.lfu else 0)
            for row, (newest, updates) in touched.items()
        }
        latest = max(newest for newest, _ in touched.values())
        stay = {row for row in touched if not drawn.ttl_steps or step + 1 - score[row] <= drawn.ttl_steps}
        best = sorted((score[row] for row in stay), reverse=True)
        if drawn.max_keys and len(best) > drawn.max_keys:
            too_many = best[drawn.max_keys]
            least = too_many + 1 if too_many < latest else best[drawn.max_keys - 1]
            stay = {row for row in stay if score[row] >= least or touched[row][0] == latest}
        for row in touched.keys() - stay:
            del touched[row]
            table.weights[row], table.state[row] = table.initial(row), 0

    def pool(self, number: int, rows: list[tuple[Tensor, Tensor]] | None = None, *, plain: bool = False) -> Tensor:
        """The pooled output of batch `number`; rows: others than the newest. plain: whatever relaxed_lookup says."""
        bags, weights = self.run.batch(number)
        split = self.run.relaxed_lookup and number > 0 and not plain
        before = self.run.batch(number - 1)[0] if split else {}
        parts, flat = [], 0
        for tables in self.tables:
            for table in tables:
                values = table.weights if rows is None else rows[flat][0]
                shared = {row for f in table.config.feature_names for bag in before.get(f, ()) for row in bag}
                for feature in table.config.feature_names:
                    of = None if weights is None else weights[feature]
                    parts.append(_pool(table, values, bags[feature], of, shared))
                flat += 1
        return torch.cat(parts, dim=1)

    def _add_gradients(self, sums: list[list[RowGradients]], number: int, grad: Tensor) -> None:
        bags, weights = self.run.batch(number)
        column = 0
        for tables, of_collection in zip(self.tables, sums, strict=True):
            for table, of_table in zip(tables, of_collection, strict=True):
                dim = table.config.embedding_dim
                for feature in table.config.feature_names:
                    of = None if weights is None else weights[feature]
                    table.add_gradients(of_table, bags[feature], of, grad[:, column : column + dim])
                    column += dim


def _pool(
    table: TableReference, values: Tensor, bags: list[list[int]], weights: list[list[float]] | None, shared: set[int]
) -> Tensor:
    """A bag is the sum of its own rows plus that of the shared ones (none, where lookup is exact), divided last."""
    pooled = []
    for sample, bag in enumerate(bags):
        sums = [torch.zeros(table.config.embedding_dim), torch.zeros(table.config.embedding_dim)]
        for j, row in enumerate(bag):
            value = values[row] if weights is None else f32(weights[sample][j]) * values[row]
            sums[row in shared] = sums[row in shared] + value
        total = sums[0] + sums[1] if shared else sums[0]
        pooled.append(table.bag_factor(len(bag)) * total if table.config.pooling == "mean" else total)
    return torch.stack(pooled)


def _keys_of(table: Table) -> list[int] | None:
    return [table.id_of(row) for row in range(table.rows)] if table.keyed else None


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
