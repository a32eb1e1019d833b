"""Drives the process that forks ranks: groups, what befalls them, and what they said."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fork_server import ForkServer
from held_port import held_port

from namespaces import Host

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
SIGKILL = 9
SLACK_SECONDS = 4.0  # of a machine that has other things to do


@dataclass(frozen=True, kw_only=True)
class Act:
    """What befalls one rank. Either `persist_point`: it is killed there; or `do` (kill, stop, term, wait, full: a
    PoolFull, spoil: its parameters) before or `after` the `nth` call at a place of rank_run.py. config, memory_ranks,
    version: what it believes instead of what the others do."""

    persist_point: int = 0
    at: str = ""
    nth: int = 1
    after: bool = False
    do: str = "kill"
    config: Mapping[str, Any] = field(default_factory=dict)
    memory_ranks: int | None = None
    version: str | None = None

    def to_json(self) -> dict[str, Any]:
        said = {"persist_point": self.persist_point, "config": dict(self.config)}
        if self.at:
            said |= {"at": self.at, "nth": self.nth, "after": self.after, "do": self.do}
        said |= {} if self.memory_ranks is None else {"memory_ranks": self.memory_ranks}
        return said | ({} if self.version is None else {"version": self.version})


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What became of a rank: exit status or signal, its error, when it ended (seconds since the start), all it said.
    struck: when a signal that it could not handle met it."""

    number: int
    exit: int | None
    signal: int | None
    ended: float
    struck: float | None
    error: str | None
    message: str
    said: list[dict[str, Any]]

    def all_said(self, what: str) -> list[Any]:
        return [saying[what] for saying in self.said if what in saying]

    @property
    def opened(self) -> int | None:
        """The step at which it went on; None where it did not come so far."""
        return next(iter(self.all_said("opened")), None)

    @property
    def closed(self) -> bool:
        return bool(self.all_said("closed"))

    @property
    def losses(self) -> list[float]:
        return self.all_said("loss")


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of a group."""

    ranks: list[Rank]

    @property
    def struck(self) -> set[int]:
        return {rank.number for rank in self.ranks if rank.struck is not None}

    @property
    def ended_well(self) -> bool:
        return all(rank.exit == 0 for rank in self.ranks)

    @property
    def durable(self) -> int:
        """The newest step that any rank was told is durable."""
        return max((step for rank in self.ranks for step in rank.all_said("durable")), default=0)

    @property
    def opened(self) -> int | None:
        return next((rank.opened for rank in self.ranks if rank.opened is not None), None)

    @property
    def evaluations(self) -> list[tuple[float, float]]:
        return list(zip(self.ranks[0].all_said("auc"), self.ranks[0].all_said("log_loss"), strict=True))

    def errors(self) -> dict[int, str]:
        """By rank, with kind and words."""
        return {rank.number: f"{rank.error}: {rank.message}" for rank in self.ranks if rank.error is not None}

    def check_that_the_others_ended(self, *, within: float, joining: float = 0.0) -> None:
        """All that were not struck ended by themselves, in time, each with an error that names one that was struck; or
        they were through. joining: seconds beyond, where they had not all found each other yet: gloo does not notice
        then that one is dead, and tries for as long as the group's timeout, more than once."""
        within += 0.0 if all(rank.all_said("joined") for rank in self.ranks) else joining
        first = min(rank.struck for rank in self.ranks if rank.struck is not None)
        for rank in self.ranks:
            if rank.struck is not None or rank.exit == 0:
                continue
            assert rank.error == "GroupError", f"rank {rank.number}: {rank.error}: {rank.message}"
            assert any(_names(rank.message, number) for number in self.struck), f"{self.struck}: {rank.message}"
            assert rank.ended - first < within + SLACK_SECONDS, f"rank {rank.number} took {rank.ended - first:.1f} s"


def _names(message: str, rank: int) -> bool:
    words = message.replace(",", " ").replace(":", " ").split()
    return str(rank) in words and ("rank" in words or "ranks" in words)


