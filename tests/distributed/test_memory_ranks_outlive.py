"""Memory ranks that run by themselves: trainers die, restart and change number, and every run ends with the digest of
one that nothing befell, while the memory ranks' processes and parts of the pool stay."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from group_runs import SRC, Act, Life, Ranks, digest
from holdfast.admin.digest import digest_pool
from holdfast.pools.read_only import at_rest

pytestmark = pytest.mark.dear

STORES: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory", "dense_interval": 3},
    "block": {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3},
}
PATIENCE_SECONDS = 60.0


class Server:
    """A memory rank's process, as the command line starts it."""

    def __init__(self, directory: Path, number: int = 1, memory_ranks: int = 1, port: int = 0) -> None:
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        self._log = tempfile.NamedTemporaryFile("w+", prefix="holdfast-serve-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", str(directory), "--listen", f"127.0.0.1:{port}"]
            + ["--memory-rank", f"{number}/{memory_ranks}"],
            stdout=self._log,
            stderr=self._log,
            env={**kept, **one, "PYTHONPATH": str(SRC)},
        )
        self.pid = self._process.pid
        self.address = re.search(r"at (\S+)$", self.await_line("memory rank .* at "))[1]  # type: ignore[index]

    @property
    def lines(self) -> list[str]:
        return Path(self._log.name).read_text().splitlines()

    def await_line(self, pattern: str, *, nth: int = 1) -> str:
        """The `nth` line that it says like that."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = [line for line in self.lines if re.match(pattern, line)]
            if len(found) >= nth:
                return found[nth - 1]
            assert self._process.poll() is None, self.lines
            assert time.monotonic() < until, self.lines
            time.sleep(0.05)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send(number)
        return self._process.wait(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def serving(directory: Path, memory_ranks: int = 1) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = []
        for number in range(1, memory_ranks + 1):
            servers.append(Server(directory, number, memory_ranks))
            stack.callback(servers[-1].close)
        yield servers


def train(
    ranks: Ranks,
    directory: Path,
    servers: list[Server],
    trainers: int,
    options: Mapping[str, Any],
    *,
    loop: str = "train",
    **how: Any,
) -> Life:
    at = [server.address for server in servers]
    options = {"timeout": 10.0, **options, "memory_ranks_at": at}
    return ranks.run(directory, options, trainers, loop=loop, grace=0.2, **how)


def undisturbed(ranks: Ranks, directory: Path, options: Mapping[str, Any], trainers: int, memory_ranks: int) -> str:
    """Of ranks that are started together."""
    life = ranks.run(directory, options, trainers + memory_ranks, memory_ranks=memory_ranks, loop="train")
    assert life.ended_well, life.errors()
    return digest(directory)


def rows_of(directory: Path) -> Any:
    """A digest of each table."""
    with at_rest(directory) as (reader, _):
        return digest_pool(reader).tables


def ends_as(expected: str, servers: list[Server], directory: Path) -> None:
    assert [server.stop() for server in servers] == [128 + signal.SIGTERM] * len(servers)
    assert digest(directory) == expected


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("trainers", [1, 2])
def test_trainers_that_attach_to_memory_ranks_train_the_bits_of_ranks_that_are_started_together(
    trainers: int, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = STORES[store]
    expected = undisturbed(ranks, pool_root / "together", options, trainers, 2)
    with serving(pool_root / "apart", 2) as servers:
        life = train(ranks, pool_root / "apart", servers, trainers, options)
        assert life.ended_well, life.errors()
        ends_as(expected, servers, pool_root / "apart")


def kill_of(draw: random.Random, trainers: int) -> dict[str, Any]:
    """Where and when one of the trainers, or all of them, are killed."""
    victims = draw.sample(range(trainers), draw.randint(1, trainers))
    place = draw.choice(["collective", "collective", "commit", "dense", "note", "settle", "recovery"])
    nth = draw.randint(1, 120) if place == "collective" else draw.randint(1, 8 if place == "commit" else 2)
    return {"acts": {victim: Act(at=place, nth=nth, after=draw.random() < 0.5) for victim in victims}}


def kill_of(draw: random.Random, trainers: int) -> dict[str, Any]:
    """Where and when one of the trainers, or all of them, are killed."""
    victims = draw.sample(range(trainers), draw.randint(1, trainers))
    place = draw.choice(["collective", "collective", "commit", "dense", "note", "settle", "recovery"])
    nth = draw.randint(1, 120) if place == "collective" else draw.randint(1, 8 if place == "commit" else 2)
    return {"acts": {victim: Act(at=place, nth=nth, after=draw.random() < 0.5) for victim in victims}}


@pytest.mark.parametrize(("trainers", "memory_ranks"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("store", STORES)
def test_trainers_that_are_killed_and_attach_again_end_as_ones_that_never_were(
    store: str, trainers: int, memory_ranks: int, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "steps": 12}
    draw = random.Random(f"{store} {trainers} {memory_ranks}")
    expected = undisturbed(ranks, pool_root / "together", options, trainers, memory_ranks)
    directory = pool_root / "apart"
    with serving(directory, memory_ranks) as servers:
        durable = 0
        for _ in range(4):
            life = train(ranks, directory, servers, trainers, options, **kill_of(draw, trainers))
            assert all(server.is_there for server in servers), [server.lines for server in servers]
            assert life.opened is None or life.opened >= durable
            durable = max(durable, life.durable)
        life = train(ranks, directory, servers, trainers, options)
        assert life.ended_well, life.errors()
        ends_as(expected, servers, directory)


@pytest.mark.parametrize("store", STORES)
def test_the_number_of_trainers_may_change_whenever_they_attach(store: str, ranks: Ranks, pool_root: Path) -> None:
    """With rows of which any number of trainers makes the same, they are."""
    options = {**STORES[store], "steps": 12}
    directory = pool_root / "apart"
    draw = random.Random(store)
    life = ranks.run(pool_root / "together", options, 2, memory_ranks=1, loop="rows_alone")
    assert life.ended_well, life.errors()
    with serving(directory) as servers:
        for trainers in (1, 2, 1, 2):
            train(ranks, directory, servers, trainers, options, loop="rows_alone", **kill_of(draw, trainers))
        life = train(ranks, directory, servers, 1, options, loop="rows_alone")
        assert life.ended_well, life.errors()
        servers[0].stop()
    assert rows_of(directory) == rows_of(pool_root / "together")
