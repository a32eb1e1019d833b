"""What an episode of the swarm is: drawn from one seed, all of it plain values that can be printed and changed.

A Run is what is trained: all of it may show in the bits. A Life is one opening of its pool until it ends, one way or
another: nothing of it may show, but for relaxed recovery, which the model repeats.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

FOR_GOOD = 1 << 40
DENSE_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "nadam")
ROW_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam")
ERRORS = {"ENOSPC": 28, "EIO": 5, "EROFS": 30, "ENOMEM": 12}
POINTS = ("planned", "pooled", "backward", "rows updated", "committed")
VERBS_AT_REST = ("verify", "inspect", "eval", "digest", "export", "repair", "snapshot", "restore")
VERBS_BESIDE = ("snapshot", "inspect", "eval")
BIG = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Table:
    """keyed: its ids are keys, as many as `rows` says. ttl_steps, max_keys, admit_after: of keys; 0: all
    of them stay, from the first step on. lfu: of those that do not, ones that were updated often stay longer."""

    rows: int
    dim: int
    dtype: str
    pooling: str
    features: int
    init: tuple[float, float] | None
    keyed: bool
    ttl_steps: int
    max_keys: int
    admit_after: int
    lfu: bool

    @property
    def leaves_keys(self) -> bool:
        return self.ttl_steps > 0 or self.max_keys > 0

    def id_of(self, row: int) -> int:
        """What a batch has: the row, or its key, which is anything of 64 bits."""
        if not self.keyed:
            return row
        bits = ((row + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1) if row % 5 else row
        return bits - ((bits >> 63) << 64)


@dataclass(frozen=True, kw_only=True)
class Collection:
    tables: tuple[Table, ...]
    optimizer: str
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """micro_batches: forwards and backwards of it. updates: of which collections rows are updated. nan: a forward whose
    loss is not finite comes before. bad_ids: a batch with an id that is out of range."""

    micro_batches: int
    thrown_away: bool
    evaluates: bool
    updates: tuple[bool, ...]
    nan: bool
    bad_ids: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    seed: int
    collections: tuple[Collection, ...]
    samples: int
    longest: int
    skew: float
    weighted: bool
    optimizer: str
    foreach: bool
    lr_step: int
    scripts: tuple[Step, ...]
    medium: str
    on_disk: bool
    log_bytes: int | None
    row_checksums: bool
    relaxed_lookup: bool
    log_apart: bool

    @property
    def steps(self) -> int:
        return len(self.scripts)

    def features(self) -> list[tuple[int, int, str]]:
        """(collection, table, feature) of each, in order of the output."""
        return [
            (c, t, f"c{c}t{t}f{f}")
            for c, collection in enumerate(self.collections)
            for t, table in enumerate(collection.tables)
            for f in range(table.features)
        ]

    def batch(self, number: int) -> tuple[dict[str, list[list[int]]], dict[str, list[list[float]]] | None]:
        """Bags of rows and weights of batch `number`, by feature: a function of seed and number."""
        rng = np.random.default_rng((self.seed, number))
        bags: dict[str, list[list[int]]] = {}
        for c, t, feature in self.features():
            rows = self.collections[c].tables[t].rows
            lengths = rng.integers(0, self.longest + 1, self.samples) * int(rng.random() < 0.9)
            bags[feature] = [np.floor(rows * rng.random(n) ** self.skew).astype(int).tolist() for n in lengths]
        if not self.weighted:
            return bags, None
        return bags, {f: [rng.standard_normal(len(bag)).astype(np.float32).tolist() for bag in bags[f]] for f in bags}

    def fed(self, number: int) -> tuple[dict[str, list[list[int]]], dict[str, list[list[float]]] | None]:
        """The same batch as a user has it, with ids."""
        bags, weights = self.batch(number)
        for c, t, feature in self.features():
            table = self.collections[c].tables[t]
            bags[feature] = [[table.id_of(row) for row in bag] for bag in bags[feature]]
        return bags, weights


@dataclass(frozen=True, kw_only=True)
class Kill:
    """stage: opening, a step's number, closing. how: at the nth persist point or system call from there on, at a named
    `point` of that step, or so many microseconds (nth) after the start of the life, whatever the stage; by SIGKILL.
    term: SIGTERM instead, which the run handles."""

    how: str
    stage: str
    nth: int = 1
    point: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A system call that fails, or does less; see tests/crash/faults.py."""

    stage: str
    call: str
    file: str
    nth: int
    times: int
    error: str
    most_bytes: int = 0

    @property
    def is_sync(self) -> bool:
        return self.call in ("msync", "fsync", "fdatasync")


