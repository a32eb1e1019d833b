"""Rows of several sources that ascend, as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import Corrupted


class Merged:
    """The rows of a table as a stack of layers has them, ascending. Iterates over `Rows`."""

    def __init__(self, layers: Sequence[Iterator[Rows]], *, each_row_once: bool = False) -> None:
        """layers: the one that counts first, first. each_row_once: no two of them have the same row; raises Corrupted
        where they do."""
        self._each_row_once = each_row_once
        self._layers = list(layers)
        self._heads = [next(layer, None) for layer in self._layers]

    def take(self, last: int) -> Rows | None:
        """The rows up to `last` that were not taken before; None where there are none."""
        parts = []
        for i in range(len(self._layers)):
            while (head := self._heads[i]) is not None and head.rows[0] <= last:
                end = int(np.searchsorted(head.rows, np.uint64(last), side="right"))
                parts.append(head[:end])
                self._heads[i] = head[end:] if end < len(head) else next(self._layers[i], None)
        if len(parts) <= 1:
            return parts[0] if parts else None
        joined = Rows.joined(parts)
        if self._each_row_once and len(joined) < sum(len(part) for part in parts):
            raise Corrupted("a layer of a snapshot has a row twice")
        return joined

    def __iter__(self) -> Iterator[Rows]:
        while ends := [int(head.rows[-1]) for head in self._heads if head is not None]:
            if (rows := self.take(min(ends))) is not None:
                yield rows
