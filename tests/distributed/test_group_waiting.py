"""What a rank makes of a wait that ran out: the work's own end counts, whenever it came."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from holdfast.errors import GroupError
from holdfast.group.group import Group
from holdfast.group.notices import NOT_YET
from holdfast.group.options import GroupOptions


class EndsAsTheWaitRunsOut:
    """Work that ends between a wait that ran out and whoever asks whether it has ended."""

    def __init__(self, how: Exception | None) -> None:
        self._how = how
        self._waits = 0

    def is_completed(self) -> bool:
        return self._waits > 0

    def wait(self, _: timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError(NOT_YET)
        if self._how is not None:
            raise self._how


class StoppedInItsFirstWait:
    """Work of another rank that was stopped together with this one, and goes on a moment after it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waits = 0

    def is_completed(self) -> bool:
        return self._waits > 2

    def wait(self, _: timedelta) -> None:
        self._waits += 1
        time.sleep(self._seconds if self._waits == 1 else 0.0)
        if not self.is_completed():
            raise RuntimeError(NOT_YET)


@pytest.fixture
def group() -> Any:
    alone = Group.from_environment(GroupOptions(timeout=1.0))
    yield alone
    alone.close()


def test_work_that_ends_in_the_moment_in_which_a_wait_runs_out_has_ended_well(group: Group) -> None:
    work = EndsAsTheWaitRunsOut(None)
    group.await_work(cast("dist.Work", work), "an answer")
    assert work.is_completed()


def test_work_that_fails_in_the_moment_in_which_a_wait_runs_out_has_failed(group: Group) -> None:
    work = EndsAsTheWaitRunsOut(RuntimeError("Connection closed by peer"))
    with pytest.raises(GroupError, match="waiting for an answer"):
        group.await_work(cast("dist.Work", work), "an answer")


def test_ranks_that_are_all_stopped_for_longer_than_the_timeout_go_on_with_each_other(group: Group) -> None:
    work = StoppedInItsFirstWait(2 * group.timeout)
    group.await_work(cast("dist.Work", work), "an answer")
    assert work.is_completed()
