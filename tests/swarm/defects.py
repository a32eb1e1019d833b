"""Defects that a swarm must catch, planted in every life: a test of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.admin.snapshot import taking
from holdfast.pools import pool
from holdfast.rows import near_memory
from holdfast.train import checkpoint


def _forgotten_row_update() -> None:
    """One update in five is not written."""
    update, calls = near_memory.NearMemoryRows.update, 0

    def forgets(self: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 5:
            update(self, **options)

    near_memory.NearMemoryRows.update = forgets  # type: ignore[method-assign]


def _called_durable_too_early() -> None:
    pool.Pool.durable_step = property(lambda self: self.core.step)  # type: ignore[assignment, method-assign]


def _random_numbers_not_restored() -> None:
    checkpoint.set_rng_state = lambda tree: None


def _cursor_one_batch_ahead() -> None:
    """Of every fourth step."""
    commit = pool.commit_to
    pool.commit_to = lambda core, cursor, dense: commit(core, cursor + (core.step % 4 == 3), dense)


def _snapshot_without_corrections() -> None:
    """What the log has and home has not is left out."""
    write = taking._Taking._write_layer

    def leaves_out(self: Any, number: int, layer: str) -> int:
        read = self._read
        if layer == "corrections":
            self._read = lambda *_: iter(())
        try:
            return write(self, number, layer)
        finally:
            self._read = read

    taking._Taking._write_layer = leaves_out  # type: ignore[method-assign]


# A disk that takes one write of a row log in so many, and says that it took all: see LifeOf.
LYING_DISK = "write-that-was-not-made"
DEFECTS: dict[str, Callable[[], None]] = {
    "forgotten-row-update": _forgotten_row_update,
    "called-durable-too-early": _called_durable_too_early,
    "random-numbers-not-restored": _random_numbers_not_restored,
    "cursor-one-batch-ahead": _cursor_one_batch_ahead,
    "snapshot-without-corrections": _snapshot_without_corrections,
    LYING_DISK: lambda: None,
}
