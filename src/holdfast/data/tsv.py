"""Lines of raw Criteo text to columns of numbers, a block of whole lines at a time, without a Python step per line or
field.

A line is a label, integer columns, then categorical columns, between tabs. What is tolerated:

- ``\\r\\n`` ends a line as ``\\n`` does; the last line of a file needs no end at all.
- An empty line is no sample (it counts as a line).
- An empty field is a missing value, but for the label.
- The last line of a file that is not empty may lack fields: those are missing values too. Anywhere else a line that
  lacks fields is malformed, because there it means that something was lost.

Fields are read eight bytes at once: the word that ends with the field, with what lies before the field masked out,
gives its digits by a few 64-bit operations for all fields of a block together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.hashing import key_values, text_values

CategoryEncoding = Literal["hex", "text"]

FRONT_PAD_BYTES = 16
"""Bytes before the text in a parser's buffer: a field's word may begin before the text does."""
BACK_PAD_BYTES = 8

_TAB, _NEWLINE, _RETURN = 9, 10, 13
_MAX_DIGITS = 16
_ZEROS = 0x3030303030303030
_LANES_1 = np.uint64(0x0101010101010101)
_LANES_F = np.uint64(0x0F0F0F0F0F0F0F0F)
_LANES_80 = np.uint64(0x8080808080808080)
_LANES_7F = np.uint64(0x7F7F7F7F7F7F7F7F)
# by the number of the field's bytes in the word, 0 to 8: which bits are the field's (the word's last bytes are its
# highest)
_FIELD_BITS = np.array([0, *(((1 << 64) - 1) ^ ((1 << (8 * (8 - size))) - 1) for size in range(1, 9))], np.uint64)
_OUTSIDE_ZEROS = np.array([_ZEROS & ~int(bits) for bits in _FIELD_BITS], np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TsvLayout:
    """The fields of a line after the label, by name. keys: categories that are texts become keys."""

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    categorical_encoding: CategoryEncoding
    keys: bool = False

    @property
    def num_fields(self) -> int:
        return 1 + len(self.dense) + len(self.categorical)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLines:
    """The well-formed lines of a block, ``n`` of them.

    labels: uint8 ``[n]``. integers, integers_missing: int64 and bool ``[num_dense, n]``. categories,
    categories_missing: the categories' values or keys (see hashing.py), int64, and bool, ``[num_categorical, n]``.
    Where missing, the value means nothing.
    """

    labels: NDArray[np.uint8]
    integers: NDArray[np.int64]
    integers_missing: NDArray[np.bool_]
    categories: NDArray[np.int64]
    categories_missing: NDArray[np.bool_]

    @property
    def num_samples(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True, slots=True)
class BadLine:
    """A malformed line: its number in the file, from 1, and what is wrong with it."""

    line: int
    reason: str


def padded_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """An empty buffer for ``num_bytes`` of text, which belong at ``[FRONT_PAD_BYTES : FRONT_PAD_BYTES +
    num_bytes]``."""
    buffer = np.empty(FRONT_PAD_BYTES + num_bytes + BACK_PAD_BYTES, np.uint8)
    buffer[:FRONT_PAD_BYTES] = ord("0")
    buffer[FRONT_PAD_BYTES + num_bytes :] = _NEWLINE
    return buffer


def count_samples(newlines: NDArray[np.intp], text: NDArray[np.uint8], begin: int) -> NDArray[np.bool_]:
    """Which of the lines that end at ``newlines`` (positions in ``text``; the first line begins at ``begin``) are not
    empty."""
    begins = np.empty_like(newlines)
    begins[:1] = begin
    begins[1:] = newlines[:-1] + 1
    lengths = newlines - begins
    is_return = (lengths == 1) & (text[begins] == _RETURN)
    return np.asarray((lengths > 0) & ~is_return)


def parse_lines(
    buffer: NDArray[np.uint8], num_bytes: int, layout: TsvLayout, *, first_line: int, ends_file: bool
) -> tuple[ParsedLines, list[BadLine]]:
    """The lines in a ``padded_buffer`` that holds ``num_bytes`` of text, the first being line ``first_line`` of its
    file.

    ends_file: whether the last line here that is not empty is also the file's. Malformed lines are left out of the
    columns and listed in their order.
    """
    end = FRONT_PAD_BYTES + num_bytes
    if num_bytes and buffer[end - 1] != _NEWLINE:
        end += 1  # the padding holds a newline
    fields = _find_fields(buffer, end, layout.num_fields, ends_file=ends_file)
    num_dense = len(layout.dense)
    labels = buffer[fields.starts[0]] - np.uint8(ord("0"))
    is_bad = (fields.lengths[0] != 1) | (labels > 1)
    integers, is_integer = _parse_integers(buffer, fields.rows(1, 1 + num_dense))
    is_bad |= ~is_integer.all(axis=0)
    category_fields = fields.rows(1 + num_dense, layout.num_fields)
    if layout.categorical_encoding == "hex":
        categories, is_hex = _parse_hex(buffer, category_fields)
        is_bad |= ~is_hex.all(axis=0)
    else:
        to_values = key_values if layout.keys else text_values
        categories = to_values(buffer, category_fields.starts, category_fields.lengths)
    parsed = ParsedLines(
        labels=labels,
        integers=integers,
        integers_missing=fields.lengths[1 : 1 + num_dense] == 0,
        categories=categories,
        categories_missing=category_fields.lengths == 0,
    )
    bad_in_block = [*fields.wrong_counts]
    if is_bad.any():
        for position in np.flatnonzero(is_bad).tolist():
            texts = [
                buffer[start : start + length].tobytes()
                for start, length in zip(fields.starts[:, position], fields.lengths[:, position], strict=True)
            ]
            bad_in_block.append((int(fields.lines[position]), _reason(texts, layout)))
        is_good = ~is_bad
        parsed = ParsedLines(
            labels=parsed.labels[is_good],
            integers=parsed.integers[:, is_good],
            integers_missing=parsed.integers_missing[:, is_good],
            categories=parsed.categories[:, is_good],
            categories_missing=parsed.categories_missing[:, is_good],
        )
    return parsed, [BadLine(first_line + line, reason) for line, reason in sorted(bad_in_block)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """Where fields lie in the buffer. starts, lengths: int64 ``[num_fields, n]``; lines: the lines' indices in the
    block, ``[n]``; wrong_counts: (index, reason) of lines with another number of fields."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    lines: NDArray[np.int64]
    wrong_counts: tuple[tuple[int, str], ...] = ()

    def rows(self, begin: int, end: int) -> _Fields:
        return _Fields(starts=self.starts[begin:end], lengths=self.lengths[begin:end], lines=self.lines)


