"""Ranks that cannot meet say why, and what to do."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from held_port import held_port
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from holdfast.errors import ConfigError, GroupError
from holdfast.group import group, meeting, notices
from holdfast.group.meeting import await_others, listen_on, meet, of_this_group, reach_store
from holdfast.group.notices import Notices
from holdfast.group.roles import Roles


def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        began = time.monotonic()
        with pytest.raises(GroupError, match=rf"127\.0\.0\.1:{port}, where somebody else does: set MASTER_PORT"):
            meet(30.0)
        assert time.monotonic() - began < 5


def test_rank_0_that_runs_elsewhere_than_the_address_says_is_told_which_variable_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobodys = "192.0.2.1"  # RFC 5737
    with held_port() as port:
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": nobodys, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(GroupError, match=rf"rank 0 cannot listen at {nobodys}:{port}: .*; MASTER_ADDR has to lead"):
            meet(1.0)


def test_a_launcher_that_names_no_address_is_told_which_variable_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="RANK is set, and MASTER_ADDR not: start the processes with torchrun"):
        meet(1.0)


@contextmanager
def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of two, whose rank 0 listens at the port that this gives, where nobody does yet."""
    with held_port() as port:
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        yield port


def test_the_port_that_ranks_of_a_test_meet_at_is_given_to_nobody_else() -> None:
    """Two tests side by side were given one, now and then: ranks of the second reached the first one's store."""
    with held_port() as port, socket.socket() as another:
        with pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", port))
        listen_on("127.0.0.1", port).close()


def test_a_rank_whose_rank_0_died_before_it_listened_waits_for_the_timeout_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with as_rank(1, monkeypatch) as port:
        began = time.monotonic()
        with pytest.raises(GroupError, match=rf"rank 1 waited for .*rank 0.*:{port} did not answer within 1 s"):
            meet(1.0)
        assert time.monotonic() - began < 2


def test_a_rank_that_is_asked_to_stop_waits_for_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with as_rank(1, monkeypatch), pytest.raises(GroupError, match="stopped"):
        meet(30.0, lambda: True)
    assert time.monotonic() - began < 5


def test_rank_0_names_the_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_rank(0, monkeypatch):
        met, rank, world_size = meet(30.0)
    with pytest.raises(GroupError, match=r"rank 0 waited 0\.2 s for rank 1 to be there"):
        await_others(of_this_group(met, rank, world_size, 1.0), rank, world_size, 0.2)


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_ranks_that_died_before_they_came() -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match="rank 0 waited for all ranks to be there: stopped"):
        await_others(HashStore(), 0, 2, 30.0, lambda: True)
    assert time.monotonic() - began < 5


def test_ranks_that_rank_0_leaves_alone_say_that_they_waited_for_it() -> None:
    store = HashStore()
    with pytest.raises(GroupError, match=r"rank 1 waited for rank 0 to open the pool: it did not within 0\.2 s"):
        of_this_group(store, 1, 2, 0.2)


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_rank_0() -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 waited for rank 0 to open the pool: stopped"):
        of_this_group(HashStore(), 1, 2, 30.0, lambda: True)
    assert time.monotonic() - began < 5


def test_a_rank_waits_for_rank_0_to_name_the_next_group_and_does_not_take_the_last_one_again() -> None:
    store = HashStore()
    of_this_group(store, 0, 2, 1.0).set("word", "of the first group")
    with pytest.raises(GroupError, match="rank 1 waited"):  # this process was in it, as rank 0
        of_this_group(store, 1, 2, 0.2)


def test_ranks_meet_whose_launchers_count_restarts_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun on two machines: where a rank died counts one, the other one, which only starts anew, none."""
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        waiting = threads.submit(of_this_group, store, 1, 2, 5.0)
        time.sleep(0.2)  # it has read that
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        of_this_group(store, 0, 2, 5.0).set("word", "of both")
        assert waiting.result().get("word") == b"of both"


def test_what_a_rank_0_named_that_was_killed_before_all_had_come_is_not_taken() -> None:
    store = HashStore()
    left = PrefixStore("holdfast", store)
    left.set("group", "of-the-dead-2")
    left.add("of-the-dead-2/beats", 7)
    with pytest.raises(GroupError, match=r"rank 1 waited for rank 0 to open the pool: it did not within 0\.3 s"):
        of_this_group(store, 1, 2, 0.3)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(of_this_group, store, 1, 2, 5.0)
        time.sleep(0.2)  # it has seen that name
        of_this_group(store, 0, 2, 5.0).set("word", "of the living")
        assert waiting.result().get("word") == b"of the living"


ALONE = """
import sys
import textwrap
from holdfast.errors import GroupError
from holdfast.group import meeting
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions

