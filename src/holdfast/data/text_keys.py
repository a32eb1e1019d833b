"""The keys of texts, for loops that read their own data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.arrow_file import text_column
from holdfast.data.hashing import key_values
from holdfast.errors import DataError


def text_keys(values: Any) -> Tensor:
    """The keys of texts, int64 ``[n]``: what a table with keys takes for ids.

    values: str or bytes (a str is its UTF-8), as a list, a NumPy array (flattened), an Arrow array or a column of
    pandas. A key is the XXH64 of the bytes with the seed 0, for good: in every version, on every machine, and in any
    other library that has XXH64. Of n different texts n² / 2^65 pairs are to be expected that have one key, and so
    share a row. Raises DataError for None and for what is no text: an integer is a key itself.
    """
    column = text_column(values)
    if column.missing.any():
        raise DataError(
            f"texts: number {int(np.argmax(column.missing))} is missing, which has no key: choose one for it"
        )
    return torch.from_numpy(key_values(column.data, column.starts, column.lengths))
