"""Every verb that writes, in small: how it is prepared, run, and judged after a power cut.

A verb is judged by four rules, after a cut at any moment:
- What it read is as it was.
- What it makes is not there, or whole and equal to what the verb makes when nothing disturbs it.
- The same command, run again, succeeds.
- Once the verb has returned, what it made is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.multiprocessing  # noqa: F401  (imported by the first group otherwise, and recorded)
from torch.distributed import HashStore

from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.importing import import_pool
from holdfast.admin.importing_shards import import_in_shards
from holdfast.admin.repair import problems_of, repair_pool
from holdfast.admin.snapshot import open_chain, restore_snapshot, take_snapshot
from holdfast.admin.tensor_files import open_tensors
from holdfast.files.config import read_config
from holdfast.group import manifest as manifests
from holdfast.group.founding import deal_out_anew
from holdfast.group.group import Group
from holdfast.group.roles import Roles
from holdfast.pools.directory import Medium
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.read_only import at_rest
from holdfast.run.assembly import open_trainer
from holdfast.run.ranks import open_group_trainer
from holdfast.run.sections import RunConfig

CONFIG = Path(__file__).with_name("verbs.toml")
STEPS = 4
COMMIT_RECORDS = (12_288, 16_384)  # of the superblock
_medium: Medium = "block"


def keep_rows_in(medium: Medium) -> None:
    """How the pools that verbs make from now on keep their rows, as in `holdfast.Pool`; `block`, where nobody said."""
    global _medium
    _medium = medium


def config_of(steps: int = STEPS) -> RunConfig:
    config = read_config(RunConfig, CONFIG, [])
    return replace(config, pool=replace(config.pool, medium=_medium), train=replace(config.train, steps=steps))


def train(pool: Path, steps: int = STEPS) -> None:
    with open_trainer(config_of(steps), pool) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()


def train_group(pool: Path, steps: int = STEPS) -> None:
    group = Group(store=HashStore(), rank=0, roles=Roles(world_size=1), timeout=30.0)
    with open_group_trainer(config_of(steps), pool, group) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()


def deal_out(pool: Path, writers: int) -> None:
    options = OpenOptions(grow_log=False, scratchpad_bytes=1 << 20)
    deal_out_anew(pool, manifests.read(pool), writers, options, lambda layout, num_shards, cursor: [1] * num_shards)


def files_of(directory: Path) -> dict[str, bytes]:
    """But for hidden ones, which are nobody's results: a probe of the medium, what was being made."""
    found = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def digest_of_files(*directories: Path) -> str:
    sha = hashlib.sha256()
    for directory in directories:
        for name, content in files_of(directory).items():
            sha.update(f"{directory.name} {name} {len(content)} ".encode() + content)
    return sha.hexdigest()


def digest_of(pool: Path) -> str:
    with at_rest(pool) as (reader, _):
        return digest_pool(reader).whole


class Verb(ABC):
    """In a directory `root`, which is empty at first."""

    def prepare(self, root: Path) -> None:
        """What is there before, durable."""
        train(root / "pool")

    @abstractmethod
    def run(self, root: Path) -> None: ...

    @abstractmethod
    def value(self, root: Path) -> str | None:
        """What was made, in a form that is equal for equal results; None where there is nothing. Raises where it is
        there and not whole."""

    def sources(self, root: Path) -> str | None:
        """Of what the verb only reads, in a form that is equal as long as that is."""
        return digest_of_files(root / "pool")

    def judge(self, root: Path, sources: str | None, expected: str, *, has_returned: bool) -> bool:
        """Returns whether it found what the verb makes, and did not run the verb again. Raises AssertionError, or what
        the verb raises."""
        assert self.sources(root) == sources, "what was read has changed"
        found = self.value(root)
        assert found in (None, expected), "half a result is believed"
        if found is None:
            assert not has_returned, "the verb has returned, and nothing is there"
            self.run(root)
            assert self.value(root) == expected, "run again, it made something else"
            assert self.sources(root) == sources, "what was read has changed by running again"
        return found is not None


class Snapshot(Verb):
    since: str | None = None

    def run(self, root: Path) -> None:
        take_snapshot(root / "pool", root / "tuesday", since=None if self.since is None else root / self.since)

    def value(self, root: Path) -> str | None:
        return self._restored(root, "tuesday")

    @staticmethod
    def _restored(root: Path, name: str) -> str | None:
        if not (root / name).exists():
            return None
        for part in open_chain(root / name):
            part.verify()
        back = root / f"back-{name}-{len(list(root.iterdir()))}"
        restore_snapshot(root / name, back, medium=_medium)
        return digest_of(back)


class SnapshotSince(Snapshot):
    since = "monday"

    def prepare(self, root: Path) -> None:
        train(root / "pool", 2)
        take_snapshot(root / "pool", root / "monday")
        train(root / "pool")

    def sources(self, root: Path) -> str | None:
        return digest_of_files(root / "pool", root / "monday")


class _MakesAPool(Verb):
    """The new pool is trained on after it was judged: it is one to go on from."""

    made = "made"

    def value(self, root: Path) -> str | None:
        if not (root / self.made).exists():
            return None
        assert problems_of(root / self.made) == []
        return digest_of(root / self.made)

    def judge(self, root: Path, sources: str | None, expected: str, *, has_returned: bool) -> bool:
        was_there = super().judge(root, sources, expected, has_returned=has_returned)
        train(root / self.made, STEPS + 1)
        return was_there


class Restore(_MakesAPool):
    def prepare(self, root: Path) -> None:
        train(root / "other")
        take_snapshot(root / "other", root / "pool")

    def run(self, root: Path) -> None:
        restore_snapshot(root / "pool", root / self.made, medium=_medium)


