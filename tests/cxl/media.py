"""What a machine is given to train on, over all its lives: a CXL device, or a disk with a volatile write cache.

A forgetful medium breaks its promise at the cuts after the first: it is there to show that a campaign notices.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from guest_image import ENVIRONMENT
from guest_machine import MEDIUM_BYTES
from volatile_disk import VolatileCache, VolatileDisk


@dataclass(frozen=True)
class Span:
    """A while: in seconds, and in the requests that come to a disk meanwhile; by default those of two steps."""

    seconds: float
    requests: int = 32


@dataclass(frozen=True)
class Plugged:
    """What QEMU is told. cxl_memory: file of the CXL device; disk: backend of the disk."""

    cxl_memory: Path
    disk: str


class Medium(ABC):
    """directory: where its bytes are, and nobody else's. name: how the guest is told which it is to use. is_formatted:
    whether there is a file system on it."""

    name: str

    def __init__(self, directory: Path, *, forgetful: bool = False) -> None:
        self.directory = directory
        self._bytes = directory / self.name
        self._bytes.unlink(missing_ok=True)
        self._bytes.touch()
        os.truncate(self._bytes, MEDIUM_BYTES)
        self.is_formatted = False
        self._forgetful = forgetful
        self._lives = 0

    @property
    def _forgets(self) -> bool:
        return self._forgetful and self._lives > 1

    @contextmanager
    def plugged(self) -> Iterator[Plugged]:
        """For one life; the machine is dead when it ends."""
        self._lives += 1
        with self._plugged() as plugged:
            yield plugged

    @abstractmethod
    @contextmanager
    def _plugged(self) -> Iterator[Plugged]: ...

    @property
    def requests(self) -> int:
        """Of this life, that wrote or flushed, as far as the medium has any."""
        return 0

    def keep_copy(self) -> None:
        """What a life begins with, for whoever has to look into it."""
        _copy(self._bytes, self.directory / "left")

    @abstractmethod
    def forget_from_now_on(self) -> None:
        """The rest of this life is as that of a forgetful medium."""

    @abstractmethod
    def arm(self, share: float, span: Span) -> str:
        """From now on it is a `share` of a while until the power goes. Returns it in words."""

    @abstractmethod
    def is_due(self) -> bool:
        """Whether that is over."""

    @property
    def may_fail(self) -> bool:
        """Whether it has, so that the machine may say so."""
        return False

    @abstractmethod
    def lose(self, chance: random.Random) -> str:
        """Does to the bytes what the cut does, after `plugged`. Returns it in words."""


def _copy(file: Path, copy: Path) -> None:
    subprocess.run(["cp", "--sparse=always", file, copy], check=True)


class CxlMemory(Medium):
    """A store that reached the device is there after the cut. Forgetful: nothing that was stored since it was to forget
    is."""

    name = "dax"

    @contextmanager
    def _plugged(self) -> Iterator[Plugged]:
        self._before.unlink(missing_ok=True)
        if self._forgets:
            self.forget_from_now_on()
        yield Plugged(self._bytes, f"driver=null-co,size={MEDIUM_BYTES}")

    def forget_from_now_on(self) -> None:
        _copy(self._bytes, self._before)

    def arm(self, share: float, span: Span) -> str:
        self._due = time.monotonic() + share * span.seconds
        return f"{share * span.seconds:.2f} s"

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def lose(self, chance: random.Random) -> str:
        if not self._before.exists():
            return ""
        self._before.replace(self._bytes)
        return "; what was stored since is lost"

    @property
    def _before(self) -> Path:
        """What comes back at the end of a life that is forgotten."""
        return self.directory / "before"


class Disk(Medium):
    """What was not flushed may be lost, torn, and out of order (volatile_disk.py). Forgetful: what was flushed, too.

    The power goes at a request, not at a time: writes follow each other closely, and most of the time there are none.
    """

    name = "disk"

    def __init__(self, directory: Path, *, forgetful: bool = False) -> None:
        super().__init__(directory, forgetful=forgetful)
        # ext4 cannot be mounted after a cut has torn its superblock, of two sectors, if that has a checksum.
        subprocess.run(
            ["mkfs.ext4", "-q", "-O", "^metadata_csum", "-b", "4096", self._bytes], check=True, env=ENVIRONMENT
        )
        self.is_formatted = True

    @contextmanager
    def _plugged(self) -> Iterator[Plugged]:
        self._cache = VolatileCache(self._bytes, forgetful=self._forgets)
        address = self.directory / "disk.socket"
        with VolatileDisk(self._cache, address) as self._disk:
            backend = f"driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={address}"
            yield Plugged(self.directory / "no-memory", backend)

    @property
    def requests(self) -> int:
        return self._cache.counts["writes"] + self._cache.counts["flushes"]

    def forget_from_now_on(self) -> None:
        self._cache.forgetful = True

    def arm(self, share: float, span: Span, *, alone: bool = False) -> str:
        requests = int(share * span.requests)
        self._disk.stop_after(requests, alone=alone)
        return f"{requests} requests"

    def is_due(self) -> bool:
        return self._disk.has_stopped

    def lose(self, chance: random.Random) -> str:
        self._cache.cut(chance)
        self._cache.close()
        counts = self._cache.counts
        return (
            f"; {counts['writes']} writes and {counts['flushes']} flushes, {counts['sectors in the cache']} sectors in "
            f"the cache, {counts['lost']} of them lost"
        )


class Apart(Medium):
    """Rows at home on the CXL device, their log on the disk. Each cut takes the power of both and of the machine, or,
    by turns, of the log's device alone, while the machine goes on: what the guest says then is that a medium failed.
    Forgetful: the disk is."""

    name = "apart"

    def __init__(self, directory: Path, *, forgetful: bool = False) -> None:
        super().__init__(directory, forgetful=forgetful)
        for part in ("home", "log"):
            (directory / part).mkdir(exist_ok=True)
        self._home = CxlMemory(directory / "home")
        self._log = Disk(directory / "log", forgetful=forgetful)
        self._is_alone = False

    @contextmanager
    def _plugged(self) -> Iterator[Plugged]:
        with ExitStack() as both:
            home = both.enter_context(self._home.plugged())
            log = both.enter_context(self._log.plugged())
            yield Plugged(home.cxl_memory, log.disk)

    @property
    def requests(self) -> int:
        return self._log.requests

    def keep_copy(self) -> None:
        self._home.keep_copy()
        self._log.keep_copy()

    def forget_from_now_on(self) -> None:
        self._log.forget_from_now_on()

    def arm(self, share: float, span: Span) -> str:
        self._is_alone = not self._is_alone
        of_log = Span(span.seconds, span.requests // 3)  # a record and its sync, where a disk has home as well
        return self._log.arm(share, of_log, alone=self._is_alone) + (" of the log's device, alone" * self._is_alone)

    @property
    def may_fail(self) -> bool:
        return self._is_alone and self._log.is_due()

    def is_due(self) -> bool:
        return not self._is_alone and self._log.is_due()

    def lose(self, chance: random.Random) -> str:
        return self._log.lose(chance)
