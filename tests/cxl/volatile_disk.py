"""A disk with a volatile write cache, served to a virtual machine over NBD, and what a power cut leaves of it.

Invariants
- A sector is written whole or not at all; nothing larger is atomic.
- What a flush was asked for after, or what was written with FUA, is on the platter once that was answered.
- Everything else lies in the cache. At a cut each sector keeps the newest of the versions that were written since it
  last was on the platter, or an older one, or the platter's own, at random: so writes are lost, torn and out of order
  at will.
- The request that `stop_after` chose is never answered, nor is a later one: a flush is not done, and a write may have
  come as far as the cache.
- A disk whose power goes alone lets its machine know: from the request that was chosen on, the connection is gone.
- A forgetful disk answers flushes and leaves the cache as it is. It is there to show that a campaign notices.

The protocol is NBD's fixed newstyle handshake and simple replies, as far as QEMU's client needs them.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

SECTOR_BYTES = 512

# The NBD protocol's own numbers.
_INIT_MAGIC, _OPTION_MAGIC, _OPTION_REPLY_MAGIC = 0x4E42444D41474943, 0x49484156454F5054, 0x3E889045565A9
_REQUEST_MAGIC, _REPLY_MAGIC = 0x25609513, 0x67446698
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_OPTION_ABORT, _OPTION_GO = 2, 7
_REPLY_ACK, _REPLY_INFO, _REPLY_UNSUPPORTED = 1, 3, (1 << 31) + 1
_INFO_EXPORT = 0
_HAS_FLAGS, _SEND_FLUSH, _SEND_FUA = 1, 4, 8
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FUA = 1
_EINVAL = 22


class VolatileCache:
    """The sectors of `platter` with a write cache in front of them."""

    def __init__(self, platter: Path, *, sector_bytes: int = SECTOR_BYTES, forgetful: bool = False) -> None:
        self._platter = platter.open("r+b")
        self.size_bytes = platter.stat().st_size
        self._sector_bytes = sector_bytes
        self.forgetful = forgetful
        self._versions: dict[int, list[bytes]] = {}  # of a sector, since it was last on the platter; the newest is last
        self.counts: Counter[str] = Counter()

    def read(self, offset: int, size: int) -> bytes:
        self._platter.seek(offset)
        data = bytearray(self._platter.read(size))
        for at in range(0, size, self._sector_bytes):
            if versions := self._versions.get((offset + at) // self._sector_bytes):
                data[at : at + self._sector_bytes] = versions[-1]
        return bytes(data)

    def write(self, offset: int, data: bytes, *, through: bool = False) -> None:
        self.counts["writes"] += 1
        sectors = range(offset // self._sector_bytes, (offset + len(data)) // self._sector_bytes)
        for number, sector in enumerate(sectors):
            version = data[number * self._sector_bytes : (number + 1) * self._sector_bytes]
            self._versions.setdefault(sector, []).append(version)
        if through:
            self.counts["written through"] += 1
            self._keep(sectors)

    def flush(self) -> None:
        self.counts["flushes"] += 1
        self._keep(list(self._versions))

    def cut(self, chance: random.Random) -> None:
        """The power fails: what is left is on the platter."""
        for sector, left in self._left(chance, 0.5):
            self._put(sector, left)
        self._versions.clear()
        self._platter.flush()

    def cut_copy(self, copy: Path, chance: random.Random, share_lost: float) -> None:
        """Does to a copy of the platter what a cut would do to the platter now. share_lost: of the sectors in the
        cache, how many do not come to their newest version."""
        with copy.open("r+b") as file:
            for sector, left in self._left(chance, share_lost):
                file.seek(sector * self._sector_bytes)
                file.write(left)

    def _left(self, chance: random.Random, share_lost: float) -> Iterator[tuple[int, bytes]]:
        """Of the sectors in the cache, what comes to the platter."""
        for sector, versions in sorted(self._versions.items()):
            self.counts["sectors in the cache"] += 1
            kept = chance.randrange(len(versions)) if chance.random() < share_lost else len(versions)
            if kept > 0:
                yield sector, versions[kept - 1]
            if kept < len(versions):
                self.counts["lost"] += 1

    def close(self) -> None:
        self._platter.close()

    def _keep(self, sectors: range | list[int]) -> None:
        if self.forgetful:
            return
        for sector in sectors:
            self._put(sector, self._versions.pop(sector)[-1])
        self._platter.flush()

    def _put(self, sector: int, data: bytes) -> None:
        self._platter.seek(sector * self._sector_bytes)
        self._platter.write(data)


class VolatileDisk:
    """Serves a cache on a unix socket, to one machine. Context manager: leaves when the machine is gone."""

    def __init__(self, cache: VolatileCache, address: Path) -> None:
        self.cache = cache
        self.has_stopped = False
        self._requests_left: int | None = None
        self._goes_alone = False
        address.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)
        self._thread.start()

    def stop_after(self, requests: int, *, alone: bool = False) -> None:
        """Of those that write or flush. alone: the machine goes on without it."""
        self._requests_left, self._goes_alone = requests, alone

    def wait(self) -> None:
        """Until the machine is gone."""
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closed before anybody came
            return
        with connection:
            try:
                if self._negotiate(connection):
                    self._answer_requests(connection)
            except (ConnectionError, EOFError):  # the machine is gone
                return

    def _negotiate(self, connection: socket.socket) -> bool:
        connection.sendall(struct.pack(">8sQH", b"NBDMAGIC", _OPTION_MAGIC, _FIXED_NEWSTYLE | _NO_ZEROES))
        _receive(connection, 4)
        while True:
            _, option, size = struct.unpack(">QII", _receive(connection, 16))
            _receive(connection, size)

            def reply(kind: int, data: bytes = b"", option: int = option) -> None:
                connection.sendall(struct.pack(">QIII", _OPTION_REPLY_MAGIC, option, kind, len(data)) + data)

            if option == _OPTION_GO:
                flags = _HAS_FLAGS | _SEND_FLUSH | _SEND_FUA
                reply(_REPLY_INFO, struct.pack(">HQH", _INFO_EXPORT, self.cache.size_bytes, flags))
                reply(_REPLY_ACK)
                return True
            if option == _OPTION_ABORT:
                reply(_REPLY_ACK)
                return False
            reply(_REPLY_UNSUPPORTED)

    def _answer_requests(self, connection: socket.socket) -> None:
        while True:
            _, flags, kind, handle, offset, size = struct.unpack(">IHHQQI", _receive(connection, 28))
            if kind == _DISCONNECT:
                return
            data = _receive(connection, size) if kind == _WRITE else b""
            if self._stops_at(kind):
                if kind == _WRITE:
                    self.cache.write(offset, data)
                while not self._goes_alone and connection.recv(1 << 16):
                    pass
                return
            error, answer = 0, b""
            if kind == _READ:
                answer = self.cache.read(offset, size)
            elif kind == _WRITE:
                self.cache.write(offset, data, through=bool(flags & _FUA))
            elif kind == _FLUSH:
                self.cache.flush()
            else:
                error = _EINVAL
            connection.sendall(struct.pack(">IIQ", _REPLY_MAGIC, error, handle) + answer)

    def _stops_at(self, kind: int) -> bool:
        if self._requests_left is None or kind not in (_WRITE, _FLUSH):
            return False
        self.has_stopped = self._requests_left == 0
        self._requests_left -= 1
        return self.has_stopped


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
