"""What a step or a kernel may cost at least: arithmetic on what was measured, and nothing measured here.

Bytes of a kernel are the ones that it cannot do without: every unique row once, whatever it is read again; pooled
vectors and gradients once; indices once. Sums between two kernels are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT = _INDEX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of a batch, over all tables."""

    num_unique: int
    num_lookups: int
    num_bags: int
    dim: int


def lookup_bytes(batch: Counts) -> int:
    """Unique rows (4 dim each), 4 a lookup and 4 a bag of indices, 4 dim written a bag."""
    vectors = _FLOAT * batch.dim
    return batch.num_unique * vectors + _INDEX * (batch.num_lookups + batch.num_bags) + batch.num_bags * vectors


def update_bytes(batch: Counts, state_floats: int) -> int:
    """Gradients of the bags read (4 dim each), 4 a lookup and 8 a row of indices; rows and their state read once,
    written once in place and once for the way home."""
    row = _FLOAT * (batch.dim + state_floats)
    indices = _INDEX * (batch.num_lookups + 2 * batch.num_unique)
    return batch.num_bags * _FLOAT * batch.dim + indices + 3 * batch.num_unique * row


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes per second between host and device: to the device, to the host, and of both together when both are busy."""

    to_device: float
    to_host: float
    both: float


def link_seconds(bytes_to_device: float, bytes_to_host: float, link: Link) -> float:
    """A link of two directions is as slow as the slower of them, and as what it carries together."""
    return max(
        bytes_to_device / link.to_device,
        bytes_to_host / link.to_host,
        (bytes_to_device + bytes_to_host) / link.both,
    )


def commit_bytes(row_bytes: float, dense_bytes: float) -> float:
    """Of host memory, read and written, for a step's commit. row_bytes: of its unique rows and their state, whose old
    values are read at home and written to the undo log, and whose new ones are read where they arrived and written
    home. dense_bytes: of the dense state, read and written once."""
    return 4 * row_bytes + 2 * dense_bytes


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a step, in milliseconds, and what sets it."""

    ms: float
    by: str


def step_bound(*, resident_ms: float, link_ms: float, commit_ms: float) -> Bound:
    """resident_ms: of the same step with all rows in device memory. link_ms: of the bytes over the host link.
    commit_ms: of the bytes in host memory."""
    named = {"the step in device memory": resident_ms, "the host link": link_ms, "host memory": commit_ms}
    by = max(named, key=lambda name: named[name])
    return Bound(named[by], by)
