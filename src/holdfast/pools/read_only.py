"""Pools as others than their trainer see them: at rest, or over the trainer's shoulder.

- `at_rest` is for digests and exports: it recovers the pool if it was not closed cleanly, and holds its lock, so that
  nothing changes while it is read. PoolBusy where a run has it.
- `locked` is for verify: it holds the lock, and changes nothing. Repairs hold it alone, as a writer does.
- `ReadOnlyPool` is for evaluation: no lock, no change; a run may be at work, and rows are as they are at that instant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.data.source import DEFAULT_CAPACITY
from holdfast.errors import Corrupted, PoolBusy, PoolNotFound, PoolOfGroup, PoolReadOnly
from holdfast.files.locks import FileLock, is_lock_shared, outlasting_readers, signed_by
from holdfast.pools.directory import check_vacant, describe_medium, exists, is_of_group, log_bytes_of
from holdfast.pools.optim import OPTIMIZERS, RowOptimizerSpec
from holdfast.pools.tables import EmbeddingBagConfig, features_of, find_tables, to_spec

if TYPE_CHECKING:
    from holdfast.device.options import DeviceConfig

LOCK_FILE = "lock"
BEING_READ = "is being read (by holdfast verify, or for a moment by inspect); wait until that is through"
"""Of a pool whose lock is shared, as core/pool/pool_lock.cpp says it."""
_SCRATCHPAD_BYTES = 64 << 20  # nothing is trained: only what recovery needs is opened
_DTYPE_BYTES = (4, 2, 2)
_EXPECTED_KEYS = 1 << 20
KEY_RECORD = np.dtype([("key", "<i8"), ("step", "<u4"), ("updates", "<u4")])
"""Whose a row is: its key, the step that updated it last, and how many steps did (core/kernels/kernels.h)."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a table's rows lie in memory: bytes of weights and float32 values of optimizer state by their names.

    state: (name, values a row) in the order in which a row keeps them; the names are FBGEMM's and PyTorch's. key_bytes:
        behind them, in a table with keys: the row's KEY_RECORD.
    """

    weight_bytes: int
    state: tuple[tuple[str, int], ...]
    key_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return 4 * sum(width for _, width in self.state) + self.key_bytes

    @property
    def row_bytes(self) -> int:
        """Weights and state."""
        return self.weight_bytes + self.state_bytes


def new_log_bytes(
    log_store: bool, tables: Iterable[_core.TableSpec], scratchpad_bytes: int, *, num_writers: int = 1
) -> int:
    """Size of the log of a new pool with these tables, or of one writer of several, where nobody says."""
    layouts = ((expected_rows(table), layout_of(table)) for table in tables)
    table_bytes = sum(rows * layout.row_bytes for rows, layout in layouts)
    return log_bytes_of(log_store, table_bytes // num_writers, scratchpad_bytes)


def expected_rows(table: _core.TableSpec) -> int:
    """Of a table with keys nobody knows; a capacity that nobody chose is no reason for gigabytes."""
    if not table.keys:
        return table.num_embeddings
    chosen = table.num_embeddings if table.num_embeddings != DEFAULT_CAPACITY else _EXPECTED_KEYS
    return min(chosen, table.max_keys or chosen)


def layout_of(table: _core.TableSpec) -> RowLayout:
    dim = table.embedding_dim
    state: tuple[tuple[tuple[str, int], ...], ...] = (
        (),
        (("momentum1", 1),),
        (("momentum1", dim),),
        (("exp_avg", dim), ("exp_avg_sq", dim)),
        (("exp_avg", dim), ("exp_avg_sq", 1)),
    )
    return RowLayout(
        weight_bytes=dim * _DTYPE_BYTES[table.dtype],
        state=state[table.optimizer],
        key_bytes=KEY_RECORD.itemsize if table.keys else 0,
    )


def open_untrained(directory: Path) -> _core.Pool:
    """A pool opened for writing, exactly recovered, in which nothing is going to be trained."""

    def opened() -> _core.Pool:
        return _core.Pool(
            str(directory),
            relaxed=False,
            dense_interval=1,
            grow_log=False,
            scratchpad_bytes=_SCRATCHPAD_BYTES,
            trust_after_reboot=False,
        )

    return outlasting_readers(directory / LOCK_FILE, opened, PoolBusy)


class PoolReader(Protocol):
    """_core.Reader, or a GroupReader over the parts of several writers."""

    @property
    def header(self) -> dict[str, Any]: ...
    @property
    def tables(self) -> list[_core.TableSpec]: ...
    @property
    def medium(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def clean(self) -> bool: ...
    @property
    def commit(self) -> dict[str, Any]: ...
    @property
    def log_bytes_used(self) -> int: ...
    @property
    def merged_step(self) -> int | None: ...
    def dense_state(self) -> tuple[int, bytes, bytes] | None: ...
    def touched_rows(self, table: int, first: int, count: int) -> list[int]: ...
    def gather_rows(
        self,
        table: int,
        rows: Sequence[int],
        weights: NDArray[np.uint8],
        state: NDArray[np.uint8],
        differs: NDArray[np.uint8],
    ) -> None: ...
    def read_rows(
        self, table: int, first: int, count: int, weights: NDArray[np.uint8], state: NDArray[np.uint8]
    ) -> None: ...
    def collection(self, tables: Sequence[int], features: Sequence[tuple[str, int]]) -> Any: ...
    def evaluate(self, plan: Any, out: NDArray[np.float32]) -> None: ...


class Recovered(Protocol):
    """_core.RecoveryReport, or what all writers' say together."""

    @property
    def clean(self) -> bool: ...
    @property
    def step(self) -> int: ...


