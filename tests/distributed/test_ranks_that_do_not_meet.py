"""What keeps ranks from finding each other is said by name, soon, and whatever signal comes meanwhile is heard."""

from __future__ import annotations

import json
import math
import queue
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from held_port import held_port
from torch._C._distributed_c10d import HashStore, TCPStore

from group_runs import small
from holdfast.cli.groups import open_in_group
from holdfast.cli.stop_signals import StopSignals
from holdfast.errors import ConfigError, GroupError
from holdfast.files.config import read_value
from holdfast.group import attaching, meeting
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions
from holdfast.group.outliving import MemoryRank
from holdfast.run.sections import RunConfig

_LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("RANK", "x", r"RANK = 'x': it must be a number from 0 to 1, with WORLD_SIZE = 2"),
        ("RANK", "2", r"RANK = '2': it must be a number from 0 to 1, with WORLD_SIZE = 2"),
        ("RANK", "-1", r"RANK = '-1': it must be a number from 0 to 1"),
        ("WORLD_SIZE", "0", r"WORLD_SIZE = '0': it must be a number from 1$"),
        ("MASTER_PORT", "99999", r"MASTER_PORT = '99999': it must be a number from 1 to 65535"),
        ("MASTER_PORT", "tcp", r"MASTER_PORT = 'tcp': it must be a number from 1 to 65535"),
        ("MASTER_PORT", "0", r"MASTER_PORT = '0': it must be a number from 1 to 65535"),
    ],
)
def test_a_variable_of_a_launcher_that_cannot_be_is_named(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, usual in (_LAUNCHED | {variable: value}).items():
        monkeypatch.setenv(name, value if name == variable else usual)
    with pytest.raises(ConfigError, match=said):
        meeting.meet(timeout=1.0)


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_a_launcher_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in _LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"RANK is set, and {missing} not: start the processes with torchrun"):
        Group.from_environment(GroupOptions())


def test_rank_0_does_not_ask_for_a_name_without_an_address_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in (_LAUNCHED | {"MASTER_ADDR": "no-such-host.invalid"}).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"rank 0 cannot listen at MASTER_ADDR = no-such-host\.invalid"):
        meeting.meet(timeout=60.0)
    assert time.monotonic() - began < 60.0


def test_ranks_that_are_told_different_numbers_of_ranks_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_last_taken", {})
    store = HashStore()
    ours = meeting.of_this_group(store, 0, 2, timeout=60.0)
    meeting._last_taken.clear()  # as of another process
    said = r"rank 1 has WORLD_SIZE = 3, rank 0 has 2: make them the same"
    with pytest.raises(ConfigError, match=said):
        meeting.of_this_group(store, 1, 3, timeout=60.0)
    with pytest.raises(ConfigError, match=said):
        meeting.await_others(ours, 0, 2, timeout=60.0)


def test_two_processes_that_are_one_rank_end_the_group_by_name() -> None:
    ours = HashStore()
    with pytest.raises(GroupError, match="waited 0 s for ranks 0, 2 to be there"):
        meeting.await_others(ours, 1, 3, timeout=0.0)
    for rank in (1, 2):
        with pytest.raises(ConfigError, match="two processes have RANK = 1: give each of the 3 a number of its own"):
            meeting.await_others(ours, rank, 3, timeout=60.0)


def test_trainers_that_wait_for_memory_ranks_hear_a_signal_and_do_not_say_that_they_waited() -> None:
    with pytest.raises(GroupError, match="stopped while rank 0 looked for the memory ranks"):
        attaching._hear(HashStore(), timeout=60.0, stopping=lambda: True)
    nobody = ("127.0.0.1", 1)
    said = {"memory_rank": 1, "memory_ranks": 1, "timeout": 60.0}
    with pytest.raises(GroupError, match=r"stopped while waiting for memory rank 1 of 1 at 127\.0\.0\.1:1"):
        attaching._knock_until(nobody, said, time.monotonic() + 60.0, stopping=lambda: True)


_HELLO = {"store": ("a", 1), "prefix": "", "memory_rank": 1, "memory_ranks": 1, "trainers": 1, "timeout": 9.0}


