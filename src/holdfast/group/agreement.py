"""What all ranks of a loop must ask for alike, compared when they open the pool together."""

from __future__ import annotations

from importlib.metadata import version

import torch

from holdfast.errors import ConfigError
from holdfast.group.founding import Foundation
from holdfast.group.group import Group
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.optim import OPTIMIZERS
from holdfast.pools.tables import FIELDS, in_words

_OF_A_RANK = "scratchpad_bytes"  # machines have different memories


def check_same_everywhere(group: Group, wanted: Foundation, options: OpenOptions, dense_interval: int) -> None:
    """All ranks call it at once, and all end with an error where one differs. Raises ConfigError."""
    mine = {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "dense_interval": dense_interval,
        "recovery": "relaxed" if options.relaxed else "exact",
        **{name: getattr(wanted, name) for name in Foundation.__dataclass_fields__ if name != _OF_A_RANK},
        "tables": [spec.name for spec in wanted.tables],  # the same before their fields are compared
        **{
            f"table '{spec.name}': {field}": in_words(spec, field, OPTIMIZERS)
            for spec in wanted.tables
            for field in FIELDS
        },
    }
    for rank, theirs in enumerate(group.gather(mine, "everyone's options")):
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"rank {rank} has {name} = {theirs[name]}, rank {group.rank} has {value}: make them the same"
                )
