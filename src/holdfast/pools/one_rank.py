"""OneRank: a group of this process alone, whose collectives are no-ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import HoldfastError


class OneRank:
    """The part of Group that a process without others is asked for."""

    rank = 0
    world_size = 1
    num_trainers = 1
    is_trainer = True

    def gather(self, value: Any, what: str, *, among_trainers: bool = False) -> list[Any]:
        return [value]

    def gather_bytes(self, data: bytes, what: str, *, among_trainers: bool = False) -> list[bytes]:
        return [data]

    def gather_numbers(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        return [list(numbers)]

    def agree_that_none_failed(self, failure: HoldfastError | None, what: str) -> None:
        if failure is not None:
            raise failure
