"""Programs of users' own that open more than one pool in a process, or one again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
import own_loops
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions

ATTEMPTS = 3


def _meet_as(options: dict[str, Any]) -> None:
    """options: init, whether the program has a process group of its own; store_port: of a store that outlives ranks, as
    torchrun's does."""
    if "store_port" in options:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(options["store_port"]))
    if options.get("init"):
        dist.init_process_group("gloo")


def started_by_a_launcher(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Even where it is the only rank. options: loop, of own_loops.py."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    getattr(own_loops, options["loop"])(directory, say, options)


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


class _Trained:
    """A pool and what trains it. number: of its batches, and of its first parameters."""

    def __init__(self, directory: Path, number: int, options: dict[str, Any]) -> None:
        self._number = number
        self.pool = own_loops.open_pool(directory, options)
        torch.manual_seed(number)
        self._model = own_loops.Ranker(self.pool, 0.0, own_loops.device_of(options))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.01)
        self._checkpoint = holdfast.Checkpoint(self.pool, model=self._model, optimizer=self._optimizer)
        self._checkpoint.resume()

    def train(self) -> None:
        ids, dense, labels = own_loops.batch_of(1000 * self._number + self.pool.step, 24, self.pool.part)
        asked = {name: ids[name] for name in ("item", "shop")}, {"words": ids["words"]}
        loss = nn.functional.binary_cross_entropy_with_logits(self._model(asked, dense), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self.pool.average_gradients(self._model)
        for optimizer in (self._optimizer, self._model.things.optimizer, self._model.words.optimizer):
            optimizer.step()
        self._checkpoint.commit()


def at_once(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: steps, of each pool by number; they are closed in this order."""
    _meet_as(options)
    steps = {int(number): count for number, count in options["steps"].items()}
    trained = {number: _Trained(directory / str(number), number, options) for number in sorted(steps)}
    for step in range(max(steps.values())):
        for number, each in trained.items():
            if step < steps[number]:
                each.train()
    for number in steps:
        trained[number].pool.close()
    say(closed=True)


def by_turns(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """One pool is opened while another is open and closed before it; options: fails, whether the first ends with an
    error that all ranks catch."""
    _meet_as(options)

    def train(trained: _Trained, steps: int) -> None:
        for _ in range(steps):
            trained.train()
        trained.pool.flush()

    first, second = (_Trained(directory / str(number), number, options) for number in (1, 2))
    train(first, 2)
    train(second, 1)
    try:
        with first.pool:
            if options.get("fails"):
                raise ZeroDivisionError
    except ZeroDivisionError:
        say(caught=True)
    train(second, 1)
    third = _Trained(directory / "3", 3, options)
    train(third, 2)
    second.pool.close()
    train(third, 1)
    third.pool.close()
    say(closed=True, left=dist.is_initialized())


def with_a_child_that_ends(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Of rank 1, in the midst of the loop; the others wait for long enough to look at what became of it."""

    def report(**what: Any) -> None:
        say(**what)
        if what.get("step") == 3 and os.environ["RANK"] == "1":
            if (child := os.fork()) == 0:
                raise SystemExit
            os.waitpid(child, 0)
            time.sleep(2.5)

    own_loops.train(directory, report, options)


def waits_for_one_that_waits_for_the_dead(_: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Of two trainers and a memory rank: this one is dead, and the second trainer has nothing to do with it."""
    group = Group.from_environment(
        GroupOptions(memory_ranks=1, timeout=options["timeout"], shared_memory=options["shared_memory"])
    )
    say(joined=True)
    if not group.is_trainer:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        group.barrier("all ranks")
    group.sum_over_trainers(torch.ones(1), "the other trainer").wait()
