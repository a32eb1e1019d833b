"""One rank of a small group, as it runs in a fork: the real thing, and what befalls it on its way."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn import functional

from holdfast import _core
from holdfast.cli.stop_signals import StopSignals
from holdfast.cli.training import advise_on_lanes, describe_start
from holdfast.errors import PoolFull
from holdfast.files.config import read_value
from holdfast.group import founding, manifest, notices, opening, pool_share
from holdfast.group.device_sums import DeviceSums
from holdfast.group.group import Group
from holdfast.group.rank_states import RankStates
from holdfast.group.remote_rows import RemoteRows
from holdfast.group.roles import Roles
from holdfast.models.dlrm import DLRM
from holdfast.run.assembly import open_trainer
from holdfast.run.ranks import open_group_trainer
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_validation
from holdfast.train.dense_part import DensePart
from holdfast.train.evaluation import EvaluationStopped
from namespaces import INTERFACE

_COUNTED = 1 << 40
_CLONE_NEWNET = 0x40000000  # sched.h
# What happens can happen before or after a call of these.
PLACES: dict[str, tuple[Any, str]] = {
    "group": (dist, "init_process_group"),
    "collective": (Group, "_begin"),
    "device sum": (DeviceSums, "begin"),
    "survey": (opening._Opening, "_agree"),
    "agreement": (opening, "newest_common_step"),
    "permission": (opening._Opening, "_ready"),
    "recovery": (pool_share, "open_together"),
    "dealing": (founding, "make_writer"),
    "making_parts": (founding, "make_parts"),
    "published": (founding, "settle"),
    "retiring": (founding, "retire_others"),
    "manifest": (manifest, "write"),
    "restore": (RankStates, "load"),
    "first_dense": (pool_share.PoolShare, "write_first_dense"),
    "commit": (pool_share.PoolShare, "commit"),
    "dense": (pool_share.PoolShare, "_stage_dense"),
    "settle": (pool_share.PoolShare, "settle"),
    "note": (pool_share.PoolShare, "_note_durable"),
    "train": (DensePart, "forward_bottom"),
    "evaluation": (RemoteRows, "evaluate"),
    "flush": (pool_share.PoolShare, "flush"),
    "close": (pool_share.PoolShare, "close"),
}


class Sayings:
    """What a rank says, one JSON object a line, in a file that is whole whenever the rank dies."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fd = os.open(directory / f"rank-{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, **what: Any) -> None:
        os.write(self._fd, json.dumps(what).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def run_rank(request: dict[str, Any], rank: int, say: Sayings) -> None:
    torch.set_num_threads(1)
    _core.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = f"rank {rank}"  # or it refuses two ranks that have one GPU
    act = request["acts"].get(str(rank), {})
    if request["loop"]:
        _run_loop(request, rank, act, say)
        return
    config = read_value(RunConfig, {**request["config"], **act.get("config", {})}, "config")
    if request["grace"] is not None:
        notices._GRACE_SECONDS = request["grace"]
    if request["dropout"]:
        _drop_out()
    _core.kill_at_persist_point(act.get("persist_point") or _COUNTED)
    if "at" in act:
        _arm(act)
    if "version" in act:
        importlib.metadata.version = lambda name: act["version"]
        importlib.import_module("holdfast.run.ranks").version = importlib.metadata.version  # type: ignore[attr-defined]
    directory = Path(request["directories"].get(str(rank), request["directory"]))
    if request["plain"]:
        _run(open_trainer(config, directory), config, say)
        return
    with StopSignals() as stop:
        roles = Roles(world_size=request["num_ranks"], memory_ranks=act.get("memory_ranks", request["memory_ranks"]))
        if request["memory_ranks_at"]:
            _launch(request, rank)
            options = config.group.with_ranks(memory_ranks_at=request["memory_ranks_at"])
            ranks = Group.from_environment(options, stopping=stop.is_wanted)
        elif request["hosts"]:
            _move_to(request["hosts"][rank], rank, request)
            options = config.group.with_ranks(memory_ranks=roles.memory_ranks)
            ranks = Group.from_environment(options, stopping=stop.is_wanted)
        else:
            store = dist.FileStore(request["store"], request["num_ranks"])
            ranks = Group(
                store=store,
                rank=rank,
                roles=roles,
                timeout=config.group.timeout,
                stopping=stop.is_wanted,
                shared_memory=config.group.shared_memory,
            )
        say(joined=True)
        _run(open_group_trainer(config, directory, ranks), config, say)


def _run_loop(request: dict[str, Any], rank: int, act: dict[str, Any], say: Sayings) -> None:
    """A loop of a user's own, as a launcher would start it."""
    _launch(request, rank)
    if request["grace"] is not None:
        notices._GRACE_SECONDS = request["grace"]
    _core.kill_at_persist_point(act.get("persist_point") or _COUNTED)
    if "at" in act:
        _arm(act)
    module, _, name = request["loop"].rpartition(":")
    own_loop = getattr(importlib.import_module(module or "own_loops"), name)
    options = {
        **request["config"],
        **act.get("config", {}),
        "memory_ranks": request["memory_ranks"],
        "memory_ranks_at": request["memory_ranks_at"],
    }
    own_loop(Path(request["directory"]), say, options)
    say(persist_points=_COUNTED - _core.persist_points_left())


def _launch(request: dict[str, Any], rank: int) -> None:
    """One rank alone is started without a launcher."""
    launched = {"RANK": str(rank), "WORLD_SIZE": str(request["num_ranks"])}
    if request["num_ranks"] > 1:
        os.environ.update(launched, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))