class Ranks:
    """A process that forks groups; see rank_forks.py."""

    def __init__(self) -> None:
        self._numbers = count()
        self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-ranks-", dir=pool_parent())
        self.go_on = Path(self._scratch.name) / "go-on"  # ranks that wait go on when this file is there
        environment = {
            **os.environ,
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "GLOO_SOCKET_IFNAME": "lo",
            "HOLDFAST_GO_ON": str(self.go_on),
            "PYTHONPATH": f"{SRC}{os.pathsep}{HERE}",
        }
        self._log = (Path(self._scratch.name) / "stderr").open("w+")
        self._server = ForkServer(HERE / "rank_forks.py", environment, self._log)

    def run(
        self,
        directory: Path,
        config: Mapping[str, Any],
        num_ranks: int,
        *,
        memory_ranks: int = 0,
        acts: Mapping[int, Act] | None = None,
        kill_after: Mapping[int, float] | None = None,
        grace: float | None = None,
        dropout: bool = False,
        hung_after: float = 40.0,
        plain: bool = False,
        hosts: Sequence[Host] = (),
        storages: Mapping[int, Path] | None = None,
        loop: str = "",
        memory_ranks_at: Sequence[str] = (),
    ) -> Life:
        """One life of a group, or with `plain` of one process without. kill_after: seconds from when all ranks have
        found each other, by rank. grace: how long a rank listens for who else is there, once something broke. hosts:
        where each rank runs, of a network. storages: the directories of ranks that have one of their own. loop: a
        function of own_loops.py, or MODULE:FUNCTION, which runs instead of a configuration's training; config has its
        options then. memory_ranks_at: addresses of memory ranks that run by themselves; all ranks train.
        Fails where a rank hangs, or ends by an error that is not holdfast's."""
        life = Path(self._scratch.name) / str(next(self._numbers))
        life.mkdir()
        request = {
            "directory": str(directory),
            "directories": {rank: str(path) for rank, path in (storages or {}).items()},
            "config": dict(config),
            "num_ranks": num_ranks,
            "memory_ranks": memory_ranks,
            "acts": {rank: act.to_json() for rank, act in (acts or {}).items()},
            "kill_after": dict(kill_after or {}),
            "grace": grace,
            "dropout": dropout,
            "hung_after": hung_after,
            "plain": plain,
            "loop": loop,
            "memory_ranks_at": list(memory_ranks_at),
            "hosts": [host.name for host in hosts],
            "master": hosts[0].address if hosts else "",
            "store": str(life / "store"),
            "sayings": str(life),
        }
        with held_port() as port:
            answer = self._server.ask({**request, "port": port})
        for left in (self.go_on, self.go_on.with_suffix(".waiting")):  # those of the next life wait anew
            left.unlink(missing_ok=True)
        ranks = [self._rank(fate, life) for fate in answer["fates"]]
        assert not answer["hung"], f"{request}: hung after {hung_after} s: {[vars(rank) for rank in ranks]}"
        for rank in ranks:
            for trace in rank.all_said("trace"):
                raise AssertionError(f"rank {rank.number} of {request}\n{trace}")
        return Life(ranks=ranks)

    def await_waiting(self, life: Future[Life]) -> None:
        """Until a rank of that life waits. Fails where none did."""
        while not self.go_on.with_suffix(".waiting").exists():
            assert not life.done(), f"ended before a rank waited: {life.result().errors()}"
            time.sleep(0.01)

    def _rank(self, fate: dict[str, Any], life: Path) -> Rank:
        file = life / f"rank-{fate['rank']}.jsonl"
        said = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        failed = next((saying for saying in said if "error" in saying), {})
        return Rank(
            number=fate["rank"],
            exit=fate["exit"],
            signal=fate["signal"],
            ended=fate["ended"],
            struck=fate["struck"],
            error=failed.get("error"),
            message=failed.get("message", ""),
            said=said,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._log.close()
        self._scratch.cleanup()


# Of loops of one's own (own_loops.py).

GROUPS = {"2 ranks": (2, 0), "2 trainers, 2 memory ranks": (4, 2), "3 ranks": (3, 0)}


def run(ranks: Ranks, directory: Path, options: Mapping[str, Any], group: str = "2 ranks", **how: Any) -> Life:
    num_ranks, memory_ranks = GROUPS[group]
    return ranks.run(directory, options, num_ranks, memory_ranks=memory_ranks, loop=how.pop("loop", "train"), **how)


def whole(ranks: Ranks, directory: Path, options: Mapping[str, Any], group: str = "2 ranks", **how: Any) -> str:
    """The digest after a life that nothing befell."""
    life = run(ranks, directory, options, group, **how)
    assert life.ended_well, life.errors()
    return digest(directory)


def pool_parent() -> Path:
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def digest(directory: Path) -> str:
    """Of a pool that is at rest, of a group or not."""
    from holdfast.admin.digest import digest_pool
    from holdfast.pools.read_only import at_rest

    with at_rest(directory) as (reader, _):
        return digest_pool(reader).whole


def small(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """A run of milliseconds a step, with a split table and whole ones; `sections` changes fields of its sections."""
    run: dict[str, dict[str, Any]] = {
        "data": {
            "synthetic": {"num_samples": 4000, "rows": [50, 7, 3000, 90], "lookups": [1, 3, 2, 2], "num_dense": 3}
        },
        "embedding": {"dim": 4, "optimizer": "rowwise_adagrad", "lr": 0.05},
        "model": {"bottom": [8, 4], "top": [8, 1]},
        "optimizer": {"name": "adam", "lr": 0.01},
        "train": {"batch_size": 24, "steps": 12},
        "group": {"shards": 8, "split_rows": 1000, "timeout": 5.0},
    }
    for name, fields in sections.items():
        run[name] = {**run.get(name, {}), **fields}
    return run


WHOLE = {"group": {"split_rows": 1 << 20}}
LOG_STORE = {"pool": {"medium": "block", "log_bytes": 60 << 10, "scratchpad_bytes": 200_000}}
