"""Programs of users' own that open more than one pool in a process, or one again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import own_loops

ATTEMPTS = 3


def _meet_as(options: dict[str, Any]) -> None:
    """options: init, whether the program has a process group of its own; store_port: of a store that outlives ranks, as
    torchrun's does."""
    if "store_port" in options:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(options["store_port"]))
    if options.get("init"):
        dist.init_process_group("gloo")


def one_after_another(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    _meet_as(options)
    for name, steps in (("first", 3), ("second", 4), ("first", 6)):
        own_loops.train(directory / name, say, {**options, "steps": steps})


def until_it_works(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: fails, the rank whose program has an error of its own, once."""
    _meet_as(options)
    rank = int(os.environ["RANK"])
    for attempt in range(ATTEMPTS):

        def report(attempt: int = attempt, **what: Any) -> None:
            if attempt == 0 and rank == options["fails"] and what.get("step") == 4:
                raise ZeroDivisionError("in the program's own report")
            say(**what)

        try:
            own_loops.train(directory, report, options)
            return
        except Exception as error:
            say(caught=f"{type(error).__name__}: {error}")