@dataclass(frozen=True, kw_only=True)
class Life:
    """end: close, leave (close without the newest dense state), exit (no close), raise (in a step, after its
    update)."""

    until: int
    end: str
    kill: Kill | None
    fault: Fault | None
    slow_us: int
    refuse_rings: bool
    threads: int
    window: int
    scratchpad_bytes: int
    victim_bytes: int
    dense_interval: int
    recovery: str
    capture_ahead: bool
    split_early: bool
    flush_every: int
    beside: tuple[tuple[str, int], ...]
    then: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Episode:
    seed: int
    run: Run
    lives: tuple[Life, ...]
    plant: str | None = None  # a defect, see defects.py


def draw(seed: int) -> Episode:
    rng = random.Random(seed)
    run = _run(rng)
    lives = tuple(_life(rng, run) for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))
    return Episode(seed=seed, run=run, lives=lives)


def _table(rng: random.Random) -> Table:
    keyed = rng.random() < 0.3
    ttl_steps = rng.choice((0, 1, 2, 4)) if keyed else 0
    max_keys = rng.choice((0, 0, 3, 9)) if keyed else 0
    return Table(
        rows=rng.choice((1, 2, 3, 7, 20, 33, 64, 100, 257)),
        dim=rng.choice((1, 2, 3, 4, 8, 16, 17, 33)),
        dtype=rng.choice(("fp32", "fp32", "fp16", "bf16")),
        pooling=rng.choice(("sum", "mean")),
        features=rng.choice((1, 1, 2)),
        init=rng.choice((None, None, (0.25, 0.25), (-1.0, 3.0))),
        keyed=keyed,
        ttl_steps=ttl_steps,
        max_keys=max_keys,
        admit_after=rng.choice((0, 0, 2, 3)) if keyed else 0,
        lfu=bool(ttl_steps or max_keys) and rng.random() < 0.5,
    )


def _run(rng: random.Random) -> Run:
    relaxed_lookup = rng.random() < 0.15
    collections = tuple(
        Collection(
            tables=tuple(_table(rng) for _ in range(rng.choice((1, 1, 2, 3)))),
            optimizer=rng.choice(ROW_OPTIMIZERS),
            lr=rng.choice((0.01, 0.1)),
            weight_decay=rng.choice((0.0, 0.0, 0.05)),
        )
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    )
    rare = rng.choice((0.0, 0.15, 0.4))
    scripts = tuple(
        Step(
            micro_batches=1 if relaxed_lookup or rng.random() > rare else rng.choice((2, 3, 9)),
            thrown_away=not relaxed_lookup and rng.random() < rare,
            evaluates=rng.random() < rare,
            updates=tuple(rng.random() > rare / 2 for _ in collections),
            nan=not relaxed_lookup and rng.random() < rare / 3,
            bad_ids=rng.random() < rare / 3,
        )
        for _ in range(rng.choice((3, 5, 8, 8, 12, 16)))
    )
    medium = rng.choice(("memory", "block"))
    small = (16 << 10, 24 << 10, 40 << 10, 64 << 10, 128 << 10, BIG)
    return Run(
        seed=rng.getrandbits(32),
        collections=collections,
        samples=rng.choice((1, 2, 3, 5)),
        longest=rng.choice((1, 2, 4)),
        skew=rng.choice((1.0, 2.0, 6.0)),
        weighted=rng.random() < 0.3,
        optimizer=rng.choice(DENSE_OPTIMIZERS),
        foreach=rng.random() < 0.5,
        lr_step=rng.choice((0, 0, 1, 3)),
        scripts=scripts,
        medium=medium,
        on_disk=rng.random() < 0.15,
        log_bytes=rng.choice((*small, None) if medium == "memory" else small),
        row_checksums=rng.random() < 0.4,
        relaxed_lookup=relaxed_lookup,
        log_apart=medium == "block" and rng.random() < 0.3,
    )


