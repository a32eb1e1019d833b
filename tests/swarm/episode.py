"""Plays an episode: forks its lives, one after the other, kills them, and judges what each next one finds.

What is known between lives: floor, the newest step that was called durable, and ceiling, the newest that was committed.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from draw import BIG, Episode, Life
from episode_verbs import Verb, wait_for
from holdfast import _core
from holdfast.errors import UntrustedPool
from holdfast.pools.directory import exists
from life import LifeOf, Progress, Wrong
from model import Model

HUNG_SECONDS = 60.0
_WRONG, _ERROR = 3, 4
LAST = Life(
    until=1 << 30,
    end="close",
    kill=None,
    fault=None,
    slow_us=0,
    refuse_rings=False,
    threads=1,
    window=0,
    scratchpad_bytes=BIG,
    victim_bytes=0,
    dense_interval=1,
    recovery="exact",
    capture_ahead=False,
    split_early=False,
    flush_every=0,
    beside=(),
    then=("verify", "inspect", "digest"),
)


class Failed(Exception):
    """An episode that broke a promise; says which, and where."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A forked process: a signal, or an exit status, and what it said."""

    signal: int
    exit: int
    said: str


@dataclass
class Forked:
    pid: int
    file: Path
    what: str

    def wait(self, seconds: float = HUNG_SECONDS) -> Ended:
        end = time.monotonic() + seconds
        pause = 0.0002
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                raise Failed(f"{self.what} hung\n{self._stacks()}")
            time.sleep(pause)
            pause = min(0.005, pause * 1.2)
        said = self.file.read_text() if self.file.exists() else ""
        return Ended(
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            exit=os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
            said=said,
        )

    def _stacks(self) -> str:
        """Of all its threads; it is killed."""
        found = ""
        if (gdb := shutil.which("gdb")) is not None:
            line = [gdb, "-p", str(self.pid), "-batch", "-ex", "thread apply all bt 20"]
            found = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60).stdout
        os.kill(self.pid, signal.SIGUSR1)  # Python's own, into its file
        time.sleep(0.5)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return f"{found}\n{self.file.read_text()}"


def fork(work: Callable[[], str | None], file: Path, what: str) -> Forked:
    file.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return Forked(pid, file, what)
    status = 1
    try:
        with file.open("w", buffering=1) as out:
            warnings.simplefilter("ignore")
            faulthandler.enable(out)
            faulthandler.register(signal.SIGUSR1, out, all_threads=True)
            try:
                out.write(work() or "")
                status = 0
            except Wrong as error:
                out.write(f"{error}")
                status = _WRONG
            except BaseException:
                out.write(traceback.format_exc())
                status = _ERROR
    finally:
        os._exit(status)


@dataclass
class Story:
    """What became of an episode, one word a life or verb."""

    words: list[str] = field(default_factory=list)