class SnapshotGroup(Snapshot):
    def prepare(self, root: Path) -> None:
        train_group(root / "pool")
        deal_out(root / "pool", 3)


class RestoreGroup(Restore):
    """With three writers; what goes on from it is a group of one."""

    def prepare(self, root: Path) -> None:
        train_group(root / "other")
        deal_out(root / "other", 3)
        take_snapshot(root / "other", root / "pool")


class Import(_MakesAPool):
    def prepare(self, root: Path) -> None:
        train(root / "other")
        (root / "pool").mkdir()
        with at_rest(root / "other") as (reader, _):
            export_pool(reader, root / "pool" / "tables.safetensors")

    def run(self, root: Path) -> None:
        import_pool(open_tensors(root / "pool" / "tables.safetensors"), config_of(), root / self.made)


class ImportInShards(Import):
    def run(self, root: Path) -> None:
        config = config_of()
        tables = open_tensors(root / "pool" / "tables.safetensors")
        import_in_shards(tables, config, root / self.made, config.group)


class Export(Verb):
    def run(self, root: Path) -> None:
        with at_rest(root / "pool") as (reader, _):
            export_pool(reader, root / "out.safetensors")

    def sources(self, root: Path) -> str | None:
        """Opening a pool writes that it was opened."""
        return digest_of(root / "pool")

    def value(self, root: Path) -> str | None:
        path = root / "out.safetensors"
        if not path.exists():
            return None
        open_tensors(path)
        return path.read_bytes().hex()


class Repair(Verb):
    """The pool is the same in the end, and the backups give back, byte for byte, what was damaged."""

    def prepare(self, root: Path) -> None:
        train(root / "pool")
        superblock = root / "pool" / "pool.holdfast"
        data = bytearray(superblock.read_bytes())
        older = min(COMMIT_RECORDS, key=lambda at: (data[at + 8], data[at + 16]))  # epoch, step
        data[older + 50] ^= 0xA5
        superblock.write_bytes(data)
        slots = [root / "pool" / name for name in ("dense-0", "dense-1")]
        os.truncate(min(slots, key=lambda slot: slot.read_bytes()[16]), 100)  # step
        assert problems_of(root / "pool") != []
        (root / "damaged").mkdir()
        for name, content in files_of(root / "pool").items():
            (root / "damaged" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "damaged" / name).write_bytes(content)

    def run(self, root: Path) -> None:
        report = repair_pool(root / "pool")
        assert report.left == [], report

    def sources(self, root: Path) -> str | None:
        return None

    def value(self, root: Path) -> str | None:
        if problems_of(root / "pool"):
            return None
        copy = root / f"copy-{len(list(root.iterdir()))}"
        shutil.copytree(root / "pool", copy)  # opening a pool writes to it
        return digest_of(copy)

    def judge(self, root: Path, sources: str | None, expected: str, *, has_returned: bool) -> bool:
        was_there = super().judge(root, sources, expected, has_returned=has_returned)
        for backup in sorted(root.glob("pool.repair-*.jsonl"), reverse=True):
            for text in reversed(backup.read_text(errors="replace").splitlines()):
                try:
                    line = json.loads(text)
                except ValueError:  # torn: its change had not begun
                    continue
                path = root / "pool" / Path(line["file"]).name
                with path.open("r+b") as file:
                    file.seek(line["offset"])
                    file.write(bytes.fromhex(line["before"]))
                os.truncate(path, line["file_bytes"])
        found, damaged = (files_of(root / name) for name in ("pool", "damaged"))
        for files in (found, damaged):
            del files["lock"]  # which says what process had the pool last
        assert found == damaged, "the backups do not give back what was there"
        return was_there


class Create(Verb):
    """A pool's first life, from nothing to its clean end; and its second, which goes on."""

    first_steps = 0
    train: Callable[[Path, int], None] = staticmethod(train)

    def prepare(self, root: Path) -> None:
        if self.first_steps:
            self.train(root / "pool", self.first_steps)

    def run(self, root: Path) -> None:
        self.train(root / "pool", STEPS)

    def sources(self, root: Path) -> str | None:
        return None

    def value(self, root: Path) -> str | None:
        return digest_of(root / "pool")

    def judge(self, root: Path, sources: str | None, expected: str, *, has_returned: bool) -> bool:
        if has_returned:
            assert self.value(root) == expected, "the run has ended, and its pool is not at its end"
        self.run(root)
        assert self.value(root) == expected
        return has_returned


class GoOn(Create):
    first_steps = 2


class CreateGroup(Create):
    train = staticmethod(train_group)


class GoOnWithGroup(CreateGroup):
    first_steps = 2


class DealOut(Create):
    """A group's shards go to other owners."""

    def prepare(self, root: Path) -> None:
        train_group(root / "pool")

    def run(self, root: Path) -> None:
        if manifests.read(root / "pool").num_writers != 3:
            deal_out(root / "pool", 3)

    def judge(self, root: Path, sources: str | None, expected: str, *, has_returned: bool) -> bool:
        if has_returned:
            assert manifests.read(root / "pool").num_writers == 3
        was_there = super().judge(root, sources, expected, has_returned=has_returned)
        assert problems_of(root / "pool") == []
        return was_there


VERBS: dict[str, Verb] = {
    "snapshot": Snapshot(),
    "snapshot_since": SnapshotSince(),
    "restore": Restore(),
    "snapshot_of_a_group": SnapshotGroup(),
    "restore_of_a_group": RestoreGroup(),
    "import": Import(),
    "import_in_shards": ImportInShards(),
    "export": Export(),
    "repair": Repair(),
    "first_life": Create(),
    "second_life": GoOn(),
    "first_life_of_a_group": CreateGroup(),
    "second_life_of_a_group": GoOnWithGroup(),
    "deal_out_anew": DealOut(),
}
