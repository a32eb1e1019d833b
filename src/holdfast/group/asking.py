"""What trainers ask of memory ranks that run by themselves: the pool, its collections, and how it is opened, as JSON.

Whoever serves has no script: it makes the same calls as if it had the trainers', of what rank 0 says here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.group.founding import Foundation
from holdfast.group.group import Group
from holdfast.pools.dial import MediumDial
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.optim import SGD, Adagrad, Adam, RowOptimizerSpec, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.tables import EmbeddingBagConfig

_WHAT = "what the trainers ask for"
Tables = Sequence[EmbeddingBagConfig]
_OPTIMIZERS = (SGD, RowWiseAdagrad, Adagrad, Adam, RowWiseAdam)  # by kind


def ask(
    group: Group,
    wanted: Foundation,
    options: OpenOptions,
    collections: Sequence[Tables],
    scratchpad_bytes: int | None,
    dense_interval: int,
) -> None:
    """Rank 0 tells memory ranks that run by themselves what all ranks are about to open. Trainers call it at once."""
    if group.are_apart and group.is_trainer:
        asked = Asked.of(wanted, options, collections, scratchpad_bytes, dense_interval)
        group.broadcast(asked._to_json().encode(), _WHAT)


@dataclass(frozen=True, slots=True)
class Asked:
    """pool: arguments of SharedPool, but for directory, ranks and group; group: of GroupOptions."""

    pool: dict[str, Any]
    group: dict[str, Any]
    collections: Sequence[tuple[Tables, RowOptimizerSpec]]

    @classmethod
    def of(
        cls,
        wanted: Foundation,
        options: OpenOptions,
        collections: Sequence[Tables],
        scratchpad_bytes: int | None,
        dense_interval: int,
    ) -> Asked:
        pool = {
            "seed": wanted.seed,
            "medium": wanted.medium,
            "log_bytes": wanted.log_bytes,
            "row_checksums": wanted.row_checksums,
            "scratchpad_bytes": scratchpad_bytes,
            "dense_interval": dense_interval,
            "recovery": "relaxed" if options.relaxed else "exact",
            "trust_after_reboot": options.trust_after_reboot,
            "synchronous": options.synchronous,
            "dial": options.dial,
        }
        kinds = {table.name: table.optimizer for table in wanted.tables}
        return cls(
            pool,
            {"shards": wanted.num_shards, "split_rows": wanted.split_rows},
            # Hyperparameters come with each update.
            [(tables, _OPTIMIZERS[kinds[tables[0].name]]()) for tables in collections],
        )

    def _to_json(self) -> str:
        dial: MediumDial | None = self.pool["dial"]
        collections = [
            {"optimizer": optimizer.kind, "tables": [asdict(table) for table in tables]}
            for tables, optimizer in self.collections
        ]
        pool = {**self.pool, "dial": None if dial is None else asdict(dial)}
        return json.dumps({"pool": pool, "group": self.group, "collections": collections})

    @classmethod
    def heard(cls, group: Group) -> Asked:
        """By such a memory rank."""
        return cls._from_json(group.broadcast(None, _WHAT).decode())

    @classmethod
    def _from_json(cls, text: str) -> Asked:
        said = json.loads(text)
        dial = said["pool"]["dial"]
        collections = [
            ([EmbeddingBagConfig(**table) for table in collection["tables"]], _OPTIMIZERS[collection["optimizer"]]())
            for collection in said["collections"]
        ]
        return cls({**said["pool"], "dial": None if dial is None else MediumDial(**dial)}, said["group"], collections)