class Player:
    """An episode over a pool in `root`, which is empty."""

    def __init__(self, episode: Episode, root: Path) -> None:
        self.episode = episode
        self.model = Model(episode.run)
        self.root = root
        self.pool = root / "pool"
        self.scratch = root / "scratch"
        self.scratch.mkdir(parents=True)
        self.floor = self.ceiling = 0
        self.may_distrust = self.trusts = self.may_mix = False
        self.exact_touched = True
        self.story = Story()
        self._numbers = 0

    def play(self) -> Story:
        for life in (*self.episode.lives, replace(LAST, until=self.episode.run.steps)):
            self._live(life)
            self._look(life.then)
        return self.story

    def _live(self, life: Life) -> None:
        progress = Progress()
        beside = [self._beside(name, step, life, progress) for name, step in life.beside]
        of = LifeOf(
            self.episode,
            life,
            self.pool,
            self.model,
            progress,
            floor=self.floor,
            ceiling=self.ceiling,
            trusts=self.trusts,
            may_mix=self.may_mix,
            may_distrust=self.may_distrust,
            exact_touched=self.exact_touched,
        )
        what = f"life {sum(word.startswith('life') for word in self.story.words)}"
        forked = fork(of.lead, self._file(), what)
        if life.kill is not None and life.kill.how == "time":
            time.sleep(life.kill.nth / 1e6)
            os.kill(forked.pid, signal.SIGKILL)
        ended = forked.wait()
        progress.ended = 1
        self.story.words.append(self._judge(what, life, ended, progress))
        for forked_verb in beside:
            self._hear(forked_verb)
        if progress.opened:
            if progress.dense_step != progress.step:
                self.model.put_back(progress.step, progress.dense_step)
            self.floor = max(progress.step, progress.durable)
            self.ceiling = max(progress.step, progress.attempted)
            self.may_distrust = self.trusts = self.may_mix = False
        else:
            self.may_mix = self.may_mix or life.recovery == "relaxed"
        if life.fault is not None and life.fault.is_sync:
            self.may_distrust = True

    def _judge(self, what: str, life: Life, ended: Ended, progress: Progress) -> str:
        """In words, for the count."""
        if ended.signal == signal.SIGKILL and life.kill is not None and life.kill.how != "term":
            where = "opening" if not progress.opened else "training" if progress.attempted < life.until else "its end"
            return f"life killed by {life.kill.how} in {where}"
        if ended.signal or ended.exit:
            raise Failed(f"{what}: signal {ended.signal}, exit {ended.exit}: {ended.said}")
        if ended.said == "UntrustedPool":
            self.trusts = True
        return f"life {ended.said or 'left by exit'}" + (" after a fault" if progress.struck else "")

    def _beside(self, name: str, step: int, life: Life, progress: Progress) -> Forked:
        def work() -> str:
            wait_for(progress, step)
            if not self._is_made() or (not progress.opened and life.recovery == "relaxed") or self.may_mix:
                return f"beside: {name} came too early"
            if progress.opened and progress.dense_step != progress.step:
                self.model.put_back(progress.step, progress.dense_step)
            floor = progress.durable if progress.opened else self.floor
            try:
                self._verb(step, floor, self.episode.run.steps).do(name)
            except UntrustedPool:
                if not self.may_distrust and (life.fault is None or not life.fault.is_sync):
                    raise
                return f"beside: {name} of a pool that is not trusted"
            return f"beside: {name}"

        return fork(work, self._file(), f"{name} beside a run")

    def _look(self, names: Sequence[str]) -> None:
        """All of the verbs, in one process."""
        if not names or self.may_distrust or self.may_mix or not self._is_made():
            return
        found = Progress()
        found.step = -1

        def work() -> str:
            floor, ceiling = self.floor, self.ceiling
            for number, name in enumerate(names):
                self.exact_touched = self.exact_touched and "restore" not in names[:number]
                step = self._verb(50 + number, floor, ceiling).do(name)
                if step is not None:
                    floor = ceiling = found.step = step
            return "\n".join(f"verb: {name}" for name in names)

        self._hear(fork(work, self._file(), f"{', '.join(names)} at rest"))
        self.exact_touched = self.exact_touched and "restore" not in names
        if found.step >= 0:
            self.floor = self.ceiling = found.step

    def _is_made(self) -> bool:
        """With all of its tables: a life may have died between two of its collections."""
        tables = sum(len(collection.tables) for collection in self.episode.run.collections)
        return exists(self.pool) and len(_core.Reader(str(self.pool)).tables) == tables

    def _hear(self, forked: Forked) -> None:
        ended = forked.wait()
        if ended.signal or ended.exit:
            raise Failed(f"{forked.what}: signal {ended.signal}, exit {ended.exit}: {ended.said}")
        self.story.words += ended.said.splitlines()

    def _verb(self, number: int, floor: int, ceiling: int) -> Verb:
        return Verb(
            run=self.episode.run,
            model=self.model,
            directory=self.pool,
            scratch=self.scratch,
            seed=self.episode.seed * 10_000 + self._numbers * 100 + number % 100,
            floor=floor,
            ceiling=ceiling,
            exact_touched=self.exact_touched,
            snapshots=sorted(path for path in self.scratch.glob("snapshot-*") if path.is_dir()),
        )

    def _file(self) -> Path:
        self._numbers += 1
        return self.root / f"said-{self._numbers}"


def play(episode: Episode, root: Path) -> Story:
    """Raises Failed."""
    root.mkdir(parents=True)
    try:
        return Player(episode, root).play()
    except Failed:
        raise
    except Exception:
        raise Failed(traceback.format_exc()) from None
    finally:
        shutil.rmtree(root, ignore_errors=True)
