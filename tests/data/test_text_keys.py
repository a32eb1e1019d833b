"""Keys of texts are part of what a pool's rows mean: these values never change."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.data.hashing import key_values
from holdfast.errors import DataError

# from python-xxhash 4.1.0 (xxHash 0.8.4), xxh64(text).intdigest()
XXH64 = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    "na\u00efve".encode(): 0xC07351DC8A26AFE6,
    b"0123456": 0x97EE4FE4A0FF4DFA,
    b"01234567": 0xE4BA22A49AD89D3F,
    b"item-00000000": 0x5057145ED844BE26,
    b"x" * 31: 0x60DD0D01083B99F0,
    b"x" * 32: 0xE2DF261FC2EC30EB,
    bytes(range(101)): 0xE99038495F85381E,
}


def keys_of(texts: object) -> list[int]:
    return (holdfast.text_keys(texts).numpy().view(np.uint64)).tolist()


def test_a_key_is_xxh64_as_every_other_library_has_it() -> None:
    assert keys_of(list(XXH64)) == list(XXH64.values())
    assert holdfast.text_keys(["abc"]).dtype == torch.int64


@pytest.mark.parametrize(
    "texts",
    [
        ["abc", "na\u00efve", ""],
        (b"abc", "na\u00efve".encode(), b""),
        np.array(["abc", "na\u00efve", ""]),
        np.array([["abc", "na\u00efve", ""]], object),
        pa.array(["another", "abc", "na\u00efve", ""])[1:],
        pa.array(["abc", "na\u00efve", ""], pa.large_string()),
        pa.chunked_array([[b"abc"], ["na\u00efve".encode(), b""]]),
        pa.array(["abc", "na\u00efve", ""]).dictionary_encode(),
    ],
    ids=["list", "bytes", "numpy", "objects", "slice", "large", "chunks", "dictionary"],
)
def test_a_text_has_one_key_however_it_comes(texts: object) -> None:
    assert keys_of(texts) == [XXH64[b"abc"], XXH64["na\u00efve".encode()], XXH64[b""]]


def test_no_texts_have_no_keys() -> None:
    for nothing in ([], np.array([], object), pa.array([], pa.string()), pa.chunked_array([], pa.string())):
        assert holdfast.text_keys(nothing).shape == (0,)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("abc", "not a str"),
        (b"abc", "not a bytes"),
        ({"abc"}, "not a set"),
        ([1, 2], "not a sequence of str or of bytes, but of int64"),
        ([["abc"]], "but of list"),
        (5, "not a sequence of str"),
        (["abc", None], "number 1 is missing"),
        ([None], "number 0 is missing"),
        (np.array(["abc", float("nan")], object), "number 1 is missing"),
        (["\ud800"], "not a sequence of str"),
    ],
)
def test_what_is_no_text_has_no_key(values: object, named: str) -> None:
    with pytest.raises(DataError, match=named):
        holdfast.text_keys(values)


@given(st.lists(st.binary(max_size=100), max_size=8), st.binary(max_size=9))
def test_a_key_does_not_depend_on_where_its_text_lies(texts: list[bytes], before: bytes) -> None:
    assert keys_of([before, *texts])[1:] == [keys_of([text])[0] for text in texts]


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 1), (0, -1), (0, 5), (4, 1), (5, 0), (2, 2**63 - 1), (2**63 - 1, 1)]
)
def test_a_text_beyond_the_data_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="beyond the data"):
        key_values(np.zeros(4, np.uint8), np.array([0, start]), np.array([4, length]))


@pytest.mark.dear
@pytest.mark.parametrize("form", ["{}", "item-{:012d}", "https://shop.example/p/{:x}?ref=home", "{0:b}-{0:x}"])
def test_keys_of_like_texts_meet_as_often_as_random_numbers(form: str) -> None:
    """In 28 of their 64 bits, where it can be counted: of 2^18 about 2^36 / 2^29 = 128 pairs meet; deviation 11."""
    keys = np.array(keys_of([form.format(number) for number in range(1 << 18)]), np.uint64)
    assert len(np.unique(keys)) == len(keys)
    for shift in (0, 18, 36):
        met = len(keys) - len(np.unique(keys << np.uint64(shift) >> np.uint64(36)))
        assert 128 - 5 * 11 < met < 128 + 5 * 11


def test_each_bit_of_a_text_changes_each_bit_of_its_key_half_the_time() -> None:
    draw = np.random.default_rng(1)
    for length in (3, 8, 13, 40):
        texts = draw.integers(0, 256, (4000, length), np.uint8)
        keys = np.array(keys_of([text.tobytes() for text in texts]), np.uint64)
        for bit in draw.choice(8 * length, 12, replace=False).tolist():
            changed = texts.copy()
            changed[:, bit // 8] ^= np.uint8(1 << bit % 8)
            flipped = keys ^ np.array(keys_of([text.tobytes() for text in changed]), np.uint64)
            shares = np.unpackbits(flipped.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
            assert np.abs(shares - 0.5).max() < 0.05  # six deviations of 4,000 coins
