"""What a power cut leaves of a recorded run: the file system as POSIX promises it, and no more.

Invariants
- A sector (512 bytes) is written whole or not at all; nothing larger is atomic, and writes come in any order.
- A file's bytes and size are durable once it was synced after they were written; a sync of a range keeps that range.
- A name is durable once its directory was synced, however durable the file is that it names. A rename is atomic.
- Everything else may have happened or not: any subset of it (`chance` says how it is drawn), since no two file systems
  agree on more. Half of the draws keep names in order, as a journal would.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

SECTOR_BYTES = 512
_HEAD = Struct("<cqqQQQ")


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the recorder's log (recorder_shim.cpp). Kinds: Write, Content of a mapped file, Truncate, Grow, Sync,
    File or Directory made, Unlink, Rename, and ! for a mark."""

    kind: str
    path: str
    other: str
    offset: int
    length: int
    data: bytes


def read_events(log: Path) -> list[Event]:
    data = log.read_bytes()
    events = []
    at = 0
    while at < len(data):
        kind, offset, length, *sizes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        path, other = (os.path.normpath(part.decode()) if part else "" for part in parts[:2])
        events.append(Event(kind.decode(), path, other, offset, length, parts[2]))
    return events


@dataclass(frozen=True, slots=True)
class _Change:
    """Of a file: bytes at an offset, or a size (then `data` is None). cuts: whether the size may become smaller."""

    offset: int
    data: bytes | None
    cuts: bool = False


@dataclass(eq=False)
class File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)

    def now(self) -> bytearray:
        return _after(self.durable, self.pending)


@dataclass(eq=False)
class Directory:
    now: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Naming:
    """A name taken away (gone_from, old) and a name given (to, new), or one of both."""

    gone_from: Directory | None
    old: str
    to: Directory | None
    new: str
    what: File | Directory | None


def _after(durable: bytearray, changes: list[_Change]) -> bytearray:
    data = bytearray(durable)
    for change in changes:
        if change.data is None:
            if change.cuts:
                del data[change.offset :]
            data.extend(bytes(max(0, change.offset - len(data))))
        else:
            end = change.offset + len(change.data)
            data.extend(bytes(max(0, end - len(data))))
            data[change.offset : end] = change.data
    return data


