"""The order of the stream."""

from __future__ import annotations

import hashlib
from itertools import dropwhile, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.shuffle import SampleOrder

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def order_of(block_sizes, epoch_groups):
    """Sample numbers in the order that groups and permutations give."""
    begins = np.cumsum(block_sizes) - block_sizes
    order = []
    for span, permutation in epoch_groups:
        samples = np.concatenate(
            [
                np.arange(begins[block], begins[block] + block_sizes[block])
                for block in [piece.block for piece in span.pieces]
            ]
        )
        order.extend((samples if permutation is None else samples[permutation]).tolist())
    return order


def epoch_of(order, block_sizes, epoch):
    groups = []
    for span in order.groups_from(epoch * order.num_samples):
        if span.epoch != epoch:
            break
        groups.append((span, order.permutation(span)))
    return order_of(block_sizes, groups)


@given(sizes=sizes, seed=st.integers(0, 2**63 - 1), window=st.none() | st.integers(1, 50), epoch=st.integers(0, 3))
def test_every_epoch_holds_every_sample_once(sizes, seed, window, epoch):
    block_sizes = np.array(sizes)
    order = SampleOrder(block_sizes, seed=seed, window_samples=window)
    samples = epoch_of(order, block_sizes, epoch)
    assert sorted(samples) == list(range(sum(sizes)))
    if window is None:
        assert samples == sorted(samples)


@given(sizes=sizes, window=st.none() | st.integers(1, 50), position=st.integers(0, 500))
def test_groups_from_a_position_are_the_groups_of_the_whole_stream(sizes, window, position):
    order = SampleOrder(np.array(sizes), seed=3, window_samples=window)
    found = list(islice(order.groups_from(position), 5))
    assert found[0].start <= position < found[0].end
    behind = list(islice(dropwhile(lambda span: span.end <= position, order.groups_from(0)), 5))
    assert found == behind
    assert all(left.end == right.start for left, right in pairwise(found))


def test_a_group_holds_no_more_than_window_and_a_block():
    order = SampleOrder(np.full(100, 10), seed=1, window_samples=25)
    spans = list(islice(order.groups_from(0), 200))
    assert max(span.num_samples for span in spans) < 25 + 10
    assert all(len(span.pieces) > 1 for span in spans[:30])


def test_seed_and_epoch_make_other_orders():
    block_sizes = np.full(50, 20)
    orders = {
        tuple(epoch_of(SampleOrder(block_sizes, seed=seed, window_samples=100), block_sizes, epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_shuffled_order_is_pinned():
    # a run's cursor means a position in this order: it may never change
    block_sizes = np.array([3, 4, 2, 3])
    order = SampleOrder(block_sizes, seed=7, window_samples=6)
    assert epoch_of(order, block_sizes, 0) == [3, 10, 6, 4, 11, 9, 5, 1, 0, 2, 7, 8]
    assert epoch_of(order, block_sizes, 1) == [5, 4, 3, 6, 11, 10, 9, 2, 0, 1, 8, 7]


@pytest.mark.parametrize(
    ("seed", "window", "sizes", "expected"),
    [
        (0, 1, [1] * 50, "a0f5e013a81d9a20"),
        (2**63 - 1, 100, range(1, 60), "f4450c2e33f08d62"),
        (7, 1000, [64] * 40, "ca43f1648fc2b9bf"),
        (3, 50, [500, 1, 1, 1, 1, 1, 1, 1], "6b76abb0eba0fc8a"),
        (5, None, [3, 9, 2], "a7cf736ba1fd4edf"),
    ],
)
def test_one_lane_is_the_order_of_before_there_were_lanes(seed, window, sizes, expected):
    block_sizes = np.array(sizes)
    order = SampleOrder(block_sizes, seed=seed, window_samples=window)
    samples = [sample for epoch in range(3) for sample in epoch_of(order, block_sizes, epoch)]
    samples.append(epoch_of(order, block_sizes, 3)[0])
    assert hashlib.sha256(np.array(samples, "<i8").tobytes()).hexdigest()[:16] == expected


def test_neighbours_in_the_file_are_apart_in_the_stream():
    block_sizes = np.full(1000, 10)
    samples = np.array(epoch_of(SampleOrder(block_sizes, seed=0, window_samples=2000), block_sizes, 0))
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(samples)) == 1).mean() < 0.01