def _life(rng: random.Random, run: Run) -> Life:
    troubles = rng.choice(("", "", "kill", "kill", "kill", "kill", "fault"))
    return Life(
        until=rng.randint(0, run.steps) if rng.random() < 0.5 else run.steps,
        end=rng.choice(("close", "close", "leave", "exit", "raise")),
        kill=_kill(rng, run) if troubles == "kill" else None,
        fault=_fault(rng, run) if troubles == "fault" else None,
        slow_us=rng.choice((*[0] * 9, 300, 3000)),
        refuse_rings=rng.random() < 0.3 or troubles == "fault",
        threads=rng.choice((1, 1, 2, 3)),
        window=rng.choice((0, 0, 1, 2, 5)),
        scratchpad_bytes=rng.choice((20_000, 60_000, 200_000, BIG)),
        victim_bytes=rng.choice((0, 0, 1500, 20_000)),  # where the pool has a scratchpad
        dense_interval=rng.choice((1, 1, 2, 3, 5)),
        recovery="relaxed" if rng.random() < 0.15 else "exact",
        capture_ahead=rng.random() < 0.3,
        split_early=rng.random() < 0.5,
        flush_every=rng.choice((0, 0, 0, 1, 4)),
        beside=tuple(
            (rng.choice(VERBS_BESIDE), rng.randint(0, run.steps)) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))
        ),
        then=tuple(rng.choice(VERBS_AT_REST) for _ in range(rng.choice((0, 0, 1, 2)))),
    )


def _stage(rng: random.Random, run: Run) -> str:
    return rng.choice(("opening", *[str(rng.randint(1, run.steps))] * 3, "closing"))


def _kill(rng: random.Random, run: Run) -> Kill:
    how = rng.choice(("persist point", "persist point", "call", "call", "point", "time", "term"))
    match how:
        case "point":
            return Kill(how=how, stage=str(rng.randint(1, run.steps)), point=rng.choice(POINTS))
        case "time":
            return Kill(how=how, stage="opening", nth=int(10 ** rng.uniform(3.5, 5.5)))
        case "term":
            return Kill(how=how, stage=str(rng.randint(1, run.steps)), point=rng.choice(POINTS))
        case _:
            return Kill(how=how, stage=_stage(rng, run), nth=rng.randint(1, rng.choice((4, 12, 60))))


_FILES: dict[str, tuple[str, ...]] = {
    "memory": (".weights", ".state", ".touched", "log-0000", "dense-", "pool.holdfast", ""),
    "block": (".home", ".addresses", "row-log", "dense-", "pool.holdfast", ""),
}


def _fault(rng: random.Random, run: Run) -> Fault:
    call = rng.choice(
        ("fallocate", "ftruncate", "msync", "fsync", "fdatasync", "pwrite", "pread", "open", "mmap", "pthread_create")
    )
    short = call in ("pwrite", "pread") and rng.random() < 0.4
    return Fault(
        stage=_stage(rng, run),
        call=call,
        file="" if call == "pthread_create" else rng.choice(_FILES[run.medium]),
        nth=rng.randint(1, rng.choice((2, 6, 30))),
        times=rng.choice((1, 3, FOR_GOOD)),
        error="short" if short else rng.choice(tuple(ERRORS)),
        most_bytes=rng.choice((512, 1024)) if short else 0,
    )


def words(value: Any) -> str:
    """One option a line."""
    match value:
        case Episode():
            lives = "\n".join(f"life {i}: {life}" for i, life in enumerate(value.lives))
            return f"seed {value.seed}\n{words(value.run)}\n{lives}"
    return "\n".join(f"{name} = {getattr(value, name)}" for name in value.__dataclass_fields__)
