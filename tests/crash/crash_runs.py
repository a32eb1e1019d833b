"""Drives the zygote: run, kill, resume, digest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fork_server import ForkServer

if TYPE_CHECKING:
    from faults import Fault

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
SIGKILL = 9


class Zygote:
    """A process that forks tiny runs; see zygote.py. preload: a library that its C library's calls go through first."""

    def __init__(self, preload: Path | None = None) -> None:
        environment = {
            **os.environ,
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "PYTHONPATH": f"{SRC}{os.pathsep}{HERE}",
            **({} if preload is None else {"LD_PRELOAD": str(preload)}),
        }
        self._server = ForkServer(HERE / "zygote.py", environment)

    def run(
        self,
        directory: Path,
        options: Mapping[str, Any],
        *,
        kill_at: int = 0,
        kill_after_s: float | None = None,
        fault: Fault | None = None,
        progress: Path | None = None,
    ) -> dict[str, Any]:
        """One run in a fork, killed at its `kill_at`-th persist point or after a time, or met by a fault. progress: a
        file that it keeps, see zygote.Progress. Raises AssertionError with the child's traceback where it failed."""
        request = {
            "directory": str(directory),
            "options": dict(options),
            "kill_at": kill_at,
            "kill_after_s": kill_after_s,
            "fault": None if fault is None else asdict(fault),
            "progress": None if progress is None else str(progress),
        }
        answer: dict[str, Any] = self._server.ask(request)
        assert "error" not in answer, f"{request}\n{answer['trace']}"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()


def digest(directory: Path) -> str:
    """Of a pool that was closed cleanly."""
    from holdfast import _core
    from holdfast.admin.digest import digest_pool

    return digest_pool(_core.Reader(str(directory))).whole


def disk_root() -> Path:
    """A directory on a disk: where things are built. Temporary files may lie in memory."""
    return HERE.parents[1] / "build"


def pool_root() -> Path:
    """Pools of crash tests lie on tmpfs where there is one: a persist point is the same, and the disk is spared."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))
