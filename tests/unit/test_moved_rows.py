"""Rows on their way into a snapshot, or out of it, beside plain dictionaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.snapshot.rows import Rows, order_of

_NUMBERS = st.lists(st.integers(0, 40) | st.integers(0, 2**63 - 1), max_size=30, unique=True)


def _rows(numbers: list[int], width: int, seed: int) -> Rows:
    data = np.random.default_rng(seed).integers(0, 256, (len(numbers), width), np.uint8)
    return Rows(np.array(numbers, np.uint64), data)


def _as_dict(rows: Rows) -> dict[int, bytes]:
    found = {int(row): data.tobytes() for row, data in zip(rows.rows, rows.data, strict=True)}
    assert len(found) == len(rows)
    return found


@given(parts=st.lists(_NUMBERS, min_size=1, max_size=4), width=st.sampled_from([1, 7, 260]))
def test_joined_rows_are_each_as_the_first_part_has_it_and_ascend(parts: list[list[int]], width: int) -> None:
    each = [_rows(sorted(numbers), width, seed) for seed, numbers in enumerate(parts)]
    expected: dict[int, bytes] = {}
    for rows in reversed(each):
        expected |= _as_dict(rows)
    joined = Rows.joined(each)
    assert _as_dict(joined) == expected
    assert list(joined.rows) == sorted(expected)


@given(numbers=_NUMBERS, width=st.sampled_from([1, 7, 260]))
def test_rows_in_order_are_the_same_rows(numbers: list[int], width: int) -> None:
    rows = _rows(numbers, width, 1)
    in_order = rows.taken(order_of(rows.rows))
    assert _as_dict(in_order) == _as_dict(rows)
    assert list(in_order.rows) == sorted(numbers)


def test_numbers_that_are_not_side_by_side_are_put_in_order() -> None:
    numbers = np.arange(60, dtype=np.uint64)[::-2]
    assert list(numbers[order_of(numbers)]) == sorted(numbers)


@pytest.mark.parametrize(
    ("order", "out"),
    [
        ([0, 3], (2, 5)),  # a place beyond
        ([-1], (1, 5)),
        ([0], (2, 5)),  # another number of lines
        ([0], (1, 4)),  # shorter lines
        ([0], (1, 9)),
    ],
)
def test_the_core_takes_nothing_from_beyond_an_array(order: list[int], out: tuple[int, int]) -> None:
    values: NDArray[Any] = np.zeros((3, 5), np.uint8)
    with pytest.raises((ValueError, IndexError)):
        _core.take_values(values, np.array(order, np.int64), np.zeros(out, np.uint8))


def test_the_core_takes_no_number_of_a_table_that_is_not_there(tmp_path: Path) -> None:
    fields = {"num_embeddings": 10, "embedding_dim": 4, "dtype": 0, "optimizer": 0, "pooling": 0}
    table = _core.TableSpec(name="t", init_low=0.0, init_high=1.0, **fields)
    for name, log_store in (("in place", False), ("log", True)):
        (tmp_path / name).mkdir()
        _core.Pool.create(str(tmp_path / name), 1, 1 << 16, [table], log_store)
        reader = _core.Reader(str(tmp_path / name))
        assert list(reader.touched_rows(0, 0, 5)) == []
        with pytest.raises(IndexError):
            reader.touched_rows(1, 0, 5)


def test_an_order_needs_as_much_room_as_there_are_rows() -> None:
    with pytest.raises(ValueError, match="arrays"):
        _core.ascending_order(np.zeros(3, np.uint64), np.zeros(2, np.int64))
