"""What happens on a device happens in the order that the rows need, whatever runs beside it: see pretended_cuda.py."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.device.options import DeviceConfig
from holdfast.models import dlrm
from holdfast.run.assembly import open_trainer
from pretended_cuda import CUDA, Machine, TracedMark, TracedQueue, pretended_cuda
from test_keys_in_slots import POLICIES
from test_keys_in_slots import Run as KeyedRun
from test_ways import SCRIPT, WAYS, Loop, bits, config_of

pytestmark = pytest.mark.dear

STEPS = 8
ON_CUDA = {
    name: replace(
        device,
        kind="cuda",
        rows="near_memory" if device.rows == "auto" else device.rows,
        scratchpad_bytes=device.scratchpad_bytes or (None if device.rows == "auto" else 60_000),
    )
    for name, device in WAYS.items()
}


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-order-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with pretended_cuda(monkeypatch) as machine:
        yield machine


def train(directory: Path, device: DeviceConfig, machine: Machine, **options: Any) -> list[str]:
    """Returns what made the host wait in the steps."""
    with open_trainer(config_of(device, steps=STEPS, **options), directory) as trainer:
        before = len(machine.waits)
        assert len(list(trainer.steps())) == STEPS
        waits = machine.waits[before:]
        trainer.flush()
    return waits


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "a row log": {"medium": "block"},
    "means, bf16 rows, Adam": {"pooling": "mean", "dtype": "bf16", "optimizer": "adam"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", ON_CUDA)
def test_everything_is_in_order_and_waits_where_it_must(way: str, options: str, root: Path, machine: Machine) -> None:
    if way == "direct" and options == "a row log":
        pytest.skip("direct wants rows in place")
    waits = train(root / "pool", ON_CUDA[way], machine, **OPTIONS[options])
    assert machine.problems == []
    # The processor beside the pool updates when it knows by how much; it is told nothing else so.
    expected = STEPS if ON_CUDA[way].way == "near_memory" else 0
    assert sum("near_memory.py" in wait for wait in waits) == len(waits) >= expected, waits
    if ON_CUDA[way].way != "near_memory":
        assert waits == []


@pytest.mark.parametrize("way", ["near_memory", "scratchpad", "direct"])
def test_a_loop_of_ones_own_is_in_order(way: str, root: Path, machine: Machine) -> None:
    device = replace(ON_CUDA[way], scratchpad_bytes=None if way == "near_memory" else 20_000)
    loop = Loop(root / "pool", device)
    loop.model.to(CUDA)
    loop.dense.param_groups[0]["foreach"] = False
    with loop.pool:
        for options in SCRIPT:
            loop.step(**options)
        loop.checkpoint.flush()
    assert machine.problems == []


@pytest.mark.parametrize("policy", ["ttl", "all"])
@pytest.mark.parametrize("way", ["scratchpad", "direct"])
def test_keys_begin_in_their_slots_in_order(way: str, policy: str, root: Path, machine: Machine) -> None:
    run = KeyedRun(root / "pool", replace(ON_CUDA[way], scratchpad_bytes=60_000), POLICIES[policy])
    run.model.to(CUDA)
    run.dense.param_groups[0]["foreach"] = False
    before = len(machine.waits)
    run.train_to(STEPS * 2)
    # Mappings are registered anew once the second collection is there.
    assert [wait for wait in machine.waits[before:] if "home_mapping.py" not in wait] == []
    run.checkpoint.flush()
    run.pool.close()
    assert machine.problems == []


def test_the_pretended_device_computes_what_a_device_would(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_cuda(monkeypatch) as machine:
        train(root / "pretended", ON_CUDA["scratchpad"], machine)
    monkeypatch.undo()
    # On AMD's processors layers are oneDNN's, which has other bits than the products that a device is pretended with.
    monkeypatch.setattr(dlrm, "_HAS_ONEDNN_LINEAR", False)
    train(root / "processor", WAYS["scratchpad"], Machine())
    assert bits(root / "pretended").tables == bits(root / "processor").tables


def _no_following(queue: TracedQueue, mark: TracedMark) -> None:
    pass


def _no_keeping(queue: TracedQueue, tensor: torch.Tensor) -> None:
    pass


def _no_waiting(mark: TracedMark) -> None:
    pass


@pytest.mark.parametrize(
    ("way", "place", "name", "instead"),
    [
        ("near_memory", TracedQueue, "follow", _no_following),
        ("near_memory", TracedMark, "wait", _no_waiting),
        ("scratchpad", TracedQueue, "follow", _no_following),
        ("scratchpad", TracedQueue, "keep", _no_keeping),
        ("scratchpad", TracedMark, "wait", _no_waiting),
    ],
)
def test_what_is_left_out_is_noticed(
    way: str,
    place: type,
    name: str,
    instead: Callable[..., None],
    root: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, instead)
    train(root / "pool", ON_CUDA[way], machine)
    assert machine.problems != []
