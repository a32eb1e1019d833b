"""Where holdfast asks whether it runs under `holdfast prove`. Cheap, and without effect where it does not."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.pools.directory import below_home

VARIABLE = "HOLDFAST_PROVE"  # the folder in which a run's orders are, and where its witness writes


def pool_directory(directory: str | os.PathLike[str]) -> Path:
    """Where the pool that a script calls `directory` is opened: there, ``~`` being the home directory, and under
    `holdfast prove` in a place of the run's own. Absolute: the script may change its working directory before the pool
    is made."""
    named = below_home(directory).absolute()
    if VARIABLE not in os.environ:
        return named
    from holdfast.proving import witness

    return witness.present().pool_directory(named)


def refuse_group() -> None:
    """Ends the process before a pool of several ranks is touched, where `holdfast prove` runs it."""
    if VARIABLE in os.environ:
        from holdfast.proving import witness

        witness.present().refuse(
            "it trains a pool of many ranks (torchrun, or a directory with such a pool), and prove runs one process; "
            "prove the script without torchrun, on a directory of its own"
        )