@pytest.mark.parametrize(
    "said",
    ["null", "1", "[]", '"store"']
    + [
        json.dumps(_HELLO | wrong)
        for wrong in ({"store": ("a", math.inf)}, {"trainers": 1.5}, {"timeout": math.inf}, {"timeout": 1e300})
    ],
)
def test_what_is_no_greeting_of_trainers_is_refused_as_such_by_a_memory_rank(said: str) -> None:
    assert attaching.Hello.parse(json.dumps(_HELLO).encode()).trainers == 1
    with pytest.raises((ValueError, TypeError)):  # as the door expects of strangers
        attaching.Hello.parse(said.encode())


def test_a_timeout_beyond_what_sockets_and_stores_can_count_is_refused_by_name() -> None:
    for timeout in (math.inf, 1e10):
        with pytest.raises(ConfigError, match=r"group\.timeout = .*; it must be 1,000,000 seconds at most"):
            GroupOptions(timeout=timeout)


@pytest.mark.parametrize(("rank", "waits_for"), [("0", "all ranks to be there"), ("1", "the group's store")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_stopped_before_the_others_come_ends_with_the_status_of_a_signal(
    number: signal.Signals,
    rank: str,
    waits_for: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, stop = read_value(RunConfig, small(group={"timeout": 60.0}), "config"), StopSignals()
    stop.number = number
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with held_port() as port:
        for name, value in (_LAUNCHED | {"RANK": rank, "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(typer.Exit) as ended:
            open_in_group(config, tmp_path / "pool", stop, 0, [], recovery="exact", trust_after_reboot=False)
    assert ended.value.exit_code == 128 + number
    assert re.search(f"rank {rank} waited for {waits_for}.*: stopped", capsys.readouterr().err)
    assert not (tmp_path / "pool").exists()


def test_a_trainer_whose_rank_0_died_while_it_knocked_gives_up_soon_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attaching, "_HEARING_SECONDS", 0.0)
    with pytest.raises(GroupError, match=r"waited 0\.1 s for rank 0 to find the memory ranks: it died or was stopped"):
        attaching._hear(HashStore(), timeout=0.1, stopping=lambda: False)


@pytest.mark.parametrize("said", [b"1\n", b"HTTP/1.1 400 Bad Request\r\n"])
def test_trainers_that_come_to_another_service_than_a_memory_rank_say_so(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service, ThreadPoolExecutor() as threads:
        greeted = threads.submit(lambda: service.accept()[0].sendall(said))
        hello = {"memory_rank": 1, "memory_ranks": 1, "timeout": 0.0}
        with pytest.raises(GroupError, match=r"memory rank 1 of 1 at .*: what answers there is no memory rank; start"):
            attaching._knock_until(service.getsockname(), hello, time.monotonic(), stopping=lambda: False)
        greeted.result()


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no-such-host.invalid"])
def test_a_memory_rank_that_cannot_listen_where_it_is_told_names_that_address(host: str, tmp_path: Path) -> None:
    with held_port() as port, attaching.listen_on("127.0.0.1", port):
        at = f"{host}:{port}"
        with pytest.raises(ConfigError, match=rf"cannot listen at {re.escape(at)}: \w+.*a port that is free"):
            MemoryRank(tmp_path, number=1, memory_ranks=1, address=at, stopping=lambda: True, say=lambda line: None)


def test_trainers_that_left_the_door_do_not_keep_others_out(tmp_path: Path) -> None:
    patience = 30.0
    words = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket() as taken, ThreadPoolExecutor() as threads:
        taken.bind(("127.0.0.1", 0))  # and not listening: as where rank 0 died
        stop, said = threading.Event(), queue.Queue[str]()
        rank = MemoryRank(tmp_path, number=1, memory_ranks=1, address="127.0.0.1:0", stopping=stop.is_set, say=said.put)
        serving = threads.submit(rank.run)
        try:
            at = "127.0.0.1", int(said.get().rpartition(":")[2])
            hello = attaching.Hello(
                memory_rank=1,
                memory_ranks=1,
                trainers=1,
                store=taken.getsockname(),
                prefix="ours",
                timeout=4 * patience,
                holdfast=version("holdfast"),
                torch=torch.__version__,
            )
            with socket.create_connection(at) as leaving:
                leaving.sendall(json.dumps(asdict(hello)).encode() + b"\n")
            others = asdict(hello) | {"store": ("127.0.0.1", words.port)}
            deadline = time.monotonic() + patience
            with attaching._knock_until(at, others, deadline, stopping=lambda: False):
                assert time.monotonic() < deadline
        finally:
            stop.set()
        serving.result()
