"""What a machine is given to train on, over all its lives: a CXL device, or a disk with a volatile write cache.

A forgetful medium breaks its promise at every cut: it is there to show that a campaign notices.
"""

from __future__ import annotations

import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from machine import MEDIUM_BYTES
from volatile_disk import VolatileCache, VolatileDisk

_LINE_BYTES = 64


@dataclass(frozen=True)
class Plugged:
    """What QEMU is told. cxl_memory: file of the CXL device; disk: backend of the disk."""

    cxl_memory: Path
    disk: str


class Medium(ABC):
    """name: how the guest is told which it is to use."""

    name: str

    @abstractmethod
    @contextmanager
    def plugged(self) -> Iterator[Plugged]:
        """For one life; the machine is dead when it ends."""

    @abstractmethod
    def lose(self, chance: random.Random) -> str:
        """Does to the bytes what the cut does, after `plugged`. Returns it in words."""


class CxlMemory(Medium):
    """A store that reached the device is there after the cut."""

    name = "dax"

    def __init__(self, directory: Path, *, forgetful: bool = False) -> None:
        self._memory = directory / "cxl-memory"
        self._before = directory / "cxl-memory.before" if forgetful else None
        self._memory.unlink(missing_ok=True)

    @contextmanager
    def plugged(self) -> Iterator[Plugged]:
        if self._before is not None and self._memory.exists():
            shutil.copyfile(self._memory, self._before)
        yield Plugged(self._memory, f"driver=null-co,size={MEDIUM_BYTES}")

    def lose(self, chance: random.Random) -> str:
        if self._before is None or not self._before.exists():
            return "device keeps what it has"
        before = np.memmap(self._before, np.uint8, "r").reshape(-1, _LINE_BYTES)
        after = np.memmap(self._memory, np.uint8, "r+").reshape(-1, _LINE_BYTES)
        changed = np.flatnonzero((before != after).any(axis=1))
        lost = changed[np.random.default_rng(chance.getrandbits(64)).random(len(changed)) < 0.5]
        after[lost] = before[lost]
        after.flush()
        return f"{len(lost)} of {len(changed)} changed lines lost"


class Disk(Medium):
    """What was not flushed may be lost, torn, and out of order: see volatile_disk.py."""

    name = "disk"

    def __init__(self, directory: Path, *, forgetful: bool = False) -> None:
        self._platter = directory / "disk"
        self._address = directory / "disk.socket"
        self._forgetful = forgetful
        self._platter.write_bytes(b"")
        with self._platter.open("r+b") as file:
            file.truncate(MEDIUM_BYTES)

    @contextmanager
    def plugged(self) -> Iterator[Plugged]:
        self._cache = VolatileCache(self._platter, forgetful=self._forgetful)
        with VolatileDisk(self._cache, self._address):
            backend = f"driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={self._address}"
            yield Plugged(self._platter.parent / "no-memory", backend)

    def lose(self, chance: random.Random) -> str:
        self._cache.cut(chance)
        self._cache.close()
        counts = self._cache.counts
        return (
            f"{counts['writes']} writes, {counts['flushes']} flushes; {counts['sectors in the cache']} sectors in the "
            f"cache, {counts['lost']} of them lost"
        )
