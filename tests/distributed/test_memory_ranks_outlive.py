"""Memory ranks that run by themselves: trainers die, restart and change number, and every run ends with the digest of
one that nothing befell, while the memory ranks' processes and parts of the pool stay."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from pool_digests import digest_of_tables
from torch._C._distributed_c10d import TCPStore

from forked_commands import Commands
from group_runs import SRC, Act, Life, Ranks, digest, small
from holdfast import _core
from holdfast.group import manifest as manifests
from holdfast.group.attaching import GO, read_line, split_address
from holdfast.pools.read_only import at_rest
from test_group_addresses import address_of
from test_group_kill import CASES

pytestmark = pytest.mark.dear

STORES: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory", "dense_interval": 3},
    "block": {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3},
}
PATIENCE_SECONDS = 60.0


class Server:
    """A memory rank's process."""

    def __init__(
        self,
        commands: Commands,
        directory: Path,
        number: int = 1,
        memory_ranks: int = 1,
        port: int = 0,
        more: Sequence[str] = (),
    ) -> None:
        place = ("--listen", f"127.0.0.1:{port}", "--memory-rank", f"{number}/{memory_ranks}")
        self._process = commands.start("serve", directory, *place, *more)
        self.pid = self._process.pid
        self.address = re.search(r"at (\S+)$", self.await_line("memory rank .* at "))[1]  # type: ignore[index]

    @property
    def lines(self) -> list[str]:
        return self._process.log.read_text().splitlines()

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
    def parts(self) -> list[str]:
        """What became of its part of the pool, at each attachment."""
        return [line.partition("its part ")[2] for line in self.lines if "its part " in line]

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send(number)
        return self._process.wait(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._process.close()


class Serving(Protocol):
    """Memory ranks over the parts of a pool, for as long as a block lasts."""

    def __call__(self, directory: Path, memory_ranks: int = 1) -> AbstractContextManager[list[Server]]: ...


@pytest.fixture
def serving(commands: Commands) -> Serving:
    @contextmanager
    def serve(directory: Path, memory_ranks: int = 1) -> Iterator[list[Server]]:
        with ExitStack() as stack:
            servers = []
            for number in range(1, memory_ranks + 1):
                servers.append(Server(commands, directory, number, memory_ranks))
                stack.callback(servers[-1].close)
            yield servers

    return serve


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
    """A life of so many trainers. loop: "": options are a configuration."""
    at = [server.address for server in servers]
    options = {"timeout": 10.0, **options} if loop else options
    return ranks.run(directory, options, trainers, loop=loop, grace=0.2, memory_ranks_at=at, **how)


def undisturbed(ranks: Ranks, directory: Path, options: Mapping[str, Any], trainers: int, memory_ranks: int) -> str:
    """Of ranks that are started together."""
    life = ranks.run(directory, options, trainers + memory_ranks, memory_ranks=memory_ranks, loop="train")
    assert life.ended_well, life.errors()
    return digest(directory)


def check_that_it_ended_well(life: Life, servers: Sequence[Server]) -> None:
    said = "\n".join(line for server in servers for line in server.lines)
    assert life.ended_well, f"{life.errors()}; memory ranks said\n{said}"


def ends_as(expected: str, servers: list[Server], directory: Path) -> None:
    assert [server.stop() for server in servers] == [128 + signal.SIGTERM] * len(servers)
    assert digest(directory) == expected


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("trainers", [1, 2])
def test_trainers_that_attach_to_memory_ranks_train_the_bits_of_ranks_that_are_started_together(
    serving: Serving, trainers: int, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = STORES[store]
    expected = undisturbed(ranks, pool_root / "together", options, trainers, 2)
    with serving(pool_root / "apart", 2) as servers:
        life = train(ranks, pool_root / "apart", servers, trainers, options)
        check_that_it_ended_well(life, servers)
        ends_as(expected, servers, pool_root / "apart")


def kill_of(draw: random.Random, trainers: int) -> dict[str, Any]:
    """Where and when one of the trainers, or all of them, are killed."""
    victims = draw.sample(range(trainers), draw.randint(1, trainers))
    place = draw.choice(["collective", "collective", "commit", "dense", "note", "settle", "recovery"])
    nth = draw.randint(1, 120) if place == "collective" else draw.randint(1, 8 if place == "commit" else 2)
    return {"acts": {victim: Act(at=place, nth=nth, after=draw.random() < 0.5) for victim in victims}}


@pytest.mark.parametrize(("trainers", "memory_ranks"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("store", STORES)
def test_trainers_that_are_killed_and_attach_again_end_as_ones_that_never_were(
    serving: Serving, store: str, trainers: int, memory_ranks: int, ranks: Ranks, pool_root: Path
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
        check_that_it_ended_well(life, servers)
        ends_as(expected, servers, directory)
        for server in servers:
            assert server.parts[0].startswith("was opened")
            assert all(part.startswith("stayed open") for part in server.parts[1:]), server.parts
            assert len(server.parts) > 1


MEETING = [Act(at="group"), *(Act(at="collective", nth=nth) for nth in range(1, 13))]


def test_trainers_that_die_while_ranks_meet_leave_memory_ranks_that_others_find(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    options = STORES["memory"]
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    directory = pool_root / "apart"
    with serving(directory) as servers:
        for act in MEETING:
            life = train(ranks, directory, servers, 1, options, acts={0: act})
            assert life.struck == {0}
            assert life.opened is None
        life = train(ranks, directory, servers, 1, options)
        check_that_it_ended_well(life, servers)
        ends_as(expected, servers, directory)


@pytest.mark.parametrize("store", STORES)
def test_trainers_that_lost_all_of_their_storage_go_on_with_the_same_bits(
    serving: Serving, store: str, ranks: Ranks, pool_root: Path
) -> None:
    """Rows and dense states are all the memory rank's."""
    options = {**STORES[store], "steps": 12}
    draw = random.Random(f"{store}, storage lost")
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    directory = pool_root / "apart"
    with serving(directory) as servers:
        for number, kill in enumerate([{"acts": {0: Act(at="commit", nth=7)}}, kill_of(draw, 1), kill_of(draw, 1), {}]):
            own = pool_root / f"machine-{number}"
            life = train(ranks, own, servers, 1, options, **kill)
            assert {path.name for path in own.iterdir()} <= {"group.json", "lock"}
        check_that_it_ended_well(life, servers)
        ends_as(expected, servers, directory)


@pytest.mark.parametrize("store", STORES)
def test_a_copy_in_the_place_of_the_pool_that_a_memory_rank_has_open_is_what_the_next_trainers_train(
    serving: Serving, store: str, ranks: Ranks, pool_root: Path
) -> None:
    """Rows went to the files that had been moved away, dense states to the copy: neither could be opened again."""
    options = {**STORES[store], "steps": 12}
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    directory, own, moved, before = (pool_root / name for name in ("apart", "trainer", "moved", "before"))
    with serving(directory) as servers:
        check_that_it_ended_well(train(ranks, own, servers, 1, {**options, "steps": 6}), servers)
        shutil.copytree(directory, before, symlinks=True)
        directory.rename(moved)
        shutil.copytree(before, directory, symlinks=True)
        check_that_it_ended_well(train(ranks, own, servers, 1, options), servers)
        assert servers[0].parts[-1].startswith("was opened at step 6")
        ends_as(expected, servers, directory)
    assert digest(moved) == digest(before)


def test_a_new_pool_keeps_rows_as_the_storage_of_the_memory_rank_wants(
    serving: Serving, ranks: Ranks, pool_root: Path, tmp_path: Path
) -> None:
    with serving(pool_root / "apart") as servers:
        life = train(ranks, tmp_path / "trainer", servers, 1, {"steps": 3})
        check_that_it_ended_well(life, servers)
    store = "log" if _core.is_block_medium(str(pool_root)) else "in_place"
    assert manifests.read(pool_root / "apart").store == store


@pytest.mark.parametrize("store", STORES)
def test_the_number_of_trainers_may_change_whenever_they_attach(
    serving: Serving, store: str, ranks: Ranks, pool_root: Path
) -> None:
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
        check_that_it_ended_well(life, servers)
        servers[0].stop()
    assert digest_of_tables(directory) == digest_of_tables(pool_root / "together")


@pytest.mark.parametrize("store", STORES)
def test_rows_that_are_ahead_of_the_dense_state_go_back_in_the_living_process(
    serving: Serving, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "log_bytes": 1 << 20, "dense_interval": 4, "steps": 11}
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    directory = pool_root / "apart"
    with serving(directory) as servers:
        for nth in (7, 3):
            train(ranks, directory, servers, 1, options, acts={0: Act(at="commit", nth=nth, after=True)})
        life = train(ranks, directory, servers, 1, options)
        check_that_it_ended_well(life, servers)
        assert life.opened is not None
        ends_as(expected, servers, directory)
        assert sum("steps and" in part for part in servers[0].parts) == 2, servers[0].parts


def test_a_memory_rank_that_is_killed_ends_its_trainers_and_both_start_again(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES["block"], "steps": 12, "timeout": 5.0}
    expected = undisturbed(ranks, pool_root / "together", options, 2, 1)
    directory = pool_root / "apart"
    with serving(directory) as servers:
        victim = servers[0]
        with ThreadPoolExecutor(1) as beside:
            waits = beside.submit(
                train, ranks, directory, servers, 2, options, acts={0: Act(at="commit", nth=6, do="wait")}
            )
            ranks.await_waiting(waits)
            victim.stop(signal.SIGKILL)
            ranks.go_on.touch()
            life = waits.result()
        assert {rank.error for rank in life.ranks} == {"GroupError"}, life.errors()
    with serving(directory) as servers:
        life = train(ranks, directory, servers, 2, options)
        check_that_it_ended_well(life, servers)
        ends_as(expected, servers, directory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_memory_rank_that_waits_stops_at_a_signal_and_closes_its_part_cleanly(
    serving: Serving, number: int, ranks: Ranks, pool_root: Path
) -> None:
    with serving(pool_root / "apart") as servers:
        assert train(ranks, pool_root / "apart", servers, 1, STORES["memory"]).ended_well
        assert servers[0].stop(number) == 128 + number
    with at_rest(pool_root / "apart") as (_, recovery):
        assert recovery is None or recovery.clean


def test_a_memory_rank_that_serves_lets_trainers_finish_their_step_at_a_signal(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    config = small(train={"steps": 40}, pool={"medium": "block", "log_bytes": 60 << 10, "scratchpad_bytes": 200_000})
    directory = pool_root / "apart"
    together = ranks.run(pool_root / "together", config, 2, memory_ranks=1)
    assert together.ended_well, together.errors()
    with serving(directory) as servers:
        with ThreadPoolExecutor(1) as beside:
            waits = beside.submit(
                train, ranks, directory, servers, 1, config, loop="", acts={0: Act(at="commit", nth=6, do="wait")}
            )
            ranks.await_waiting(waits)
            servers[0].send(signal.SIGTERM)
            time.sleep(0.3)
            ranks.go_on.touch()
            life = waits.result()
        check_that_it_ended_well(life, servers)
        assert life.ranks[0].all_said("stopped") == [True]
        assert servers[0].stop() == 128 + signal.SIGTERM
    with serving(directory) as servers:
        life = train(ranks, directory, servers, 1, config, loop="")
        check_that_it_ended_well(life, servers)
        assert life.opened is not None
        assert 6 <= life.opened < 40
        ends_as(digest(pool_root / "together"), servers, directory)


def test_trainers_with_other_tables_are_refused_and_the_memory_rank_serves_on(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    directory = pool_root / "apart"
    options = {**STORES["memory"], "steps": 12}
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    with serving(directory) as servers:
        assert train(ranks, directory, servers, 1, {**options, "steps": 5}).ended_well
        life = train(ranks, directory, servers, 2, options, loop="rows_alone")
        assert {rank.error for rank in life.ranks} == {"ConfigError"}, life.errors()
        assert train(ranks, directory, servers, 1, options).ended_well
        assert len(servers[0].parts) == 2
        assert servers[0].parts[1].startswith("stayed open")
        ends_as(expected, servers, directory)


def test_a_second_set_of_trainers_is_refused_while_one_is_attached(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES["memory"], "steps": 12}
    expected = undisturbed(ranks, pool_root / "together", options, 1, 1)
    directory = pool_root / "apart"
    patient = {**options, "timeout": 60.0}  # until the others have started, and were refused
    with serving(directory) as servers, Ranks() as others, ThreadPoolExecutor(1) as beside:
        waits = beside.submit(
            train, ranks, directory, servers, 1, patient, acts={0: Act(at="commit", nth=6, do="wait")}
        )
        ranks.await_waiting(waits)
        second = train(others, pool_root / "elsewhere", servers, 2, {**options, "timeout": 1.0})
        assert {rank.error for rank in second.ranks} == {"PoolBusy"}, second.errors()
        ranks.go_on.touch()
        assert waits.result().ended_well, waits.result().errors()
        assert not (pool_root / "elsewhere").exists()
        ends_as(expected, servers, directory)


def test_memory_ranks_that_are_named_in_another_order_are_refused(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    with serving(pool_root / "apart", 2) as servers:
        life = train(ranks, pool_root / "apart", servers[::-1], 2, STORES["memory"])
        assert {rank.error for rank in life.ranks} == {"ConfigError"}, life.errors()
        assert all("in their order" in rank.message for rank in life.ranks)
        assert train(ranks, pool_root / "apart", servers, 2, STORES["memory"]).ended_well


def test_whoever_knocks_and_is_no_trainer_changes_nothing(serving: Serving, ranks: Ranks, pool_root: Path) -> None:
    with serving(pool_root / "apart") as servers:
        host, port = servers[0].address.split(":")
        for sent in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"null\n",
            b'{"store": 1}\n',
            b"[" * 60_000 + b"\n",
            b"x" * (1 << 17),
        ):
            with socket.create_connection((host, int(port))) as knocking, suppress(OSError):
                knocking.sendall(sent)
        assert train(ranks, pool_root / "apart", servers, 1, STORES["memory"]).ended_well


def test_a_memory_rank_that_waits_for_trainers_that_died_before_they_came_hears_a_signal(
    serving: Serving, pool_root: Path
) -> None:
    words = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: dict[str, Any] = {"memory_rank": 1, "memory_ranks": 1, "trainers": 1, "store": ("127.0.0.1", words.port)}
    said |= {"prefix": "ours", "timeout": PATIENCE_SECONDS, "holdfast": version("holdfast"), "torch": torch.__version__}
    with serving(pool_root / "apart") as servers:
        with socket.create_connection(split_address(servers[0].address, "it")) as door:
            door.sendall(json.dumps(said).encode() + b"\n")
            assert json.loads(read_line(door)) == {}
            door.sendall(GO)
            words.wait(["ours/here-1"], timedelta(seconds=PATIENCE_SECONDS))
        began = time.monotonic()
        assert servers[0].stop() == 128 + signal.SIGTERM
        assert time.monotonic() - began < PATIENCE_SECONDS / 4


@pytest.mark.parametrize("store", STORES)
def test_relaxed_recovery_keeps_the_newest_rows_of_memory_ranks_that_live_on(
    serving: Serving, store: str, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], "log_bytes": 1 << 20, "dense_interval": 4, "steps": 12}
    with serving(pool_root / "apart") as servers:
        train(ranks, pool_root / "apart", servers, 1, options, acts={0: Act(at="commit", nth=8)})
        life = train(ranks, pool_root / "apart", servers, 1, {**options, "recovery": "relaxed"})
        check_that_it_ended_well(life, servers)
        assert life.opened is not None
        assert 4 < life.opened <= 8  # the memory rank may have heard of the last commit
        assert train(ranks, pool_root / "apart", servers, 1, {**options, "steps": 14}).ended_well


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def test_what_an_attachment_that_failed_has_left_goes_with_time(
    serving: Serving, ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES["memory"], "steps": 100, "timeout": 2.0}
    with serving(pool_root / "apart") as servers:
        train(ranks, pool_root / "apart", servers, 1, {**options, "steps": 1})
        before = descriptors(servers[0])
        for _ in range(3):
            train(ranks, pool_root / "apart", servers, 2, options, acts={1: Act(at="commit", nth=2)})
        until = time.monotonic() + PATIENCE_SECONDS
        while descriptors(servers[0]) > before + 4:
            assert time.monotonic() < until, f"{descriptors(servers[0])} and not {before}"
            time.sleep(0.2)


def listening_addresses(pid: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    sockets = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(address_of(fields[1].partition(":")[0]))
    return found


def test_a_memory_rank_listens_at_its_address_and_nowhere_else(serving: Serving, ranks: Ranks, pool_root: Path) -> None:
    named = {ipaddress.ip_address("127.0.0.1")}
    with serving(pool_root / "apart") as servers, ThreadPoolExecutor(1) as beside:
        assert listening_addresses(servers[0].pid) == named
        waits = beside.submit(
            train, ranks, pool_root / "apart", servers, 1, STORES["memory"], acts={0: Act(at="commit", do="wait")}
        )
        ranks.await_waiting(waits)
        assert listening_addresses(servers[0].pid) == named
        ranks.go_on.touch()
        assert waits.result().ended_well


def test_the_command_line_trains_beside_memory_ranks(serving: Serving, pool_root: Path) -> None:
    config = pool_root / "run.toml"
    config.write_text(
        "[data.synthetic]\nnum_samples = 2000\nrows = [3000, 50]\nlookups = [2, 1]\n"
        "[embedding]\ndim = 4\n[model]\nbottom = [8, 4]\ntop = [8, 1]\n[train]\nbatch_size = 32\nsteps = 6\n"
        "[group]\nshards = 4\n[pool]\nmedium = 'memory'\n"
    )
    with serving(pool_root / "apart") as servers:
        command = [sys.executable, "-m", "holdfast", "train", str(config), "--pool", str(pool_root / "apart")]
        for steps, opening in ((6, "new pool"), (9, "closed cleanly at step 6")):
            config.write_text(re.sub("steps = .", f"steps = {steps}", config.read_text()))
            ended = subprocess.run(
                [*command, "--memory-ranks-at", servers[0].address],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SRC)},
                timeout=PATIENCE_SECONDS,
            )
            assert ended.returncode == 0, ended.stderr
            assert opening in ended.stdout + ended.stderr
            assert f"trained to step {steps}" in ended.stdout
        assert servers[0].stop() == 128 + signal.SIGTERM
    with at_rest(pool_root / "apart") as (reader, _):
        assert reader.commit["step"] == 9


CONFIGS = {
    name: CASES[name].config
    for name in (
        "captured_ahead_one_trainer_one_memory_rank",
        "relaxed_lookup_two_trainers_one_memory_rank",
        "log_store_keys_that_are_left_behind_two_trainers_two_memory_ranks",
        "keys_that_are_left_behind_three_ranks",
    )
}


@pytest.mark.parametrize("name", CONFIGS)
def test_runs_of_a_configuration_go_on_over_kills(serving: Serving, name: str, ranks: Ranks, pool_root: Path) -> None:
    config = CONFIGS[name]
    life = ranks.run(pool_root / "together", config, 3, memory_ranks=1)
    assert life.ended_well, life.errors()
    draw = random.Random(name)
    with serving(pool_root / "apart") as servers:
        for _ in range(4):
            train(ranks, pool_root / "apart", servers, 2, config, loop="", **kill_of(draw, 2))
        life = train(ranks, pool_root / "apart", servers, 2, config, loop="")
        check_that_it_ended_well(life, servers)
        assert all(part.startswith("stayed open") for part in servers[0].parts[1:]), servers[0].parts
        ends_as(digest(pool_root / "together"), servers, pool_root / "apart")


def test_a_memory_rank_that_runs_by_itself_has_its_log_where_it_is_told_on_its_machine(
    commands: Commands, ranks: Ranks, pool_root: Path
) -> None:
    logs = pool_root / "logs"
    logs.mkdir()
    expected = undisturbed(ranks, pool_root / "expected", STORES["block"], 1, 1)
    directory = pool_root / "apart"
    server = Server(commands, directory, more=["--log-directory", str(logs)])
    try:
        act = Act(at="commit", nth=4, after=False)
        train(ranks, directory, [server], 1, STORES["block"], acts={0: act})
        assert train(ranks, directory, [server], 1, STORES["block"]).ended_well
        assert server.stop() == 128 + signal.SIGTERM
    finally:
        server.close()
    assert digest(directory) == expected
    [log] = logs.glob("*.row-log")
    [link] = directory.glob("writers-*/*/row-log-0000")
    assert link.readlink() == log


WRONG_PLACES = {
    "a log's directory that is not there": ("log.directory = ", "--log-directory", "{root}/nowhere"),
    "a node that the machine does not have": ("scratchpad_nodes = ", "--scratchpad-node", "1000"),
    "victims where there is nothing": (
        "victims.directory = ", "--victim-bytes", "1048576", "--victim-directory", "{root}/nowhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_PLACES)
def test_what_a_memory_rank_lacks_is_said_before_any_trainer_comes(
    what: str, commands: Commands, pool_root: Path
) -> None:
    words, *options = WRONG_PLACES[what]
    served = commands.start(
        "serve", pool_root / "part", "--listen", "127.0.0.1:0", *(each.format(root=pool_root) for each in options)
    )
    assert served.wait(60.0) == 1
    assert served.log.read_text().startswith(f"holdfast: {words}")
    assert not (pool_root / "part").exists()


def test_a_memory_rank_whose_part_would_be_a_file_says_so_before_any_trainer_comes(
    commands: Commands, pool_root: Path
) -> None:
    (pool_root / "part").write_text("a list of things to do")
    served = commands.start("serve", pool_root / "part", "--listen", "127.0.0.1:0")
    assert served.wait(60.0) == 1
    assert "is there already, and is no directory" in served.log.read_text()