def _move_to(host: str, rank: int, request: dict[str, Any]) -> None:
    """Into a host of namespaces.py, with the environment that torchrun gives."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{host}").open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"moving to {host}")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(request["num_ranks"]),
        MASTER_ADDR=request["master"],
        MASTER_PORT="29500",
        GLOO_SOCKET_IFNAME=INTERFACE,
    )


def _run(opened: Any, config: RunConfig, say: Sayings) -> None:
    validation = open_validation(config)
    with opened as trainer:
        say(
            opened=trainer.pool.step,
            start=describe_start(trainer),
            advice=advise_on_lanes(trainer),
            phases=getattr(trainer.pool, "opening_seconds", {}),
        )
        try:
            for report in trainer.steps():
                say(step=report.step, durable=report.durable_step, loss=report.loss)
                every = config.train.eval_every
                if every and report.step % every == 0 and report.step < trainer.last_step and not trainer.stopped:
                    _evaluate(trainer, validation, say)
            trainer.flush()
            say(durable=trainer.pool.durable_step)
            if validation is not None and not trainer.stopped:
                _evaluate(trainer, validation, say)
        except EvaluationStopped:
            trainer.stopped = True
            trainer.flush()
            say(durable=trainer.pool.durable_step)
        say(stopped=trainer.stopped)
        traffic = trainer.pool.traffic() or {}
    say(merged_bytes=int(traffic.get("merged_bytes", 0)))
    say(closed=True, persist_points=_COUNTED - _core.persist_points_left())


def _evaluate(trainer: Any, validation: Any, say: Sayings) -> None:
    result = trainer.evaluate(validation)
    if result is not None:
        say(auc=result.auc, log_loss=result.log_loss)


def _arm(act: dict[str, Any]) -> None:
    """The deed is done at the `nth` call."""
    owner, name = PLACES[act["at"]]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def replaced(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        is_time = calls == act.get("nth", 1)
        if is_time and not act.get("after"):
            DEEDS[act["do"]](*arguments)
        result = original(*arguments, **options)
        if is_time and act.get("after"):
            DEEDS[act["do"]](*arguments)
        return result

    setattr(owner, name, replaced)


def _wait(*_: Any) -> None:
    """Until somebody says that it can go on."""
    Path(os.environ["HOLDFAST_GO_ON"]).with_suffix(".waiting").touch()
    while not Path(os.environ["HOLDFAST_GO_ON"]).exists():
        time.sleep(0.01)


def _full(*_: Any) -> None:
    raise PoolFull("writing row-log-0000: No space left on device")


def _spoil(trainer: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(float("nan"))


def _signal(number: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


DEEDS: dict[str, Callable[..., None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "term": _signal(signal.SIGTERM),
    "wait": _wait,
    "full": _full,
    "spoil": _spoil,
}


def _drop_out() -> None:
    """A model that draws random numbers in every training step, on every trainer."""
    original = DLRM.from_bottom

    def from_bottom(self: DLRM, bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return original(self, functional.dropout(bottom, 0.2, training=self.training), pooled)

    DLRM.from_bottom = from_bottom  # type: ignore[method-assign]