def _find_fields(buffer: NDArray[np.uint8], end: int, num_fields: int, *, ends_file: bool) -> _Fields:
    text = buffer[:end]
    separators = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    newlines = np.flatnonzero(text[separators] == _NEWLINE)
    counts = np.diff(newlines, prepend=-1)
    line_ends = separators[newlines]
    line_begins = np.empty_like(line_ends)
    line_begins[:1] = FRONT_PAD_BYTES
    line_begins[1:] = line_ends[:-1] + 1
    # a carriage return belongs to the line's end; before the first line the padding holds none
    line_ends = line_ends - (text[line_ends - 1] == _RETURN)
    if (counts == num_fields).all():
        ends = separators.reshape(-1, num_fields).copy()
        lines = np.arange(ends.shape[0])
        wrong: tuple[tuple[int, str], ...] = ()
    else:
        lines = np.flatnonzero(counts == num_fields)
        ends = separators[(newlines[lines] - num_fields + 1)[:, None] + np.arange(num_fields)]
        odd = np.flatnonzero((counts != num_fields) & (line_ends > line_begins))
        last = int(np.flatnonzero(line_ends > line_begins)[-1]) if (line_ends > line_begins).any() else -1
        if ends_file and last >= 0 and counts[last] < num_fields:
            short = np.full((1, num_fields), line_ends[last])
            short[0, : counts[last]] = separators[newlines[last] - counts[last] + 1 : newlines[last] + 1]
            ends, lines, odd = np.concatenate([ends, short]), np.append(lines, last), odd[odd != last]
        wrong = tuple((line, f"it has {counts[line]} fields, not {num_fields}") for line in odd.tolist())
    starts = np.empty_like(ends)
    starts[:, 0] = line_begins[lines]
    starts[:, 1:] = ends[:, :-1] + 1
    ends = np.minimum(ends, line_ends[lines][:, None])
    starts = np.minimum(starts, ends)
    return _Fields(
        starts=np.ascontiguousarray(starts.T),
        lengths=np.ascontiguousarray((ends - starts).T),
        lines=lines,
        wrong_counts=wrong,
    )


