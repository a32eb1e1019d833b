"""What a step costs the CPU of one machine beside the network: `[host]` of a tiers file, as `tiers probe` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from holdfast_lab.placement.row_costs import VERBS, RowCosts

StoreKind = Literal["in_place", "log"]

_LOG_STORE_ALONE = (
    "collect_row_ns", "fetch_row_ns", "merge_row_ns", "merge_request_ns", "fetches_per_s", "merge_requests_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Costs of a pool on the probed medium, whose rows are kept as `store` says.

    step_us to dense_byte_ns: as in RowCosts, for all verbs of the training thread together; verbs: for each alone
    (None: it was probed before they were told apart).
    CPU time of other threads: plan_id_ns an id and plan_row_ns a unique row, of the loader's; commit_step_us,
    commit_row_ns and commit_dense_byte_ns of the one that makes steps durable; for a log store collect_row_ns a unique
    row, fetch_row_ns a row that is fetched, merge_row_ns a logged row, merge_request_ns a request that reads or writes
    home for them.
    fetches_per_s, merge_requests_per_s: requests that the log store reaches on the medium with nothing else to do.
    Raises ValueError that names the field.
    """

    store: StoreKind
    step_us: float
    row_ns: float
    row_byte_ns: float
    id_ns: float
    id_byte_ns: float
    dense_byte_ns: float
    plan_id_ns: float
    plan_row_ns: float
    commit_step_us: float
    commit_row_ns: float
    commit_dense_byte_ns: float
    collect_row_ns: float | None = None
    fetch_row_ns: float | None = None
    merge_row_ns: float | None = None
    merge_request_ns: float | None = None
    fetches_per_s: float | None = None
    merge_requests_per_s: float | None = None
    verbs: Mapping[str, RowCosts] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (str, Mapping)):
                continue
            if field.name in _LOG_STORE_ALONE and (value is None) != (self.store == "in_place"):
                belongs = "is missing; a log store needs it" if value is None else "belongs to a log store"
                raise ValueError(f"{field.name} {belongs}")
            if value is None:
                continue
            least_words = "more than 0" if field.name.endswith("_per_s") else "0 or more"
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name.endswith("_per_s")):
                raise ValueError(f"{field.name} = {value}; it must be {least_words}")
        if self.verbs is not None and sorted(self.verbs) != sorted(VERBS):
            raise ValueError(f"verbs are {', '.join(self.verbs)}; they must be {', '.join(VERBS)}")

    @property
    def row_costs(self) -> RowCosts:
        """Of all verbs together."""
        return RowCosts(**{field.name: getattr(self, field.name) for field in fields(RowCosts)})
