"""Episodes of groups: ranks that die one by one or together, reopened with other options or other numbers of ranks.

What must be there in the end is what a group leaves that nobody killed: unlike rows of one process, which the model
computes by itself. What a life opens at is held against what was called durable before it.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from episode import Failed, fork
from group_runs import Life, Ranks, digest
from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.importing import import_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.repair import problems_of
from holdfast.admin.tensor_files import open_tensors
from holdfast.files.config import read_value
from holdfast.pools.read_only import at_rest, check_exists
from holdfast.run.sections import RunConfig
from life import Progress, Wrong
from test_group_kill import Case, Reference, befall, keys, run_of

# Of a machine that has much else to do: a rank that is slow is not one that died.
TIMEOUT = 10.0
HUNG_AFTER = 150.0


@dataclass(frozen=True, kw_only=True)
class GroupEpisode:
    """lives: options of each that need not show in the bits. others: ranks and memory ranks of a life after the last,
    or None."""

    seed: int
    case: Case
    lives: tuple[dict[str, Any], ...]
    looks: tuple[str, ...]
    others: tuple[int, int] | None


def draw_group(seed: int) -> GroupEpisode:
    rng = random.Random(f"group {seed}")
    ranks = rng.choice((1, 2, 2, 3, 4))
    memory_ranks = rng.choice((0, 0, rng.randint(0, ranks - 1)))
    log = rng.random() < 0.5
    embedding = {
        "optimizer": rng.choice(("sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam")),
        "dtype": rng.choice(("fp32", "fp16", "bf16")),
        "dim": 4,
        "pooling": rng.choice(("sum", "mean")),
    }
    pool = {"row_checksums": rng.random() < 0.3 and not log}
    config = run_of(log=log, whole=rng.random() < 0.3, embedding=embedding, pool=pool)
    config["group"]["timeout"] = TIMEOUT
    config["optimizer"] = {"name": rng.choice(("sgd", "adam", "adamw", "adagrad")), "lr": 0.01}
    lives = tuple(
        {
            "pool": {
                "dense_interval": rng.choice((1, 2, 3, 5)),
                **({"scratchpad_bytes": rng.choice((200_000, 1 << 20))} if log else {}),
                **({"victims": {"bytes": 20_000}} if log and rng.random() < 0.3 else {}),
            },
            "train": {"window": rng.choice((1, 2, 4))},
        }
        for _ in range(rng.choice((2, 3, 4)))
    )
    looks = tuple(rng.choice(("verify", "verify", "inspect", "digest", "nothing")) for _ in lives)
    others = (rng.randint(1, 4), 0) if rng.random() < 0.2 else None
    if rng.random() < 0.3:
        of_keys = keys(
            ttl_steps=rng.choice((1, 3, 6)),
            admit_after=rng.choice((1, 2, 3)),
            max_keys=rng.choice((None, 40)),
            stay=rng.choice((None, "lfu")),
            admit_probability=rng.choice((None, 0.5)),
        )
        config = {**config, **{name: {**config.get(name, {}), **fields} for name, fields in of_keys.items()}}
    has_rules = {"stay", "admit_probability"} & {name for name, value in config["embedding"].items() if value}
    if not memory_ranks and not has_rules:
        lives = tuple({**life, "device": _draw_device(rng)} for life in lives)
    case = Case(config=config, num_ranks=ranks, memory_ranks=memory_ranks, dropout=rng.random() < 0.5)
    return GroupEpisode(seed=seed, case=case, lives=lives, looks=looks, others=others)


def _draw_device(rng: random.Random) -> dict[str, Any]:
    return rng.choice(({}, {"rows": "scratchpad", "scratchpad_bytes": rng.choice((100_000, 1 << 20))}))


def _with(case: Case, options: dict[str, Any]) -> Case:
    config = {name: {**case.config.get(name, {}), **options.get(name, {})} for name in {*case.config, *options}}
    return replace(case, config=config)


def play_group(ranks: Ranks, episode: GroupEpisode, root: Path) -> list[str]:
    """Returns what became of it, in words. Raises Failed."""
    root.mkdir(parents=True)
    try:
        return _play(ranks, episode, root)
    except AssertionError as error:
        raise Failed(f"{error}") from None
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _play(ranks: Ranks, episode: GroupEpisode, root: Path) -> list[str]:
    rng = random.Random(f"befalls {episode.seed}")
    case, pool = episode.case, root / "killed"
    reference = _reference(ranks, root, case)
    words: list[str] = []
    durable = 0
    for options, look in zip(episode.lives, episode.looks, strict=True):
        life = _with(case, options).run(ranks, pool, hung_after=HUNG_AFTER, **befall(rng, case, reference))
        durable = _judge(life, durable)
        words.append(f"group life {'killed' if life.struck else 'closed'}")
        if look != "nothing" and (pool / "group.json").exists():
            durable = max(durable, _look(look, pool, durable, root))
            words.append(f"group verb: {look}")
    life = case.run(ranks, pool, hung_after=HUNG_AFTER)
    _judge(life, durable)
    if not life.ended_well:
        raise Failed(f"the last life: {life.errors()}")
    if (found := _digest(pool, root)) != reference.digest:
        raise Failed(f"digest {found}, of a group that nobody killed {reference.digest}")
    if rng.random() < 0.3 and "drift" not in case.config["data"]["synthetic"]:  # an import dates keys anew
        _move(case, pool, root)
        words.append("group exported and imported")
    if episode.others is not None:
        number, memory = episode.others
        more = _with(case, {"train": {"steps": 20}})
        life = replace(more, num_ranks=number, memory_ranks=memory).run(ranks, pool, hung_after=HUNG_AFTER)
        _judge(life, 16)
        if not life.ended_well or life.opened != 16:
            raise Failed(f"{number} ranks instead of {case.num_ranks}: opened at {life.opened}, {life.errors()}")
        _look("verify", pool, 16, root)
        words.append("group of another size")
    return words


def _reference(ranks: Ranks, root: Path, case: Case) -> Reference:
    reference = Reference.__new__(Reference)
    pool = root / "reference"
    life = case.run(ranks, pool, hung_after=HUNG_AFTER)
    if not life.ended_well:
        raise Failed(f"a group that nobody killed: {life.errors()}")
    reference.digest = _digest(pool, root)
    reference.seconds = max(rank.ended for rank in life.ranks)
    reference.persist_points = {rank.number: rank.all_said("persist_points")[0] for rank in life.ranks}
    return reference


def _judge(life: Life, durable: int) -> int:
    if life.opened is not None and life.opened < durable:
        raise Failed(f"opened at step {life.opened}, durable was {durable}")
    if life.struck:
        life.check_that_the_others_ended(within=TIMEOUT, joining=5 * TIMEOUT)
    elif not life.ended_well:
        raise Failed(f"nobody was killed, and yet: {life.errors()}")
    return max(durable, life.durable, life.opened or 0)


def _look(name: str, pool: Path, durable: int, root: Path) -> int:
    """Returns the step that it found."""
    found = Progress()

    def work() -> None:
        check_exists(pool)
        if name == "verify":
            if problems := problems_of(pool):
                raise Wrong(f"verify: {problems}")
        elif name == "inspect":
            inspect_pool(pool)
        else:
            with at_rest(pool) as (reader, _):
                found.step = digest_pool(reader).step
                if found.step < durable:
                    raise Wrong(f"at rest at step {found.step}, durable was {durable}")

    ended = fork(work, root / "said", name).wait()
    if ended.exit or ended.signal:
        raise Failed(f"{name} of a group: signal {ended.signal}, exit {ended.exit}: {ended.said}")
    return found.step


def _move(case: Case, pool: Path, root: Path) -> None:
    """Out to a file and in again, into a pool of one writer: with the same rows and their state."""

    def work() -> None:
        file = root / "export.safetensors"
        with at_rest(pool) as (reader, _):
            tables = digest_pool(reader).tables
            export_pool(reader, file)
        import_pool(open_tensors(file), read_value(RunConfig, case.config, "config"), root / "imported")
        with at_rest(root / "imported") as (reader, _):
            if (found := digest_pool(reader).tables) != tables:
                raise Wrong(f"imported tables {found}, exported {tables}")

    ended = fork(work, root / "said", "export and import").wait()
    if ended.exit or ended.signal:
        raise Failed(f"export and import: signal {ended.signal}, exit {ended.exit}: {ended.said}")


def _digest(pool: Path, root: Path) -> str:
    ended = fork(lambda: digest(pool), root / "said", "digest").wait()
    if ended.exit or ended.signal:
        raise Failed(f"digest of a group: {ended.said}")
    return ended.said
