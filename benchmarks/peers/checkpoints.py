"""How users of the peers make training durable: a checkpoint of the whole model every N steps.

Every write is cheaper than holdfast's promise in one respect: ``torch.save`` is not followed by fsync, so a checkpoint
may not survive power loss.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Checkpointer(ABC):
    """Saves ``state()`` under ``directory`` and keeps the newest complete checkpoint."""

    def __init__(self, directory: Path, state: Callable[[], dict[str, Any]]) -> None:
        self.directory = directory
        self.state = state
        self.num_saves = 0
        self._newest: Path | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def save(self) -> None:
        """Starts a checkpoint of this moment; returns when training may go on."""

    def wait(self) -> None:
        """Returns when the last checkpoint is complete."""
        return

    @property
    def size_bytes(self) -> int:
        """Of the newest complete checkpoint."""
        if self._newest is None:
            return 0
        files = [self._newest] if self._newest.is_file() else self._newest.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())

    def _next_path(self) -> Path:
        self.num_saves += 1
        return self.directory / f"checkpoint-{self.num_saves}"

    def _completed(self, path: Path) -> None:
        if self._newest is not None and self._newest.is_dir():
            shutil.rmtree(self._newest)
        elif self._newest is not None:
            self._newest.unlink()
        self._newest = path


class TorchSave(Checkpointer):
    """``torch.save``: training stops until the file is written."""

    def save(self) -> None:
        path = self._next_path()
        torch.save(self.state(), path)
        self._completed(path)


class DcpAsync(Checkpointer):
    """``torch.distributed.checkpoint.async_save``: training stops for a copy in memory, a thread writes it.

    The copy goes to the same buffers every time, which is faster than the default (new ones) and needs the previous
    save to be complete.
    """

    def __init__(self, directory: Path, state: Callable[[], dict[str, Any]]) -> None:
        super().__init__(directory, state)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # All four ask for an accelerator, or (shared memory) for a second process.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._pending: Any = None
        self._pending_path: Path | None = None
        self.wait_s = 0.0

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()
        self._pending_path = self._next_path()
        self._pending = async_save(
            self.state(), checkpoint_id=self._pending_path, async_stager=self._stager, no_dist=True
        )

    def wait(self) -> None:
        if self._pending is None or self._pending_path is None:
            return
        begin = time.perf_counter()
        self._pending.result()
        self.wait_s += time.perf_counter() - begin
        self._completed(self._pending_path)
        self._pending = None


CHECKPOINTERS: dict[str, type[Checkpointer]] = {"torch_save": TorchSave, "dcp_async": DcpAsync}
