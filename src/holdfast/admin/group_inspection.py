"""What `inspect` and `verify` say of a group's pool beyond what they say of any: who has what, and whether its parts
belong together."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import _core
from holdfast.admin.inspection import describe_pool, describe_table, log_bytes, of_rows, size_words
from holdfast.errors import Corrupted, FormatMismatch, PoolError
from holdfast.group import manifest as manifests
from holdfast.group.founding import DENSE_DIRECTORY
from holdfast.group.manifest import Manifest, TableEntry
from holdfast.group.reading import GroupReader, common_mark, reachable_writers


def inspect_group(directory: Path, *, in_use: bool) -> dict[str, Any]:
    """As `holdfast.admin.inspection.inspect_pool`, with ``group``: what each writer has."""
    reader = GroupReader(directory)
    manifest = reader.manifest
    writers = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    found = describe_pool(directory, reader, in_use=in_use, logs_in=writers, dense_in=directory / DENSE_DIRECTORY)
    found["recovery"] = _recovery(reader, in_use=in_use)
    found["tables"] = [
        describe_table(directory, table, number)
        | of_rows(reader, number, reader.count_touched(number))
        | {"lies_in": _lies_in(manifest.tables[number])}
        for number, table in enumerate(reader.tables)
    ]
    found["group"] = {
        "generation": manifest.generation,
        "owner_of_shard": list(manifest.owner_of),
        "load_of_shard": list(manifest.load),
        "dense": {
            "steps": sorted(step for step, _, _ in reader.dense.dense_marks()),
            "epoch": reader.dense.epoch,
            "clean": reader.dense.clean,
        },
        "writers": [_writer(reader, writer, path) for writer, path in enumerate(writers)],
    }
    return found


def _writer(reader: GroupReader, writer: int, path: Path) -> dict[str, Any]:
    manifest, member = reader.manifest, reader.members[writer]
    shards = manifest.owned(writer)
    lookups = sum(manifest.load[shard] for shard in shards)
    return {
        "writer": writer,
        "directory": str(path.relative_to(reader.directory)),
        "shards": shards,
        "load": lookups,
        "load_share": lookups / max(1, sum(manifest.load)),
        "step": member.commit["step"],
        "epoch": member.epoch,
        "clean": member.clean,
        "medium": member.medium,
        "log": {
            "bytes": log_bytes(path),
            "bytes_used": member.log_bytes_used,
            "merged_step": member.merged_step,
        },
    }


def _lies_in(entry: TableEntry) -> str:
    return "all shards" if entry.table_shards > 1 else f"shard {entry.first_shard}"


def _recovery(reader: GroupReader, *, in_use: bool) -> dict[str, Any]:
    steps = [int(member.commit["step"]) for member in reader.members]
    try:
        exact = reader.common_mark()[0]
    except Corrupted as error:
        return {"needed": True, "exact_step": None, "relaxed_step": None, "would": f"fail: {error}"}
    relaxed = min(steps)
    if in_use:
        would = f"a run is at work; if it died now, training would go on after step {exact}"
    elif reader.clean:
        would = "nothing to do"
    elif any(member.unfinished_return is not None for member in reader.members):
        relaxed = exact
        would = f"take rows back to step {exact}, as an opening that died had begun to"
    elif exact == max(steps):
        would = f"drop what was in flight after step {exact}"
    else:
        would = f"roll rows back from step {_span(steps)} to {exact}, the newest that all writers and dense states have"
        if relaxed > exact:
            would += f" (relaxed: to {relaxed}, with the dense state of {exact})"
    needed = not reader.clean and not in_use
    return {"needed": needed, "exact_step": exact, "relaxed_step": relaxed, "would": would}


def describe_group(group: dict[str, Any]) -> Iterator[str]:
    """The same as lines for a person."""
    dense = group["dense"]
    steps = " and ".join(map(str, dense["steps"])) or "none"
    writers = "1 writer" if len(group["writers"]) == 1 else f"{len(group['writers'])} writers"
    yield (
        f"  {len(group['owner_of_shard'])} shards of {writers}, generation {group['generation']}; dense states of "
        f"steps: {steps}"
    )
    yield ""
    yield f"  {'writer':<16}  {'shards':>6}  {'load':>6}  {'step':>8}  {'epoch':>5}  {'log':>9}  {'in use':>9}  closed"
    for writer in group["writers"]:
        log = writer["log"]
        yield (
            f"  {writer['directory']:<16}  {len(writer['shards']):>6}  {writer['load_share']:>6.1%}  "
            f"{writer['step']:>8,}  {writer['epoch']:>5}  {size_words(log['bytes']):>9}  "
            f"{size_words(log['bytes_used']):>9}  {'cleanly' if writer['clean'] else 'no'}"
        )


def _span(steps: list[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if min(steps) < max(steps) else str(min(steps))


# Verification.


def all_parts(directory: Path) -> list[Path]:
    """Directories of the pools that make up a group's, as far as its manifest holds and they can be reached."""
    try:
        return [directory / DENSE_DIRECTORY, *reachable_writers(directory, manifests.read(directory))]
    except PoolError:
        return []