class CrashDisk:
    """A directory and what is below it. It begins durable, as it is; `apply` does to it what was recorded under the
    path `as_path`."""

    def __init__(self, root: Path, *, as_path: Path) -> None:
        self._path = str(as_path)
        self._root = _load(root)
        self._pending: list[_Naming] = []

    def apply(self, event: Event) -> None:
        match event.kind:
            case "W":
                self._write(self._file(event.path), event.offset, event.data)
            case "C":
                self._take_content(self._file(event.path), event.data)
            case "T" | "G":
                file = self._file(event.path)
                if event.kind == "T" or event.length > len(file.now()):
                    file.pending.append(_Change(event.length, None, cuts=event.kind == "T"))
            case "S":
                self._sync(event)
            case "F" | "D":
                made = File() if event.kind == "F" else Directory()
                directory, name = self._parent(event.path)
                directory.now[name] = made
                self._pending.append(_Naming(None, "", directory, name, made))
            case "U":
                directory, name = self._parent(event.path)
                del directory.now[name]
                self._pending.append(_Naming(directory, name, None, "", None))
            case "R":
                source, old = self._parent(event.path)
                target, new = self._parent(event.other)
                what = source.now.pop(old)
                target.now[new] = what
                self._pending.append(_Naming(source, old, target, new, what))

    def cut(self, chance: random.Random, to: Path) -> None:
        """Lays down below `to` what a power cut now leaves."""
        style = chance.choice(("nothing", "everything", "in order", "any", "any"))
        names: dict[int, dict[str, File | Directory]] = {}

        def entries(directory: Directory) -> dict[str, File | Directory]:
            return names.setdefault(id(directory), dict(directory.durable))

        for naming in _kept(self._pending, style, chance):
            if naming.gone_from is not None:
                entries(naming.gone_from).pop(naming.old, None)
            if naming.to is not None and naming.what is not None:
                entries(naming.to)[naming.new] = naming.what

        def lay(directory: Directory, at: Path) -> None:
            at.mkdir()
            for name, entry in entries(directory).items():
                if isinstance(entry, Directory):
                    lay(entry, at / name)
                else:
                    (at / name).write_bytes(_cut_file(entry, chance))

        lay(self._root, to)

    def _parent(self, path: str) -> tuple[Directory, str]:
        parts = path.removeprefix(self._path).strip("/").split("/")
        directory = self._root
        for part in parts[:-1]:
            inner = directory.now[part]
            assert isinstance(inner, Directory)
            directory = inner
        return directory, parts[-1]

    def _find(self, path: str) -> File | Directory:
        if path == self._path:
            return self._root
        directory, name = self._parent(path)
        return directory.now[name]

    def _file(self, path: str) -> File:
        found = self._find(path)
        assert isinstance(found, File), path
        return found

    @staticmethod
    def _write(file: File, offset: int, data: bytes) -> None:
        if offset + len(data) > len(file.now()):  # size and bytes come apart
            file.pending.append(_Change(offset + len(data), None))
        file.pending.append(_Change(offset, data))

    def _take_content(self, file: File, data: bytes) -> None:
        """What a mapped file holds, by sectors that are others than before."""
        before = file.now()
        for at in range(0, len(data), SECTOR_BYTES):
            sector = data[at : at + SECTOR_BYTES]
            if before[at : at + SECTOR_BYTES] != sector:
                self._write(file, at, sector)

    def _sync(self, event: Event) -> None:
        found = self._find(event.path)
        if isinstance(found, Directory):
            done = [naming for naming in self._pending if found in (naming.gone_from, naming.to)]
            self._pending = [naming for naming in self._pending if naming not in done]
            for naming in done:
                if naming.gone_from is not None:
                    naming.gone_from.durable.pop(naming.old, None)
                if naming.to is not None and naming.what is not None:
                    naming.to.durable[naming.new] = naming.what
            return
        if event.length < 0:
            found.durable, found.pending = found.now(), []
            return
        begin, end = event.offset, event.offset + event.length  # msync: whole pages
        begin, end = begin - begin % 4096, end + -end % 4096
        synced = [change for change in found.pending if change.data is None or begin <= change.offset < end]
        found.pending = [change for change in found.pending if change not in synced]
        found.durable = _after(found.durable, synced)


def _kept(pending: list[_Naming], style: str, chance: random.Random) -> list[_Naming]:
    match style:
        case "nothing":
            return []
        case "everything":
            return pending
        case "in order":
            return pending[: chance.randrange(len(pending) + 1)]
    return [naming for naming in pending if chance.random() < 0.5]


def _cut_file(file: File, chance: random.Random) -> bytes:
    """The file's bytes with some of its pending changes."""
    style = chance.choice(("nothing", "everything", "in order", "any write", "any sector", "any sector"))
    if not file.pending or style == "everything":
        return bytes(file.now())
    if style == "nothing":
        return bytes(file.durable)
    if style == "in order":
        return bytes(_after(file.durable, file.pending[: chance.randrange(len(file.pending) + 1)]))
    likely = chance.random()
    kept: list[_Change] = []
    for change in file.pending:
        pieces = [change] if style == "any write" or change.data is None else list(_sectors(change))
        kept.extend(piece for piece in pieces if chance.random() < likely)
    size = _after(file.durable, [change for change in kept if change.data is None])
    return bytes(_after(file.durable, kept)[: len(size)])  # bytes beyond the size that came are not there


def _sectors(change: _Change) -> Iterator[_Change]:
    assert change.data is not None
    begin, end = change.offset, change.offset + len(change.data)
    while begin < end:
        stop = min(end, begin - begin % SECTOR_BYTES + SECTOR_BYTES)
        yield _Change(begin, change.data[begin - change.offset : stop - change.offset])
        begin = stop


def _load(path: Path) -> Directory:
    directory = Directory()
    for entry in path.iterdir():
        directory.now[entry.name] = _load(entry) if entry.is_dir() else File(bytearray(entry.read_bytes()))
    directory.durable = dict(directory.now)
    return directory
