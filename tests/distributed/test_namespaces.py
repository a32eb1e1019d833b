"""Hosts in namespaces behave like hosts: they reach each other, until a cable is cut, and again once it is mended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from namespaces import Host, Network, NetworkError, why_not, why_not_slow

REASON = why_not()
REASON_SLOW = why_not_slow()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

PORT = 7000
# Takes connections one after the other; says how many bytes came once a connection is closed for writing.
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            count = 0
            while data := connection.recv(1 << 16):
                count += len(data)
            connection.sendall(str(count).encode())
"""
CLIENT = """
import socket, sys
address, port, timeout, size = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
with socket.create_connection((address, port), timeout=timeout) as connection:
    connection.settimeout(30)
    print("connected", flush=True)
    input()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    assert int(connection.recv(100)) == size
"""


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def serve(host: Host) -> None:
    server = host.start(python(SERVER, host.address, PORT), stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == "listening\n"


def reaches(client: Host, server: Host, *, size: int = 1, timeout: float = 1) -> bool:
    return client.run(python(CLIENT, server.address, PORT, timeout, size), input="\n").returncode == 0


def seconds_to_send(client: Host, server: Host, size: int) -> float:
    begin = time.perf_counter()
    assert reaches(client, server, size=size, timeout=30)
    return time.perf_counter() - begin


def test_hosts_reach_each_other_until_one_is_cut_off_and_again_once_it_is_mended(network: Network) -> None:
    first, second, third = network
    serve(second)
    serve(third)
    assert reaches(first, second)
    second.cut()
    assert not reaches(first, second)
    assert reaches(first, third)  # the others do not notice
    second.mend()
    assert reaches(first, second, timeout=30)


def test_a_connection_outlives_a_cut(network: Network) -> None:
    first, second, _ = network
    serve(second)
    client = first.start(
        python(CLIENT, second.address, PORT, 5, 1_000_000), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        second.cut()
        client.stdin.write("\n")
        client.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(0.5)
        second.mend()
        assert client.wait(30) == 0


@pytest.mark.skipif(REASON_SLOW is not None, reason=str(REASON_SLOW))
def test_a_slowed_host_takes_as_long_as_its_cable(network: Network) -> None:
    first, second, _ = network
    serve(second)
    size = 1_000_000
    second.slow(8_000_000)
    slowed = seconds_to_send(first, second, size)
    second.hasten()
    assert slowed > 0.8  # a second, but for what the bucket holds
    assert seconds_to_send(first, second, size) < slowed / 2


def test_nothing_leads_out_of_a_network(network: Network) -> None:
    first, *_ = network
    outside = first.run(python(CLIENT, "192.0.2.1", PORT, 1, 1), input="\n")
    assert "Network is unreachable" in outside.stderr


def pids_in(namespace: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout.split()


def test_leaving_a_network_ends_its_processes_and_takes_it_away() -> None:
    with Network(1) as network:
        (host,) = network
        process = host.start(["sleep", "1000"])
        assert host.name in namespaces()
        while str(process.pid) not in pids_in(host.name):  # it is not there before its first instruction
            time.sleep(0.01)
    assert process.wait(10) < 0
    assert not any(host.name in name for name in namespaces())


def test_a_network_that_cannot_be_made_leaves_nothing_behind() -> None:
    network = Network(2)
    taken = network.hosts[1].name
    subprocess.run(["ip", "netns", "add", taken], check=True)
    try:
        before = namespaces()
        with pytest.raises(NetworkError, match="File exists"), network:
            pass
        assert namespaces() == before
    finally:
        subprocess.run(["ip", "netns", "delete", taken], check=True)


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return sorted(line.split()[0] for line in listed.stdout.splitlines())
