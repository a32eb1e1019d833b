"""What exact resume needs of PyTorch on a CUDA device: set where it can be, said where it cannot.

Everything runs in processes of its own, because it is set for the whole process: forks of one that has imported torch,
which takes seconds, and set nothing. No device is needed for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from holdfast.state.generators import rng_state, set_rng_state
from holdfast.state.reproducibility import device_settings, prepare_device
from holdfast.state.state_tree import flatten, unflatten

FORKS = """
import json, os, sys
import torch, holdfast.state.reproducibility
import torch._inductor.config  # by whoever asks for determinism, otherwise, each time
assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may hang"
for line in sys.stdin:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)
        continue
    request = json.loads(line)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    os.environ.update(request["environment"])
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)
"""

Fresh = Callable[..., object]


@pytest.fixture(scope="module")
def fresh() -> Iterator[Fresh]:
    """Gives what code prints, of JSON, in a process in which nothing was set."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **one, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def run(code: str, **environment: str) -> object:
            stdin.write(json.dumps({"code": code, "environment": environment}) + "\n")
            stdin.flush()
            said = stdout.readline()
            assert stdout.readline() == '{"status": 0}\n', said
            return json.loads(said)

        yield run
        stdin.close()


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


@pytest.fixture
def prepared(fresh):
    """What `prepare_device` finds and leaves behind in a fresh process."""

    def run(before="", variable=None):
        environment = {} if variable is None else {"CUBLAS_WORKSPACE_CONFIG": variable}
        return fresh(PREPARE.format(before=before), **environment)

    return run


def test_everything_that_can_be_set_is_set(prepared):
    got = prepared("torch.backends.cudnn.benchmark = True")
    assert got["problems"] == got["warned"] == []
    assert got["variable"] == ":4096:8"
    assert (got["deterministic"], got["fills"], got["benchmark"]) == (True, False, False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_stays_as_the_user_set_it(tf32, prepared):
    assert prepared(f"torch.backends.cuda.matmul.allow_tf32 = {tf32}")["tf32"] is tf32


@pytest.mark.parametrize("variable", [":4096:8", ":16:8"])
def test_a_value_that_suffices_stays(variable, prepared):
    got = prepared("prepare_environment()", variable)
    assert (got["variable"], got["problems"]) == (variable, [])


def test_a_value_that_does_not_suffice_stays_and_is_said_once(prepared):
    got = prepared(variable=":0:0")
    assert got["variable"] == ":0:0"
    assert got["problems"] == got["warned"]
    assert "CUBLAS_WORKSPACE_CONFIG=:0:0 is none of the values" in got["problems"][0]


def test_too_late_is_said(prepared):
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


def test_the_settings_say_tf32_however_it_was_set(fresh):
    found = fresh(SETTINGS)
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
