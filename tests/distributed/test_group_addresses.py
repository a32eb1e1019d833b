"""Ranks of one machine listen on its loopback interface, whatever other addresses it has; and where the user says."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys

import pytest
from held_port import held_port

from group_runs import SRC

pytestmark = pytest.mark.thorough

RANK = """
import json, os, pathlib, sys
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions

group = Group.from_environment(GroupOptions(timeout=30.0))
group.barrier("everyone")
sockets = {os.readlink(fd) for fd in pathlib.Path("/proc/self/fd").iterdir() if fd.is_symlink()}
listening = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            listening.append(fields[1].partition(":")[0])
print(json.dumps(listening))
group.barrier("the end")
group.close()
"""


def address_of(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    return ipaddress.ip_address(b"".join(words))


def listening(**environment: str) -> list[list[ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Of each rank of two."""
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    with held_port() as port:
        common = {**kept, "WORLD_SIZE": "2", "MASTER_PORT": str(port), "PYTHONPATH": str(SRC), **environment}
        started = [
            subprocess.Popen(
                [sys.executable, "-c", RANK], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [[address_of(digits) for digits in json.loads(text.splitlines()[-1])] for text in said]


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_ranks_of_one_machine_listen_on_its_loopback_interface_alone(master: str):
    everyones = listening(MASTER_ADDR=master)
    assert everyones[0]
    assert everyones[1]
    assert all(address.is_loopback for addresses in everyones for address in addresses), everyones


def test_ranks_listen_on_the_address_and_the_interface_that_the_user_names():
    everyones = listening(MASTER_ADDR="127.0.0.9", GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE="1")
    assert ipaddress.ip_address("127.0.0.9") in everyones[0]
    assert all(address.is_loopback for addresses in everyones for address in addresses), everyones