meeting._LOOK_SECONDS = 0.0  # it is asking the store whenever it is not told to end
try:
    Group.from_environment(GroupOptions(timeout=0.2))
except GroupError as error:
    print(error)
    sys.exit(7)
"""


def test_a_rank_0_to_which_nobody_comes_ends_with_a_status_of_its_own(is_sample: bool) -> None:
    """Its thread was in the store when the interpreter ended, one time in ten: SIGABRT."""
    for _ in range(1 if is_sample else 10):
        with held_port() as port:
            here = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            alone = subprocess.run(
                [sys.executable, "-c", ALONE], env=os.environ | here, capture_output=True, text=True, timeout=120
            )
        assert (alone.returncode, alone.stderr) == (7, "")
        assert "waited 0.2 s for rank 1 to be there" in alone.stdout


def test_what_a_group_left_in_a_store_is_not_the_next_one_s() -> None:
    store = HashStore()
    of_this_group(store, 0, 2, 1.0).set("word", "of the first group")
    assert not of_this_group(store, 0, 2, 1.0).check(["word"])


def test_a_process_that_comes_after_all_others_of_a_group_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    monkeypatch.setattr(meeting, "_last_taken", {})

    def as_another_process(rank: int) -> Store:
        meeting._last_taken.clear()
        return of_this_group(store, rank, 3, 0.2)

    first = as_another_process(0)
    for rank in (1, 2):
        as_another_process(rank).set(f"rank {rank}", "is there")
    assert first.check(["rank 1", "rank 2"])
    with pytest.raises(GroupError, match="rank 2 waited"):
        as_another_process(2)
    second = as_another_process(0)
    as_another_process(2).set("rank 2", "is there again")
    assert second.check(["rank 2"])
    assert not second.check(["rank 1"])


def test_where_the_store_is_gone_the_death_of_rank_0_is_named_beside_a_network_that_is_cut_off() -> None:
    """srun and mpirun have no store of their own: it goes with rank 0."""
    serving = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", serving.port, is_master=False, wait_for_workers=False)
    notices = Notices(store, rank=1, world_size=2, timeout=5.0, stopping=lambda: False)
    del serving
    error = notices.failure("counts", RuntimeError("Connection closed by peer"))
    assert re.search("rank 0, which has it .*, died or was stopped; or its network is cut off", str(error))


class StoppedStore:
    """A store of a process that was stopped: it answers once that goes on."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._goes_on = Event()

    def go_on(self) -> None:
        self._goes_on.set()

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            self._goes_on.wait()
            return getattr(self._store, name)(*arguments)

        return answer


@pytest.fixture
def stopped() -> Iterator[Any]:
    store = StoppedStore()
    yield store
    store.go_on()


def test_a_store_whose_process_was_stopped_is_waited_for_until_the_timeout() -> None:
    """torch's client waits for ever, and is deaf to signals: so did ranks whose rank 0 was frozen while they met."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(GroupError, match=f":{port} did not answer within 1 s: .* was stopped, or is cut off"):
            reach_store("127.0.0.1", port, 1.0)


def test_ranks_meet_at_the_one_address_of_a_name_that_leads_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name has an IPv6 address that nobody answers at: torch's client spent all its time on it."""
    resolve = socket.getaddrinfo

    def of_several(host: str, *arguments: Any, **more: Any) -> list[Any]:
        if host != "several.invalid":
            return resolve(host, *arguments, **more)
        return [found for known in ("192.0.2.1", "127.0.0.1") for found in resolve(known, *arguments, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", of_several)
    monkeypatch.setattr(meeting, "_CONNECTING_SECONDS", 0.2)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with as_rank(0, monkeypatch):
        monkeypatch.setenv("MASTER_ADDR", "several.invalid")
        meet(5.0)[0].set("word", "of rank 0")
        monkeypatch.setenv("RANK", "1")
        assert meet(5.0)[0].get("word") == b"of rank 0"


def test_a_rank_that_comes_to_another_program_says_so_and_ends_with_the_status_of_an_error(is_sample: bool) -> None:
    """torch's client tried for about as long as the rank did: when it returned, the interpreter that was ending died
    of SIGABRT, in two processes of three."""
    program = textwrap.dedent("""
        import sys
        from holdfast.group.meeting import reach_store
        reach_store("127.0.0.1", int(sys.argv[1]), 2.0)
    """)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as another:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    another.accept()[0].close()

        Thread(target=hang_up, daemon=True).start()
        command = [sys.executable, "-c", program, str(another.getsockname()[1])]
        ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2 if is_sample else 4)]
        said = [rank.communicate()[1] for rank in ranks]
        another.shutdown(socket.SHUT_RDWR)
    assert [rank.returncode for rank in ranks] == [1] * len(ranks), said
    assert all("or what listens there is another program" in text for text in said)


