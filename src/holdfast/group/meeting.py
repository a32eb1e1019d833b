"""Where the ranks of a group meet, and on which addresses they listen.

Neither torch.distributed's store nor gloo asks who is there: whoever reaches a port of theirs can read and change what
ranks send each other. So they listen where they must, and nowhere else where that is for us to say.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"


def stay_on_one_machine() -> None:
    """Lets gloo listen on the loopback interface where all ranks are on this machine and nobody said where."""
    all_are_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or _is_loopback()
    if all_are_here and _GLOO_INTERFACE not in os.environ and _LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ[_GLOO_INTERFACE] = _LOOPBACK


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """The store of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; this rank and how many there are.

    Rank 0's listens on MASTER_ADDR, where that is an address of its machine and not torchrun's store.
    """
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening = _listen_on_master_address()
        if listening is not None:
            world_size = int(os.environ["WORLD_SIZE"])
            address, port = listening.getsockname()[:2]
            store = TCPStore(
                address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listening.detach()
            )
            return store, 0, world_size
    met, rank, world_size = next(rendezvous("env://", timeout=timeout))
    return met, rank, world_size


def _is_loopback() -> bool:
    address = _master_address()
    return address is not None and address.is_loopback


def _master_address() -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None where it is a name: what that means on this machine may be another thing than on the others."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        return ipaddress.ip_address("127.0.0.1" if name == "localhost" else name)
    except ValueError:
        return None


def _listen_on_master_address() -> socket.socket | None:
    """None where it is no address of this machine, or the port is taken: then torch says what is wrong."""
    address = _master_address()
    if address is None:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((str(address), int(os.environ["MASTER_PORT"])))
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening
    return None