def check_exists(directory: Path) -> None:
    """Raises PoolNotFound where there is no pool, of one writer or of several; and what `check_vacant` raises where
    parts of one are left."""
    if not exists(directory) and not is_of_group(directory):
        check_vacant(directory)
        raise PoolNotFound(f"{directory} holds no pool")


def open_reader(directory: Path) -> PoolReader:
    """The pool, seen without a lock and without changing it."""
    check_exists(directory)
    if is_of_group(directory):
        from holdfast.group.reading import GroupReader

        return GroupReader(directory)
    return _core.Reader(str(directory))


@contextmanager
def at_rest(directory: Path) -> Iterator[tuple[PoolReader, Recovered | None]]:
    """The pool, recovered exactly and locked; and what recovery did (None: nothing could be done or was needed, because
    the medium is read-only and the pool was closed cleanly)."""
    check_exists(directory)
    if is_of_group(directory):
        from holdfast.group import reading as of_group

        with of_group.at_rest(directory) as found:
            yield found
        return
    try:
        pool = open_untrained(directory)
    except PoolReadOnly:
        reader = _core.Reader(str(directory))
        if not reader.clean:
            raise
        yield reader, None
        return
    try:
        yield _core.Reader(str(directory)), pool.recovery
    finally:
        pool.close()


@contextmanager
def locked(directory: Path, *, alone: bool = False) -> Iterator[None]:
    """Keeps writers out for a while, of a pool or of what is left of one; alone: others that keep them out, too. Raises
    PoolBusy where one is at work; says which."""
    with suppress(Corrupted, PoolOfGroup):
        check_exists(directory)
    parts = [directory]
    if not exists(directory):
        parts += [path.parent for where in ("dense", "writers-*/*") for path in directory.glob(f"{where}/{LOCK_FILE}")]
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(_locked(part, alone=alone))
        yield


@contextmanager
def _locked(directory: Path, *, alone: bool) -> Iterator[None]:
    file = directory / LOCK_FILE
    try:
        flags = os.O_RDWR | os.O_CREAT if alone else os.O_RDONLY
        lock = outlasting_readers(file, lambda: FileLock(file, flags, shared=not alone), BlockingIOError)
    except FileNotFoundError:
        yield  # nobody has ever opened it here
        return
    except BlockingIOError:
        if alone and is_lock_shared(file):
            raise PoolBusy(f"{directory} {BEING_READ}") from None
        raise PoolBusy(
            f"{directory} is open for writing in process {signed_by(file)}; wait for it, stop it, or take a snapshot "
            "beside it"
        ) from None
    with lock:
        if alone:
            lock.sign()
        yield


def is_in_use(directory: Path) -> bool:
    """Whether a process has the pool open for writing at this moment."""
    try:
        with locked(directory):
            return False
    except PoolBusy:
        return True


class ReadOnlyPool:
    """What EmbeddingBagCollection asks of a Pool, over a Reader: forward in ``eval()`` mode is all that works."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.core = open_reader(directory)
        self.collections: list[object] = []

    @property
    def commits_behind(self) -> bool:
        """As in Pool: here nothing is committed."""
        return False

    def open_rows(self, tables: Sequence[EmbeddingBagConfig], optimizer: RowOptimizerSpec, device: DeviceConfig) -> Any:
        """See Pool."""
        from holdfast.slots.access import open_access

        numbers, features = self.attach(tables, optimizer.kind, OPTIMIZERS), features_of(tables)
        pool: Any = self
        return open_access(pool, self.core.collection(numbers, features), numbers, features, device)

    def attach(self, tables: Sequence[EmbeddingBagConfig], optimizer: int, optimizers: Sequence[str]) -> list[int]:
        specs = [to_spec(table, optimizer) for table in tables]
        return find_tables(self.core.tables, specs, optimizers, f"the pool in {self.directory}")


def medium_words(pool: _core.Pool | PoolReader) -> str:
    """What a pool lies on, and what its durable steps survive."""
    return describe_medium(pool.medium, pool.header)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some rows of a table, ascending. weights, state: uint8 ``[n, bytes]``; differs: bool ``[n]``, whether a row's
    bits are other than its initial ones."""

    rows: NDArray[np.uint64]
    weights: NDArray[np.uint8]
    state: NDArray[np.uint8]
    differs: NDArray[np.bool_]


def touched_rows(reader: PoolReader, table: int, chunk_rows: int = 16_384) -> Iterator[RowChunk]:
    """The rows that an update has ever written."""
    layout = layout_of(reader.tables[table])
    first = 0
    while rows := reader.touched_rows(table, first, chunk_rows):
        weights = np.empty((len(rows), layout.weight_bytes), np.uint8)
        state = np.empty((len(rows), layout.state_bytes), np.uint8)
        differs = np.empty(len(rows), np.uint8)
        reader.gather_rows(table, rows, weights.reshape(-1), state.reshape(-1), differs)
        yield RowChunk(np.array(rows, np.uint64), weights, state, differs.astype(np.bool_))
        first = rows[-1] + 1