def parts_to_repair(directory: Path) -> tuple[list[Path], list[str]]:
    """The parts that may be put right each by itself, and why others may not."""
    try:
        writers = reachable_writers(directory, manifests.read(directory))
        dense = directory / DENSE_DIRECTORY
        rows = min(int(_core.Reader(str(path)).commit["step"]) for path in writers)
        newest = int(_core.Reader(str(dense)).commit["step"])
    except PoolError as error:
        return [], [f"{error}; without all parts nothing is put right"]
    if newest <= rows:
        return [dense, *writers], []
    why = f"the newest dense state is of step {newest}, and a writer's rows are of step {rows}"
    return writers, [f"{DENSE_DIRECTORY}: {why}: it may be the older one that all go back to"]


def problems_of_group(directory: Path) -> list[str]:
    """Everything that is wrong with a group's pool, each problem with the part in which it is."""
    try:
        manifest = manifests.read(directory)
    except (Corrupted, FormatMismatch) as error:
        return [str(error)]
    problems: list[str] = []
    readers: dict[Path, _core.Reader] = {}
    dense_path = directory / DENSE_DIRECTORY
    writer_paths = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    for path in (dense_path, *writer_paths):
        if not path.is_dir():
            problems.append(
                f"{path.relative_to(directory)}: this part is not here: look at the pool where all of its parts can be "
                "reached, or put the directory back"
            )
            continue
        try:
            readers[path] = _core.Reader(str(path))
        except PoolError as error:
            problems.append(f"{path.relative_to(directory)}: {error}")
    for writer, path in enumerate(writer_paths):
        if path in readers:
            wrong = _misfits(manifest, writer, readers[path])
            problems += [f"{path.relative_to(directory)}: {what}" for what in wrong]
    if dense_path in readers:
        problems += [f"{DENSE_DIRECTORY}: {what}" for what in _other_than(manifest, readers[dense_path])]
        try:
            manifest.check_dense(dense_path)
        except Corrupted as error:
            problems.append(f"{DENSE_DIRECTORY}: {error}")
    damage = {path: _damage(reader) for path, reader in readers.items() if path == dense_path}
    step = None
    if len(readers) == 1 + len(writer_paths) and not damage[dense_path]:
        try:
            step = common_mark(readers[dense_path], [readers[path] for path in writer_paths])[0]
        except Corrupted as error:
            problems.append(f"the parts do not fit together: {error}")
    damage |= {path: _damage(reader, step) for path, reader in readers.items() if path != dense_path}
    for path, found in damage.items():
        problems += [f"{path.relative_to(directory)}: {problem}" for problem in found]
    return problems


def _damage(reader: _core.Reader, step: int | None = None) -> list[str]:
    try:
        return reader.verify(step)
    except PoolError as error:
        return [str(error)]


def _misfits(manifest: Manifest, writer: int, member: _core.Reader) -> Iterator[str]:
    if member.group_uuid != bytes.fromhex(manifest.uuid):
        there = "none" if member.group_uuid is None else uuid.UUID(bytes=member.group_uuid)
        yield f"a part of another pool: its group is {there}, this one is {uuid.UUID(manifest.uuid)}"
    if member.owned != manifest.owned(writer):
        yield f"owns shards {member.owned}, where {manifests.MANIFEST} says {manifest.owned(writer)}"
    if member.header["num_shards"] != manifest.num_shards:
        yield f"of a pool with {member.header['num_shards']} shards, this one has {manifest.num_shards}"
    if [TableEntry.of(table) for table in member.tables] != list(manifest.tables):
        yield f"its tables are not those of {manifests.MANIFEST}"
    yield from _other_than(manifest, member)


def _other_than(manifest: Manifest, part: _core.Reader) -> Iterator[str]:
    header = part.header
    if header["seed"] != manifest.seed:
        yield f"its seed is {header['seed']}, {manifests.MANIFEST} says {manifest.seed}"
    if (header["store"] == "log") != (manifest.store == "log"):
        yield f"its store is {header['store']}, {manifests.MANIFEST} says {manifest.store}"
