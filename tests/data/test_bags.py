"""JaggedFeatures.from_bags."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.batch import JaggedFeatures
from holdfast.errors import DataError


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@given(
    bags=st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=size, max_size=size), min_size=1, max_size=3
        )
    ),
    with_last=st.booleans(),
)
def test_bags_come_back_as_they_went_in(bags, with_last):
    if not with_last and all(not feature[-1] for feature in bags):
        with_last = True  # the one case that needs the last offset to be told apart
    given_bags = {}
    for number, feature in enumerate(bags):
        lengths = torch.tensor([0, *(len(bag) for bag in feature)])
        offsets = lengths.cumsum(0)
        ids = tensor(*(number for bag in feature for number in bag))
        given_bags[f"f{number}"] = (ids, offsets if with_last else offsets[:-1])
    features = JaggedFeatures.from_bags(given_bags)
    assert features.keys() == list(given_bags)
    assert features.stride() == len(bags[0])
    offsets, values = features.offsets().tolist(), features.values().tolist()
    flat = [bag for feature in bags for bag in feature]
    assert [values[begin:end] for begin, end in itertools.pairwise(offsets)] == flat
    assert features.values().dtype == features.offsets().dtype == torch.int64


def test_where_lengths_differ_the_longer_ones_carry_the_last_offset():
    features = JaggedFeatures.from_bags({"a": (tensor(1, 2), tensor(0, 1)), "b": (tensor(3), tensor(0, 1, 1))})
    assert features.offsets().tolist() == [0, 1, 2, 3, 3]


def test_no_feature_gives_an_empty_batch():
    features = JaggedFeatures.from_bags({})
    assert features.stride() == 0
    assert features.values().numel() == 0


def test_ids_without_offsets_are_as_many_of_each_sample():
    features = JaggedFeatures.from_bags({"user": tensor(7, 8), "items": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    assert features.offsets().tolist() == [0, 1, 2, 5, 8]
    assert features.values().tolist() == [7, 8, 1, 2, 3, 4, 5, 6]
    assert JaggedFeatures.from_bags({"none": torch.empty(3, 0, dtype=torch.int64)}).offsets().tolist() == [0, 0, 0, 0]


def test_a_feature_without_offsets_says_how_many_samples_there_are():
    """Without it, three offsets of which the last is the number of ids would be two bags."""
    ends_empty = (tensor(5, 6), tensor(0, 1, 2))
    assert JaggedFeatures.from_bags({"a": ends_empty}).stride() == 2
    features = JaggedFeatures.from_bags({"a": ends_empty, "user": tensor(1, 2, 3)})
    assert features.stride() == 3
    assert features.offsets().tolist() == [0, 1, 2, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("odd", "of"),
    [
        (tensor(1, 2), "samples"),
        (tensor(1, 2)[None, None], "1-D or 2-D"),
        (torch.ones(3), "torch.float32"),
        ((tensor(1, 2), tensor(0)), "1 offsets"),
        ((tensor(1), tensor(0), tensor(1)), "tuple"),
        ((tensor(1), None), "tuple"),
        ([1, 2, 3], "list"),
        ("ab", "str"),
        (None, "NoneType"),
    ],
)
def test_bags_that_do_not_fit_name_the_feature(odd, of):
    with pytest.raises(DataError, match=f"'odd'.*{of}"):
        JaggedFeatures.from_bags({"user": tensor(1, 2, 3), "odd": odd})


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        (tensor(1, 2), tensor(1, 2)),
        (tensor(1, 2, 3), tensor(0, 2, 1)),
        (tensor(1, 2), tensor(0, 5)),
        (tensor(1), tensor()),
        (tensor(1, 2), torch.tensor([0.0, 1.0])),
        (tensor(1, 2)[None], tensor(0, 1)),
    ],
)
def test_offsets_that_do_not_fit_name_the_feature(ids, offsets):
    with pytest.raises(DataError, match="'odd'"):
        JaggedFeatures.from_bags({"odd": (ids, offsets)})


def test_features_of_different_batch_sizes_are_refused():
    with pytest.raises(DataError, match="'b'"):
        JaggedFeatures.from_bags({"a": (tensor(1), tensor(0)), "b": (tensor(1, 2, 3), tensor(0, 1, 2))})