def _words(buffer: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The ``sizes`` (0 to 8) bytes at ``starts`` as the last bytes of little-endian words, ASCII zeros before them."""
    at_every_byte: NDArray[np.uint64] = np.ndarray((buffer.shape[0] - 7,), "<u8", buffer.data, strides=(1,))
    words: NDArray[np.uint64] = at_every_byte[starts + (sizes - 8)]
    words &= _FIELD_BITS[sizes]
    words |= _OUTSIDE_ZEROS[sizes]
    return words


def _parse_integers(buffer: NDArray[np.uint8], fields: _Fields) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Signed decimal numbers of up to 16 digits, and which fields hold one; an empty field counts as one, with value
    0."""
    is_negative = (buffer[fields.starts] == ord("-")) & (fields.lengths > 0)
    starts = fields.starts + is_negative
    sizes = fields.lengths - is_negative
    is_number = (sizes <= _MAX_DIGITS) & ((sizes > 0) | ~is_negative)
    low_sizes = np.minimum(sizes, 8)
    words = _words(buffer, starts + sizes - low_sizes, low_sizes)
    is_number &= _holds_decimal_digits(words)
    values = _decimal_value(words).view(np.int64)
    is_long = sizes > 8
    if is_long.any():
        long_sizes = np.minimum(sizes[is_long], _MAX_DIGITS) - 8
        words = _words(buffer, (starts + sizes)[is_long] - 8 - long_sizes, long_sizes)
        is_number[is_long] &= _holds_decimal_digits(words)
        values[is_long] += _decimal_value(words).view(np.int64) * 10**8
    np.negative(values, out=values, where=is_negative)
    return values, is_number


def _parse_hex(buffer: NDArray[np.uint8], fields: _Fields) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Hexadecimal numbers of up to 16 digits as int64 bits, and which fields hold one; an empty field counts as one
    (0)."""
    sizes = fields.lengths
    is_hex = sizes <= _MAX_DIGITS
    low_sizes = np.minimum(sizes, 8)
    words = _words(buffer, fields.starts + sizes - low_sizes, low_sizes)
    is_hex &= _holds_hex_digits(words)
    values = _hex_value(words)
    is_long = sizes > 8
    if is_long.any():
        long_sizes = np.minimum(sizes[is_long], _MAX_DIGITS) - 8
        words = _words(buffer, (fields.starts + sizes)[is_long] - 8 - long_sizes, long_sizes)
        is_hex[is_long] &= _holds_hex_digits(words)
        values[is_long] |= _hex_value(words) << np.uint64(32)
    return values.view(np.int64), is_hex


def _holds_decimal_digits(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    # per byte below 0x80: adding 0x50 carries into the top bit from '0' on, adding 0x46 only beyond '9'
    low = words & _LANES_7F
    in_range = (low + _LANES_1 * np.uint64(0x50)) & ~(low + _LANES_1 * np.uint64(0x46)) & ~words
    return np.asarray((in_range & _LANES_80) == _LANES_80)


def _holds_hex_digits(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    low = words & _LANES_7F
    is_digit = (low + _LANES_1 * np.uint64(0x50)) & ~(low + _LANES_1 * np.uint64(0x46))
    # the same for 'a' to 'f', with capitals made small
    low |= _LANES_1 * np.uint64(0x20)
    is_digit |= (low + _LANES_1 * np.uint64(0x1F)) & ~(low + _LANES_1 * np.uint64(0x19))
    is_digit &= ~words
    is_digit &= _LANES_80
    return np.asarray(is_digit == _LANES_80)


def _decimal_value(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The number that eight ASCII digits spell, the first in the lowest byte: pairs, then fours, then all eight."""
    values = words & _LANES_F
    values = (values * np.uint64(10) + (values >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    values = (values * np.uint64(100) + (values >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return np.asarray((values * np.uint64(10_000) + (values >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


def _hex_value(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (words & _LANES_F) + ((words >> np.uint64(6)) & _LANES_1) * np.uint64(9)
    values = ((values << np.uint64(4)) | (values >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    values = ((values << np.uint64(8)) | (values >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return np.asarray(((values << np.uint64(16)) | (values >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


def _reason(texts: list[bytes], layout: TsvLayout) -> str:
    """What is wrong with a line of the right number of fields, one of which is malformed."""
    label, integers = texts[0], texts[1 : 1 + len(layout.dense)]
    if label not in (b"0", b"1"):
        return f"the label is {_shown(label)}, not 0 or 1"
    for name, text in zip(layout.dense, integers, strict=True):
        digits = text.removeprefix(b"-")
        if text and not (digits.isdigit() and len(digits) <= _MAX_DIGITS):
            return f"column {name}: {_shown(text)} is not an integer of up to {_MAX_DIGITS} digits"
    for name, text in zip(layout.categorical, texts[1 + len(layout.dense) :], strict=True):
        if len(text) > _MAX_DIGITS or set(text.lower()) - set(b"0123456789abcdef"):
            return f"column {name}: {_shown(text)} is not a hexadecimal number of up to {_MAX_DIGITS} digits"
    raise AssertionError(f"no fault found in a line that was called malformed: {texts}")


def _shown(text: bytes) -> str:
    """A field as a message shows it: quoted, and not too much of it."""
    return repr(text[:40].decode("utf-8", "backslashreplace")) + ("..." if len(text) > 40 else "")
