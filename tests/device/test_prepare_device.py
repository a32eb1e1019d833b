"""What exact resume needs of PyTorch on a CUDA device: set where it can be, said where it cannot.

Everything runs in processes of its own, because it is set for the whole process. No device is needed for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from holdfast.state.generators import rng_state, set_rng_state
from holdfast.state.reproducibility import device_settings, prepare_device
from holdfast.state.state_tree import flatten, unflatten

PREPARE = """
import json, os, warnings
import torch
from holdfast.state.reproducibility import prepare_device, prepare_environment
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    problems = prepare_device(torch.device("cuda", 0))
    prepare_device(torch.device("cuda", 0))
print(json.dumps(dict(
    problems=problems,
    warned=[str(warning.message) for warning in caught],
    variable=os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    deterministic=torch.are_deterministic_algorithms_enabled(),
    fills=torch.utils.deterministic.fill_uninitialized_memory,
    benchmark=torch.backends.cudnn.benchmark,
    tf32=torch.backends.cuda.matmul.allow_tf32,
)))
"""


def prepared(before="", variable=None):
    """What `prepare_device` finds and leaves behind in a fresh process."""
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    if variable is not None:
        environment["CUBLAS_WORKSPACE_CONFIG"] = variable
    command = [sys.executable, "-c", PREPARE.format(before=before)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_everything_that_can_be_set_is_set():
    got = prepared("torch.backends.cudnn.benchmark = True")
    assert got["problems"] == got["warned"] == []
    assert got["variable"] == ":4096:8"
    assert (got["deterministic"], got["fills"], got["benchmark"]) == (True, False, False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_stays_as_the_user_set_it(tf32):
    assert prepared(f"torch.backends.cuda.matmul.allow_tf32 = {tf32}")["tf32"] is tf32


@pytest.mark.parametrize("variable", [":4096:8", ":16:8"])
def test_a_value_that_suffices_stays(variable):
    got = prepared("prepare_environment()", variable)
    assert (got["variable"], got["problems"]) == (variable, [])


def test_a_value_that_does_not_suffice_stays_and_is_said_once():
    got = prepared(variable=":0:0")
    assert got["variable"] == ":0:0"
    assert got["problems"] == got["warned"]
    assert "CUBLAS_WORKSPACE_CONFIG=:0:0 is none of the values" in got["problems"][0]


def test_too_late_is_said():
    got = prepared("torch.cuda.is_initialized = lambda: True")
    assert got["variable"] == ":4096:8"
    assert "was not set when CUDA was initialised" in got["problems"][0]
    assert prepared("torch.cuda.is_initialized = lambda: True; prepare_environment()")["problems"] == []


def test_on_the_cpu_nothing_is_changed():
    assert prepare_device(torch.device("cpu")) == []
    assert not torch.are_deterministic_algorithms_enabled()
    assert device_settings(torch.device("cpu")) == {}


SETTINGS = """
import json
import torch
from holdfast.state.reproducibility import device_settings
torch.cuda.get_device_name = lambda device: "Device"
torch.cuda.get_device_capability = lambda device: (9, 0)
def said():
    return device_settings(torch.device("cuda", 0))
found = [said()]
for legacy in ("high", "highest"):
    torch.set_float32_matmul_precision(legacy)
    found.append(said())
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    for name in ("tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = name
        found.append(said())
else:
    found += found[1:]
print(json.dumps(found))
"""


def test_the_settings_say_tf32_however_it_was_set():
    process = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert [settings["tf32"] for settings in found] == [False, True, False, True, False]
    assert {settings["device"] for settings in found} == {"Device"}
    assert found[0]["compute_capability"] == "9.0"


class _Generator:
    """A device's random number generator, of which only the state is asked for."""

    def __init__(self, number):
        self.state = torch.full((16,), number, dtype=torch.uint8)

    def get_state(self):
        return self.state


def test_a_devices_random_numbers_are_saved_and_come_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (_Generator(3), _Generator(5)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    put = {}
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.__setitem__(device, state))
    set_rng_state(unflatten(*flatten(rng_state())))
    assert {device: state.tolist() for device, state in put.items()} == {0: [3] * 16, 1: [5] * 16}


def test_random_numbers_saved_without_a_device_load_where_there_is_one(monkeypatch):
    saved = {name: state for name, state in rng_state().items() if name != "cuda"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: pytest.fail("nothing was saved of it"))
    set_rng_state(saved)
