"""Hashing is part of what a pool's rows mean: these values never change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.hashing import MISSING_ID, hash_values, mix64, text_values


def values_of(*texts: bytes):
    data = np.frombuffer(b"".join(texts), np.uint8)
    lengths = np.array([len(text) for text in texts])
    return text_values(data, np.cumsum(lengths) - lengths, lengths).view(np.uint64).tolist()


def test_mix64_is_splitmix64():
    # the first outputs of SplitMix64 from state 0, as its authors' C code prints them
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [f"{value:x}" for value in mix64(states).tolist()] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "6c45d188009454f",
    ]


def test_texts_are_hashed_by_fnv_1a():
    # from the test vectors of the FNV reference code
    assert [f"{value:x}" for value in values_of(b"", b"a", b"foobar")] == [
        "cbf29ce484222325",
        "af63dc4c8601ec8c",
        "85944171f73967e8",
    ]


def test_ids_of_values_are_pinned():
    values = np.array([0, 1, -1, 0x68FD1E64, 2**62], np.int64)
    assert hash_values(values, 1_000_000).tolist() == [1, 564809, 698965, 42426, 474895]
    assert hash_values(values, 7).tolist() == [1, 2, 4, 6, 4]


def test_missing_has_an_id_of_its_own():
    values = np.arange(10_000)
    missing = values % 10 == 0
    ids = hash_values(values, 50, missing)
    assert (ids[missing] == MISSING_ID).all()
    assert set(ids[~missing].tolist()) == set(range(1, 50))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 2**40))
def test_ids_lie_in_the_table_and_do_not_depend_on_neighbours(values, num_embeddings):
    ids = hash_values(np.array(values, np.int64), num_embeddings)
    assert ((ids >= 0) & (ids < num_embeddings)).all()
    alone = [int(hash_values(np.array([value], np.int64), num_embeddings)[0]) for value in values]
    assert ids.tolist() == alone
    if num_embeddings > 1:
        expected = [
            1 + int(mix64(np.array([value], np.int64).view(np.uint64))[0]) % (num_embeddings - 1) for value in values
        ]
        assert ids.tolist() == expected
