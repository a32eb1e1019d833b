"""A declared accelerator: a step takes its times, rows go all their way, and nothing is learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import DeviceConfig
from holdfast.admin.digest import digest_pool
from holdfast.device.options import AcceleratorDial
from holdfast.errors import ConfigError
from holdfast.files.config import read_config
from holdfast.pools.read_only import open_reader
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig
from holdfast.train.declared_dense import DeclaredDensePart

RUN = """
[data.synthetic]
num_samples = 1000
rows = [500, 300]
lookups = 3
num_dense = 4
[embedding]
dim = 8
[model]
bottom = [16, 8]
top = [16, 1]
[pool]
medium = "memory"
[train]
batch_size = 16
steps = 4
"""
DIAL = """
[device.dial]
name = "a declared GPU"
bottom_forward_s = 2e-3
top_s = 5e-3
bottom_backward_s = 3e-3
link_bandwidth_bytes_per_s = 1e9
"""


def config(folder: Path, text: str = RUN + DIAL) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text)
    return read_config(RunConfig, path)


def dial(**changes: Any) -> AcceleratorDial:
    figures: dict[str, Any] = {
        "name": "a declared GPU",
        "bottom_forward_s": 2e-3,
        "top_s": 5e-3,
        "bottom_backward_s": 3e-3,
        "link_bandwidth_bytes_per_s": 1e9,
    }
    return AcceleratorDial(**{**figures, **changes})


def test_a_step_takes_what_is_declared_and_says_that_it_learns_nothing(tmp_path: Path):
    with open_trainer(config(tmp_path), tmp_path / "pool") as trainer:
        assert trainer.description == (
            "timing only: the dense part waits for the declared times of a declared GPU, nothing is learned"
        )
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        began = time.perf_counter()
        reports = list(trainer.steps())
        assert time.perf_counter() - began >= 4 * 10e-3
        assert [report.loss for report in reports] == [0.0] * 4
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        assert trainer.pool.durable_step <= 4
    reader = open_reader(tmp_path / "pool")
    assert digest_pool(reader).rows_counted > 0  # their way is real


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path, relaxed: bool):
    text = RUN + f"capture_ahead = true\n[device]\nrelaxed_lookup = {str(relaxed).lower()}\n" + DIAL
    for name, stops in (("whole", (4,)), ("cut", (2, 4))):
        for stop in stops:
            run = config(tmp_path, text.replace("steps = 4", f"steps = {stop}"))
            with open_trainer(run, tmp_path / name) as trainer:
                list(trainer.steps())
                assert trainer.pool.step == stop
    digests = {digest_pool(open_reader(tmp_path / name)).whole for name in ("whole", "cut")}
    assert len(digests) == 1


def test_a_pool_is_trained_with_a_declared_accelerator_from_its_first_step_on_or_never(tmp_path: Path):
    for name, first, then in (("real", RUN, RUN + DIAL), ("declared", RUN + DIAL, RUN)):
        with open_trainer(config(tmp_path, first), tmp_path / name) as trainer:
            list(trainer.steps())
        with pytest.raises(ConfigError, match=r"device\.dial: .* start a new pool"):
            open_trainer(config(tmp_path, then), tmp_path / name)


def test_gradients_come_before_the_bottom_s_backward_pass_ends():
    part = DeclaredDensePart(dial(bottom_backward_s=60.0))
    pooled = torch.zeros(4, 8, requires_grad=True)
    began = time.perf_counter()
    part.train(torch.zeros(4, 4), torch.zeros(4), pooled)
    assert pooled.grad is not None
    part.wait_for_gradients()
    assert time.perf_counter() - began >= 7e-3  # and not a minute later, or this test would take one


def test_gradients_that_another_rank_gets_have_come_before_they_leave():
    part = DeclaredDensePart(dial(), gradients_travel=True)
    pooled = torch.zeros(4, 8, requires_grad=True)
    left: list[float] = []
    pooled.register_hook(lambda _: left.append(time.perf_counter()))
    began = time.perf_counter()
    part.train(torch.zeros(4, 4), torch.zeros(4), pooled)
    assert left[0] - began >= 7e-3


def test_copies_take_the_link_s_time_and_the_software_s():
    assert dial(copy_s=1e-3, link_latency_s=1e-4, stretch=2.0).copy_seconds(10**6) == pytest.approx(2 * 2.1e-3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_s": -1.0}, r"device\.dial\.top_s = -1"),
        ({"link_bandwidth_bytes_per_s": 0.0}, r"link_bandwidth_bytes_per_s = 0"),
        ({"stretch": float("nan")}, r"stretch = nan"),
    ],
)
def test_times_that_no_accelerator_has_are_refused(changes: dict[str, float], named: str):
    with pytest.raises(ConfigError, match=named):
        dial(**changes)


def test_a_real_accelerator_and_a_declared_one_exclude_each_other():
    with pytest.raises(ConfigError, match="kind = 'cpu'"):
        DeviceConfig(kind="cuda", dial=dial())