def test_ranks_that_meet_at_a_store_that_answers_nobody_end_after_the_timeout(stopped: Any) -> None:
    with pytest.raises(GroupError, match="rank 1 waited for all ranks to be there: whoever has the group's store was"):
        await_others(stopped, 1, 2, 1.0)


def test_ranks_that_meet_at_a_store_that_answers_nobody_hear_of_a_signal(stopped: Any) -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 waited for all ranks to be there"):
        await_others(stopped, 1, 2, 60.0, lambda: True)
    assert time.monotonic() - began < 20


class FreezingStore(Store):
    """One of torch's own kind that answers until it is frozen, and dies a while later."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self._store = HashStore()
        self._dies = Event()
        self._is_frozen = False
        self._pause = pause

    def freeze(self) -> None:
        self._is_frozen = True

    def die(self) -> None:
        self._dies.set()

    def _answering(self) -> HashStore:
        if self._is_frozen:
            self._dies.wait(self._pause)
            raise RuntimeError("Connection reset by peer")
        return self._store

    def set(self, key: str, value: str) -> None:
        self._answering().set(key, value)

    def get(self, key: str) -> bytes:
        return self._answering().get(key)

    def add(self, key: str, number: int) -> int:
        return self._answering().add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self._answering().check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._answering().wait(keys, *timeout)


@pytest.mark.dear
@pytest.mark.parametrize("is_asked_to_stop", [False, True])
def test_a_store_that_freezes_while_torch_makes_a_process_group_is_waited_for_until_the_timeout(
    is_asked_to_stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, began = FreezingStore(pause=25.0), time.monotonic()

    def await_others(*_: Any) -> None:
        store.freeze()

    monkeypatch.setattr(group, "await_others", await_others)
    alone = Roles(world_size=1, memory_ranks=0)
    with pytest.raises(GroupError, match="waited for all ranks to be there and reaches neither"):
        group.Group(
            store=store,
            rank=0,
            roles=alone,
            timeout=60.0 if is_asked_to_stop else 1.0,
            stopping=lambda: is_asked_to_stop,
        )
    assert time.monotonic() - began < 25.0
    store.die()


def test_a_store_that_stalls_while_rank_0_works_has_as_long_as_rank_0(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had three seconds, whatever the group's timeout: a pause of rank 0's process ended the others."""
    monkeypatch.setattr(notices, "_GRACE_SECONDS", 0.0)
    ours = Notices(stopped, rank=1, world_size=2, timeout=60.0, stopping=lambda: False)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ours.await_rank_0, "work")
        time.sleep(2.0)  # more than the store has where something broke
        stopped.go_on()
        with Notices(stopped, rank=0, world_size=2, timeout=60.0, stopping=lambda: False).saying_that_it_lives("work"):
            pass
        waiting.result()


def test_an_interface_that_one_machine_does_not_have_is_named_to_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(await_others, store, 0, 2, 60.0)
        while not store.check(["here"]):
            time.sleep(0.01)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
        said = r"rank 1: gloo cannot listen on GLOO_SOCKET_IFNAME = nowhere7, and this machine has .*lo"
        for fails in (lambda: await_others(store, 1, 2, 60.0), waiting.result):
            with pytest.raises(ConfigError, match=said):
                fails()


@pytest.mark.parametrize(("own", "chosen"), [("127.0.1.1", "here0"), ("10.9.9.9", None)])
def test_ranks_of_several_machines_face_the_master_where_their_names_lead_home(
    own: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.9.9.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be put back")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(meeting, "_of_this_name", lambda: [ipaddress.ip_address(own)])
    monkeypatch.setattr(meeting, "address_towards", lambda host: {"10.9.9.1": "10.9.9.9"}[host])
    monkeypatch.setattr(meeting, "_interface_of", lambda address: {"10.9.9.9": "here0"}[str(address)])
    meeting.choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_ranks_that_gloo_does_not_connect_are_told_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth5")
    monkeypatch.setattr(meeting, "check_interfaces", lambda: None)
    monkeypatch.setattr(group.process_groups.default_group, "enter", refuse)
    with pytest.raises(
        GroupError, match=r"all of them were there before: .* Let GLOO_SOCKET_IFNAME \(eth5 here\) name"
    ):
        group.Group(store=HashStore(), rank=0, roles=Roles(world_size=1), timeout=1.0)
