"""What the scale-out benchmark counts is what crosses the wire, and nothing else where it is alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from namespaces import why_not
from scaleout.wire import alone, traffic

REASON = why_not()
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Sends a megabyte over lo, and prints what was counted meanwhile.
PROGRAM = """
import dataclasses, json, socket
from scaleout.wire import traffic
before = traffic()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
    receiver, _ = server.accept()
    with receiver:
        for _ in range(16):
            sender.sendall(bytes(1 << 16))
            receiver.recv(1 << 16, socket.MSG_WAITALL)
print(json.dumps(dataclasses.asdict(traffic() - before)))
"""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_command_alone_counts_its_own_bytes_with_their_headers() -> None:
    program = subprocess.run(
        alone([sys.executable, "-c", PROGRAM]), cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    counted = json.loads(program.stdout)
    assert counted["sent_bytes"] == counted["received_bytes"]
    assert 1 << 20 < counted["sent_bytes"] < 1.02 * (1 << 20)
    assert 16 <= counted["sent_packets"] <= 200


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="nowhere0"):
        traffic("nowhere0")
