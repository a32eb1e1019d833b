"""A loader goes on with other data where those of before ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pytest
import torch

from holdfast.data.loader import Loader
from holdfast.data.synthetic import SyntheticSource, uniform_shape
from holdfast.errors import ConfigError

BATCH = 16


class Day(SyntheticSource):
    """A source that tells its files from its columns, as those of files do."""

    def __init__(self, day: int, rows: int = 50) -> None:
        super().__init__(uniform_shape(num_samples=100 + day, num_tables=2, rows_per_table=rows, sample_seed=day))
        self._day, self._rows = day, rows

    def fingerprint(self) -> Mapping[str, str | int]:
        return {"kind": "day", "columns": f"{self._rows} rows", "files": f"day {self._day}"}


def loader(day: int, **options: Any) -> Loader[Any]:
    return Loader(Day(day), batch_size=BATCH, seed=3, **options)


def taken(batches: Loader[Any], count: int) -> list[Any]:
    return list(islice(batches, count))


def after(day: int, batches: int, **options: Any) -> dict[str, int | str]:
    """The state, as a file has it, of a loader that gave so many."""
    with loader(day, **options) as former:
        taken(former, batches)
        state: dict[str, int | str] = json.loads(json.dumps(former.state_dict()))
        return state


@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"shuffle": False}, {"part": (1, 2), "workers": 3}])
def test_new_data_give_the_batches_of_their_own_and_count_on(options: dict[str, Any]) -> None:
    state = after(1, 9, **options)
    with loader(2, **options) as alone, loader(2, new_data=True, **options) as following:
        following.load_state_dict(state)
        assert following.state_dict() == state  # of the data of before, until there is a batch
        for expected, batch in zip(taken(alone, 20), taken(following, 20), strict=True):
            assert (batch.number, batch.first_sample) == (expected.number + 9, expected.first_sample + 9 * BATCH)
            assert torch.equal(batch.dense, expected.dense)
            assert torch.equal(batch.features.values(), expected.features.values())
        assert following.samples == 29 * BATCH
        assert following.origin == 9 * BATCH


def test_where_they_begin_is_part_of_the_state_and_need_not_be_said_again() -> None:
    state = after(1, 9)
    with loader(2, new_data=True) as following:
        following.load_state_dict(state)
        taken(following, 3)
        state = following.state_dict()
        expected = taken(following, 5)
    for new_data in (False, True):
        with loader(2, new_data=new_data) as later:
            later.load_state_dict(state)
            assert later.state_dict() == state
            for batch, other in zip(taken(later, 5), expected, strict=True):
                assert batch.first_sample == other.first_sample
                assert torch.equal(batch.dense, other.dense)
    with loader(3, new_data=True) as third:
        third.load_state_dict(state)
        assert next(third).first_sample == third.origin == 12 * BATCH


def test_they_begin_where_a_pool_is_when_it_is_beyond_the_state() -> None:
    """Relaxed recovery: the rows may be of later steps than the dense state."""
    with loader(2, new_data=True) as following:
        following.load_state_dict(after(1, 9))
        following.seek(11 * BATCH)
        assert next(following).first_sample == following.origin == 11 * BATCH
        with pytest.raises(ConfigError, match=f"begin at position {11 * BATCH}, behind {10 * BATCH}"):
            following.seek(10 * BATCH)


def test_other_columns_are_no_new_data() -> None:
    with Loader(Day(2, rows=60), batch_size=BATCH, seed=3, new_data=True) as other:
        with pytest.raises(ConfigError, match=r"source\.columns"):
            other.load_state_dict(after(1, 9))
        assert next(other).number == 1
    with loader(2) as unsaid, pytest.raises(ConfigError, match=r"source\.files.*new_data=True"):
        unsaid.load_state_dict(after(1, 9))


@pytest.mark.parametrize("broken", [{"samples": -1}, {"samples": "9"}, {"origin": -4}, {"origin": "x"}])
def test_a_state_that_counts_nothing_is_refused(broken: dict[str, Any]) -> None:
    with loader(1) as same, pytest.raises(ConfigError, match="must be a count"):
        same.load_state_dict({**after(1, 9), **broken})
