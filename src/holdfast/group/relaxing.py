"""Relaxed recovery of a group: it goes on from the newest step whose rows all writers have, and an older dense state.

Before the parts are opened, the newest dense state at or before that step becomes one of that step; then exact recovery
goes there. So it is done whole, or not at all, wherever a rank dies.

Invariants
- The dense state of before stays in the other slot: where a power cut takes the rows of that step back, all go back to
  it, exactly. So they do where a death interrupted that: rows of some part may be half way.
- Nothing but the dense states is written; parts are looked at without opening them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import _core
from holdfast.errors import HoldfastError
from holdfast.group.founding import DENSE_DIRECTORY
from holdfast.group.manifest import Manifest
from holdfast.group.opening import Talk, newest_common_step, open_together
from holdfast.pools.one_rank import OneRank
from holdfast.pools.opening_options import Mark, OpenOptions


def keep_newest_rows(
    directory: Path, manifest: Manifest, writers: Sequence[int], talk: Talk, options: OpenOptions, *, has_dense: bool
) -> int | None:
    """All ranks call it, where the group's lock is held and before anything is opened. Returns the step of the dense
    state that newer rows are going to lie beside; None where there are none.

    writers: whose parts are looked at from here. has_dense: the dense states are this process's to write.
    Raises what any rank meets: Corrupted, PoolNotFound...
    """
    told: dict[str, Any] = {"rows": [], "dense": None, "returning": False}
    failure = None
    try:
        # Dense states first: the one that all have stays until all have the next.
        if has_dense:
            told["dense"] = _core.Reader(str(directory / DENSE_DIRECTORY)).dense_marks()
        parts = [_core.Reader(str(manifest.writer_directory(directory, writer))) for writer in writers]
        commits = [part.commit for part in parts]
        told["rows"] = [(commit["step"], commit["cursor"], commit["row_updates"]) for commit in commits]
        told["returning"] = any(part.unfinished_return is not None for part in parts)
    except HoldfastError as error:
        failure = error
    surveys = talk.gather(told, "everyone's newest rows")
    talk.agree_that_none_failed(failure, "everyone's newest rows")
    step, _, _ = newest_common_step(surveys)
    newest: Mark = min(tuple(mark) for survey in surveys for mark in survey["rows"])
    if newest[0] == step or any(survey["returning"] for survey in surveys):
        return None
    failure = None
    if has_dense:
        try:
            _date_dense_state(directory / DENSE_DIRECTORY, newest, surveys, options)
        except HoldfastError as error:
            failure = error
    talk.agree_that_none_failed(failure, "the dense state beside the newest rows")
    return step


def _date_dense_state(dense: Path, newest: Mark, surveys: Sequence[dict[str, Any]], options: OpenOptions) -> None:
    """Makes the newest dense state that all could go back to one of the step of `newest`."""
    _, pool, _ = open_together([], dense, options, _Surveyed(surveys))
    assert pool is not None
    try:
        state = pool.dense_state()
        assert state is not None
        structure, tensors = state
        data = np.frombuffer(tensors, np.uint8)
        pool.commit_dense(newest, structure, [(data.ctypes.data, len(data), 0)] if len(data) else [], len(data))
        pool.flush()
    finally:
        pool.close()


class _Surveyed(OneRank):
    """Opens the dense states' pool alone, with what the other pools of the group have said."""

    def __init__(self, surveys: Sequence[dict[str, Any]]) -> None:
        self._rows = [mark for survey in surveys for mark in survey["rows"]]

    def gather(self, value: Any, what: str, *, among_trainers: bool = False) -> list[Any]:
        is_survey = isinstance(value, dict)
        return [{**value, "rows": self._rows} if is_survey else value]
