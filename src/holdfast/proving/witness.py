"""The witness in a script's process: gives every pool a place of the run's own, writes down what each step left, ends
the process after the last step, and kills it where it was ordered to.

Invariants
- No directory that the script names as a pool is opened or written.
- What is written down of a step is written after its commit returned, and never read by the script.
- The process dies with the command that started it.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from holdfast import _core
from holdfast.pools.proving_hook import VARIABLE
from holdfast.proving.record import (
    POOLS_FILE,
    STACKS_FILE,
    STACKS_SIGNAL,
    Leaf,
    Orders,
    events_file,
    pools_of,
    values_file,
)

REFUSED = 77  # exit status
_PR_SET_PDEATHSIG = 1
_Method = Callable[..., Any]
_FAR = 1 << 40  # persist points: counted, never reached


@functools.cache
def present() -> Witness:
    """This process's."""
    return Witness(Path(os.environ[VARIABLE]))


class Witness:
    """See the module's text. folder: the run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = Orders.read(folder)
        self._pid = os.getpid()
        self._checkpoint: Any = None
        self._resumed = False
        self._ended = False
        self._touched: list[tuple[Any, Any]] = []
        self._armed = False
        self._events = os.open(events_file(folder, self._orders.life), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._values_file = values_file(folder, self._orders.life).open("ab", buffering=0)
        self._stacks = (folder / STACKS_FILE).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        atexit.register(self._script_ended)
        self._install()

    def pool_directory(self, directory: Path) -> Path:
        """The run's own place for what the script calls `directory`."""
        name = str(directory.resolve())
        pools = pools_of(self._folder)
        if name in pools.values():
            return directory
        if name not in pools:
            pools[name] = str(self._new_place(Path(name), len(pools)))
            partial = self._folder / f"{POOLS_FILE}.partial"
            partial.write_text(json.dumps(pools))
            partial.rename(self._folder / POOLS_FILE)
        self._write("opening", pool=name)
        kill = self._orders.kill
        if kill is not None and kill.kind == "opening":
            _core.kill_at_persist_point(kill.points)
            self._armed = True
        return Path(pools[name])

    def refuse(self, why: str) -> NoReturn:
        """Ends the process: it cannot be proven, and here is why."""
        self._write("refused", why=why)
        self._leave(REFUSED)

    def _new_place(self, directory: Path, number: int) -> Path:
        """Of the same kind as `directory`: what it lies on decides how a pool keeps its rows."""
        name = f".{directory.name}.{self._orders.token}-{number}"
        if self._orders.pools is not None:
            return Path(self._orders.pools) / name
        there = next(parent for parent in directory.parents if parent.is_dir())
        if directory.is_dir() and directory.stat().st_dev != there.stat().st_dev:
            self.refuse(
                f"its pool {directory} is a mount of its own, so a pool beside it would lie on another file system; "
                "name a folder for the runs' pools with --pools"
            )
        if not os.access(there, os.W_OK):
            self.refuse(
                f"{there} cannot be written, and the runs' pools go beside {directory}; name another place with --pools"
            )
        return there / name

    def _install(self) -> None:
        from holdfast.rows.collection import RowCollection
        from holdfast.train.checkpoint import Checkpoint

        for owner, name, watch in (
            (Checkpoint, "__init__", self._watch_init),
            (Checkpoint, "resume", self._watch_resume),
            (Checkpoint, "commit_with", self._watch_commit),
            (RowCollection, "capture", self._watch_capture),
        ):
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(watch(original)))

    def _watch_init(self, original: _Method) -> _Method:
        def watched(checkpoint: Any, *arguments: Any, **keywords: Any) -> None:
            original(checkpoint, *arguments, **keywords)
            self._made(checkpoint)

        return watched

    def _watch_resume(self, original: _Method) -> _Method:
        def watched(checkpoint: Any) -> int:
            step: int = original(checkpoint)
            self._observe("resumed", step)
            self._leave_after_last(step)  # where the process before was killed after that
            return step

        return watched

    def _watch_commit(self, original: _Method) -> _Method:
        def watched(checkpoint: Any, *arguments: Any, **keywords: Any) -> int:
            self._before_commit(checkpoint)
            step: int = original(checkpoint, *arguments, **keywords)
            self._after_commit(step)
            return step

        return watched

    def _watch_capture(self, original: _Method) -> _Method:
        def watched(collection: Any, planned: Any) -> Any:
            self._touched.append((collection, planned))
            return original(collection, planned)

        return watched

    def _made(self, checkpoint: Any) -> None:
        if self._checkpoint is not None and self._checkpoint._pool.directory != checkpoint._pool.directory:
            self.refuse(
                f"it makes Checkpoints of two pools ({self._checkpoint._pool.directory.name} and "
                f"{checkpoint._pool.directory.name}); prove watches one: prove it with one at a time"
            )
        self._checkpoint = checkpoint
        if os.getpid() != self._pid:
            self.refuse("a forked child of it trains; prove watches the process that opens the pool")
        import torch

        from holdfast.state.reproducibility import check_environment

        pool = checkpoint._pool
        self._write(
            "checkpoint",
            facts={
                "problems": check_environment(warn=False),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "instructions": _core.instruction_set(),
                "hash_seed": os.environ.get("PYTHONHASHSEED"),
                "recovery": "relaxed" if pool._options.relaxed else "exact",
                "dense_interval": pool._dense_interval,
                "pool": pool.description,
                "num_workers": _loader_workers(),
            },
        )

    def _before_commit(self, checkpoint: Any) -> None:
        if not self._resumed:
            self.refuse(
                "it commits without having called Checkpoint.resume(): a run that was killed would go on from fresh "
                "weights; call checkpoint.resume() once, after the Checkpoint is made and before the first step"
            )
        kill = self._orders.kill
        if kill is not None and kill.kind == "before commit" and checkpoint._pool.step >= kill.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _after_commit(self, step: int) -> None:
        kill = self._orders.kill
        if kill is not None and kill.kind == "after commit" and step > kill.after:
            os.kill(os.getpid(), signal.SIGKILL)
        self._observe("step", step)
        self._leave_after_last(step)

    def _leave_after_last(self, step: int) -> None:
        if step >= self._orders.steps:
            self._checkpoint.flush()
            self._end()
            self._leave(0)

    def _observe(self, event: str, step: int) -> None:
        from holdfast.proving.observation import Values, dense_leaves, row_leaves, value_leaf
        from holdfast.proving.surroundings import surrounding_leaves

        counted = 0 if self._armed else _FAR - _core.persist_points_left()
        self._resumed = True
        pool = self._checkpoint._pool
        room_bytes = self._orders.values_bytes - self._values_file.tell()
        values = Values(self._values_file, room_bytes, self._values_file.tell())
        leaves: list[Leaf] = []
        if event == "step":
            leaves.append(value_leaf("cursor", "samples consumed", pool.core.cursor))
            leaves += row_leaves(self._touched, values)
        leaves += dense_leaves(self._checkpoint, values)
        leaves += surrounding_leaves(self._checkpoint)
        self._touched.clear()
        plain = [[x.part, x.name, x.digest, x.words, x.offset, x.num_bytes] for x in leaves]
        self._write(event, step=step, durable=pool.durable_step, points=counted, leaves=plain)
        self._arm(step)

    def _arm(self, step: int) -> None:
        """Persist points are counted from here, up to the one at which the process is to die."""
        kill = self._orders.kill
        if self._armed:
            return
        if kill is not None and kill.kind == "persist" and step >= kill.after:
            self._armed = True
            _core.kill_at_persist_point(kill.points)
        else:
            _core.kill_at_persist_point(_FAR)

    def _script_ended(self) -> None:
        """The interpreter exits: the script has reached its own end."""
        if os.getpid() == self._pid and self._checkpoint is not None and not self._ended:
            self._end()

    def _end(self) -> None:
        from holdfast.admin.digest import digest_pool
        from holdfast.pools.read_only import open_reader

        self._ended = True
        _core.kill_at_persist_point(0)
        pool = self._checkpoint._pool
        pool.close()
        found = digest_pool(open_reader(pool.directory))
        self._write(
            "ended",
            step=found.step,
            cursor=found.cursor,
            row_updates=found.row_updates,
            digest=found.whole,
            tables=found.tables,
        )

    def _write(self, event: str, **fields: Any) -> None:
        data = memoryview(json.dumps({"event": event, **fields}).encode() + b"\n")
        while data:
            data = data[os.write(self._events, data) :]

    def _leave(self, status: int) -> NoReturn:
        """At once: neither the script's handlers nor its threads have a say in how long that takes."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _loader_workers() -> int:
    """The largest number of workers of a DataLoader that the process has."""
    import gc

    import torch

    # By its type: what stands for something else (a weak proxy, a lazy module) says of it what it likes, or raises.
    found = [each.num_workers for each in gc.get_objects() if issubclass(type(each), torch.utils.data.DataLoader)]
    return max(found, default=0)
