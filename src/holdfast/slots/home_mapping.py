"""The pool's own memory, as the device reads it: no copy engine, no staging, no software in between.

A mapping is registered with the device (CUDA pins its pages and gives them an address that kernels can read), which
takes the whole of it: every page of the tables is allocated and stays in memory while the pool is open.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from holdfast import _core
from holdfast.errors import ConfigError, DeviceError
from holdfast.slots.slot_pool import SlotPool

_PORTABLE_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HomeMapping:
    """The mappings of a pool's tables, registered. numbers: of the tables in the pool.

    Raises ConfigError where the pool has no mapping: its rows are in a log store.
    """

    def __init__(self, pool: SlotPool, numbers: Sequence[int], device: torch.device) -> None:
        self._pool = pool
        self._numbers = numbers
        self._device = device
        self.refusal = ""  # why the device does not take them; empty where it does
        self._map()

    def bases(self) -> torch.Tensor:
        """int64 ``[tables of the pool, 2]`` on the device: addresses of each table's weights and state, 0 for none.

        Raises DeviceError where the device takes the mappings no more.
        """
        if self._core is not self._pool.core:  # a new pool is made again when further tables are attached
            self._unregister()
            self._map()
            if self.refusal:
                raise DeviceError(f"{self._pool.directory}: {self.refusal}")
        return self._bases

    def materialize(self, plan: _core.Plan) -> None:
        """Rows of `plan` that no update has touched yet have their initial values at home, where the device finds
        them."""
        self._pool.core.materialize(plan)

    def _map(self) -> None:
        self._core = self._pool.core
        bases = torch.zeros(len(self._core.tables), 2, dtype=torch.int64, device="cpu")
        registered: list[int] = []
        for number in self._numbers:
            mapping = self._core.mapping(number)
            if mapping is None:
                raise ConfigError(
                    f"device.rows = 'direct' needs rows that are kept in place, but those of {self._pool.directory} "
                    "lie in a log store (medium block): use 'scratchpad', or a new pool of medium memory (tmpfs, DAX)"
                )
            weights, state, ranges = mapping
            for address, num_bytes in ranges:
                if refusal := _register(self._device, address, num_bytes):
                    self.refusal = f"{self._device} does not register its {num_bytes:,} bytes ({refusal})"
                    _unregister(self._device, tuple(registered))
                    return
                registered.append(address)
            bases[number, 0], bases[number, 1] = weights, state
        self._bases = bases.to(self._device)
        # Before the pool unmaps its files: what is registered is CUDA's until then.
        self._unregister = weakref.finalize(self, _unregister, self._device, tuple(registered))
        self._pool.before_closing(self._unregister)


def _register(device: torch.device, address: int, num_bytes: int) -> str:
    """What the device says against it; empty where it takes it."""
    if device.type != "cuda":
        return ""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, num_bytes, _PORTABLE_MAPPED)
    if int(error) == 0:
        return ""
    # CUDA keeps a refusal for whoever asks for its last error next: torch does after every kernel, and would raise it.
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    return str(runtime.cudaGetErrorString(error))


def _unregister(device: torch.device, addresses: tuple[int, ...]) -> None:
    if device.type != "cuda":
        return
    with suppress(RuntimeError):  # of a device that is lost: nothing reads any more
        torch.cuda.synchronize(device)  # kernels may be reading
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
