"""Bytes and packets that cross a network interface, as the kernel counts them.

Headers and acknowledgements are counted with what they carry. The counters are those of a network namespace: what else
runs in it is counted, too, which ``alone`` prevents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_BRING_UP_AND_RUN = 'ip link set lo up && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Since the interface was made; subtract an earlier one for a region. On ``lo`` all that is sent is received."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            received_bytes=self.received_bytes - earlier.received_bytes,
            received_packets=self.received_packets - earlier.received_packets,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
            sent_packets=self.sent_packets - earlier.sent_packets,
        )


def traffic(interface: str = "lo") -> Traffic:
    """What has crossed ``interface`` of this process's network namespace. Raises LookupError if there is none."""
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            numbers = [int(number) for number in counters.split()]
            # eight counters of what was received, then eight of what was sent
            return Traffic(
                received_bytes=numbers[0],
                received_packets=numbers[1],
                sent_bytes=numbers[8],
                sent_packets=numbers[9],
            )
    raise LookupError(f"there is no network interface {interface!r}")


def alone(command: list[str]) -> list[str]:
    """``command`` in a network namespace of its own, with nothing but ``lo``. Wants root, unshare and ip."""
    return ["unshare", "--net", "sh", "-c", _BRING_UP_AND_RUN, "sh", *command]
