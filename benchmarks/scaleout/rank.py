"""One rank of a measurement, or one process without a group; see launch.py. Writes a JSON object to --out.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m scaleout.rank --shape rm1 --pool DIR --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

STARTED = time.time()

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast import _core
    from holdfast.group.pool_share import PoolShare
    from holdfast.group.shared_pool import SharedPool
    from holdfast.train.step_report import StepReport


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="rm1")
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="one process, no group")
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=["rowwise_adagrad", "sgd"])
    parser.add_argument("--memory-ranks", type=int, default=0)
    parser.add_argument("--split", action="store_true", help="tables are split over all shards; else each lies whole")
    parser.add_argument("--medium", default="memory", choices=["memory", "block"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--dense-interval", type=int, default=1)
    parser.add_argument("--capture-ahead", action="store_true", help="the next batch's rows while this one computes")
    parser.add_argument("--plain-ids", action="store_true", help="memory ranks sort them, as ranks that train do")
    parser.add_argument("--gloo", action="store_true", help="between ranks, as on several machines, not memory")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "fp16", "bf16"], help="of rows")
    parser.add_argument("--turns", type=int, default=0, help="of so many steps: committing by turns, on and off")
    parser.add_argument("--core", type=int, default=None, help="to pin this process to")
    parser.add_argument("--fill", action="store_true", help="write all rows before anything is timed")
    parser.add_argument("--events", type=Path, default=None, help="append what happens when, as JSON lines")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})  # before torch starts a thread
    from holdfast.state.reproducibility import keep_freed_memory, prepare_environment

    prepare_environment()
    keep_freed_memory()
    import torch

    if given.core is not None:
        torch.set_num_threads(1)
    tell(given, "imported")
    result = measure_plain(given) if given.plain else measure_in_group(given)
    if int(os.environ.get("RANK", "0")) == 0:
        given.out.write_text(json.dumps(result))


def tell(given: argparse.Namespace, event: str, **more: Any) -> None:
    if given.events is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    line = {"rank": rank, "event": event, "at": time.time(), "started": STARTED, "pid": os.getpid(), **more}
    with given.events.open("a") as file:
        file.write(json.dumps(line) + "\n")


def config_of(given: argparse.Namespace) -> Any:
    from holdfast.files.config import read_value
    from holdfast.run.sections import RunConfig
    from peers.shapes import SHAPES
    from peers.systems import EPSILON, LEARNING_RATE

    shape = SHAPES[given.shape]
    tree: dict[str, Any] = {
        "data": {"synthetic": {"num_samples": 1, "rows": [1]}},  # stands for the source that is given
        "embedding": {
            "dim": shape.embedding_dim,
            "optimizer": given.optimizer,
            "lr": LEARNING_RATE,
            "dtype": given.dtype,
        },
        "model": {"bottom": list(shape.bottom), "top": list(shape.top)},
        "optimizer": {"name": "sgd", "lr": LEARNING_RATE},
        "pool": {"seed": 1, "medium": given.medium, "dense_interval": given.dense_interval},
        "train": {
            "batch_size": shape.batch_size,
            "seed": 1,
            "shuffle": False,
            "steps": given.warmup + given.steps,
            "capture_ahead": given.capture_ahead,
        },
        "group": {"split_rows": 1000 if given.split else 1 << 40, "timeout": 60.0, "shared_memory": not given.gloo},
    }
    if given.optimizer != "sgd":
        tree["embedding"]["eps"] = EPSILON
    return read_value(RunConfig, tree, given.shape)


def measure_plain(given: argparse.Namespace) -> dict[str, Any]:
    """What one process does that trains as holdfast.train.trainer does, on batches in memory."""
    from holdfast import EmbeddingBagCollection, Pool
    from holdfast.run.assembly import build_model, seed_generators
    from holdfast.train.trainer import Trainer
    from peers.batches import make_batches
    from peers.shapes import SHAPES
    from scaleout.batches import PreparedLoader, PreparedSource, part_of

    config, shape = config_of(given), SHAPES[given.shape]
    batches = make_batches(shape, given.batches)
    source = PreparedSource(shape, batches)
    seed_generators(config.train.seed)
    pool = Pool(given.pool, seed=1, medium=given.medium, dense_interval=given.dense_interval)
    rows = EmbeddingBagCollection(pool, config.embedding.tables(source.features), optimizer=config.embedding.spec())
    if given.fill:
        fill(pool.core, given, None)
    model, dense_optimizer = build_model(config, source, rows)
    trainer = Trainer(config.train, pool=pool, rows=rows, model=model, dense_optimizer=dense_optimizer, source=source)
    parts = [part_of(batch, shape, 0, 1)[0] for batch in batches]
    trainer.loader.close()
    trainer.loader = PreparedLoader(
        source, parts, shape.batch_size, lambda batch: rows.plan(batch.features, ahead=False)
    )  # type: ignore[assignment]
    trainer.recover()
    with trainer:
        return steps_of(given, trainer.steps())


def measure_in_group(given: argparse.Namespace) -> dict[str, Any]:
    from holdfast.group.group import Group
    from holdfast.group.shared_pool import SharedPool
    from holdfast.run.ranks import open_group_trainer
    from peers.batches import make_batches
    from peers.shapes import SHAPES
    from scaleout.arithmetic import least_bytes
    from scaleout.batches import PreparedLoader, PreparedSource, part_of
    from scaleout.wire import traffic

    config, shape = config_of(given), SHAPES[given.shape]
    batches = make_batches(shape, given.batches)
    source = PreparedSource(shape, batches)
    if given.plain_ids:
        send_plain_ids()
    group = Group.from_environment(config.group.with_ranks(memory_ranks=given.memory_ranks))
    tell(given, "met")
    with open_group_trainer(config, given.pool, group, source=source) as trainer:
        pool = trainer.pool
        assert isinstance(pool, SharedPool)
        tell(given, "opened", phases=pool.opening_seconds, step=trainer.pool.step)
        if given.fill and pool.opened.member is not None and pool.step == 0:
            fill(pool.opened.member, given, pool.opened)
        trainers = len(group.roles.trainers)
        if group.is_trainer:
            parts = [part_of(batch, shape, group.rank, trainers)[0] for batch in batches]
            trainer.loader.close()
            trainer.loader = PreparedLoader(
                source, parts, shape.batch_size, lambda batch: trainer.rows.plan(batch.features)
            )  # type: ignore[assignment]
            trainer.loader.seek(trainer.pool.cursor)
        group.barrier("the tables to be filled")
        before, sent_before = traffic(), dict(group.sent_bytes)
        first_step = trainer.pool.step
        used_before = time.process_time()
        if given.turns:
            commit_by_turns(pool, given.turns)
        result = steps_of(given, trainer.steps(), trainer.pool.step)
        group.barrier("the last step")
        steps = trainer.pool.step - first_step
        used = (time.process_time() - used_before) / steps * 1e3
        result["cpu_ms"] = group.gather(used, "the processors' times")
        crossed = traffic() - before
        sent = {what: (count - sent_before.get(what, 0)) / steps for what, count in group.sent_bytes.items()}
        everyones = group.gather(sent, "what was sent")
        dense_bytes = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        result["wire"] = {
            "counted": {
                what: sum(of_rank.get(what, 0.0) for of_rank in everyones)
                for what in ("counts", "ids", "vectors", "gradients", "dense gradients")
            },
            "lo": crossed.sent_bytes / steps,
            "lo_packets": crossed.sent_packets / steps,
        }
        if group.rank == 0:
            least = least_bytes(shape, batches[:10], pool.opened.manifest, group.roles, dense_bytes)
            result["wire"]["least"] = {
                name: getattr(least, name)
                for name in ("ids", "vectors", "gradients", "dense", "fetching_rows", "total")
            }
        trainer.flush()
        tell(given, "done", step=trainer.pool.step)
    return result


def steps_of(given: argparse.Namespace, steps: Iterator[StepReport], first_step: int = 0) -> dict[str, Any]:
    """Milliseconds of each step after the warm-up, and what the stages took of them on this rank."""
    ended = [time.perf_counter()]
    commits: list[bool] = []
    stages: list[dict[str, float]] = []
    losses: list[float] = []
    for report in steps:
        if report.step == first_step + 1:
            tell(given, "first step", step=report.step)
        ended.append(time.perf_counter())
        commits.append(given.turns == 0 or (report.step - 1) // given.turns % 2 == 0)
        stages.append(report.stage_ms)
        losses.append(report.loss)
    step_ms = [(after - then) * 1e3 for then, after in pairwise(ended)][given.warmup :]
    names = dict.fromkeys(name for of_step in stages for name in of_step)
    return {
        "step_ms": step_ms,
        "commits": commits[given.warmup :],
        "median_ms": statistics.median(step_ms) if step_ms else None,
        "mean_ms": statistics.fmean(step_ms) if step_ms else None,
        "stage_ms": {
            name: statistics.median(of_step.get(name, 0.0) for of_step in stages[given.warmup :]) for name in names
        }
        if step_ms
        else {},
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
    }


def commit_by_turns(pool: SharedPool, steps: int) -> None:
    """Every other `steps` steps nothing is made durable: rows are captured, which is the working set, and updated; no
    dense state is collected, summed or written, no log is sealed for good. The last turn is a durable one."""
    from holdfast.group.pool_share import PoolShare

    opened = pool.opened
    commit = opened.commit

    def is_durable() -> bool:
        return (opened.step // steps) % 2 == 0

    def by_turns(cursor: int, dense: Any) -> int:
        if is_durable():
            return commit(cursor, dense)
        if opened.member is not None:
            opened.member.commit(cursor, None, [], 0)  # only this ends a step
            opened.member.note_group_durable(opened.step)  # or the log would be full
        opened.step, opened.cursor = opened.step + 1, cursor
        opened.row_updates += 1
        return opened.step

    class ByTurns(PoolShare):
        @property
        def dense_is_due(self) -> bool:
            return is_durable() and super().dense_is_due

    opened.__class__ = ByTurns
    opened.commit = by_turns  # type: ignore[method-assign]


def send_plain_ids() -> None:
    """Trainers leave the sorting to memory ranks."""
    from holdfast.group.manifest import Manifest

    router = Manifest.router

    def plain(
        self: Manifest, tables: Sequence[int], features: Sequence[tuple[str, int]], *, numbers_ids: bool = False
    ) -> _core.Router:
        return router(self, tables, features)

    Manifest.router = plain  # type: ignore[method-assign]


def fill(member: Any, given: argparse.Namespace, opened: PoolShare | None) -> None:
    """Every row that this process has, with the values of the peers' tables: pages never written would cost less."""
    import torch

    from ours.systems import initial_tables
    from peers.shapes import SHAPES

    for number, of_table in enumerate(initial_tables(SHAPES[given.shape])):
        values = of_table.to({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[given.dtype])
        entry = None if opened is None else opened.manifest.tables[number]
        if entry is None or entry.table_shards == 1:
            if entry is None or entry.first_shard in member.owned:
                member.import_rows(number, 0, bytes_of(values), None)
            continue
        for shard in member.owned:
            first, rows = rows_of_shard(entry, shard)
            member.import_rows(number, first, bytes_of(values[rows]), None)


def rows_of_shard(entry: Any, shard: int) -> tuple[int, Any]:
    """The first place of a shard of a split table, and its rows in order of their places."""
    import numpy as np

    from holdfast.group.layout import stride_bits

    num_rows, num_shards = entry.num_embeddings, entry.table_shards
    first = shard << stride_bits(num_rows, num_shards)
    rows = entry.rows_of_places(first + np.arange(-(-num_rows // num_shards)))
    return first, rows[rows < num_rows]


def bytes_of(values: Any) -> Any:
    import torch

    return values.contiguous().view(torch.uint8).reshape(-1).numpy()


if __name__ == "__main__":
    main()
