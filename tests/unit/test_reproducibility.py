"""The same bits wherever operands lie in memory, and a word where the process cannot give them.

Everything runs in processes of its own: MKL reads its environment once.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.state.reproducibility import check_environment, keep_freed_memory, prepare_environment

pytestmark = pytest.mark.dear

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")

LOAD = """
import importlib.util, os, sys
def load(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join({source!r}, *name.split(".")) + ".py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
reproducibility = load("state.reproducibility")
"""

# Every product of DLRM's layers at the sizes of Criteo Kaggle, each operand in turn away from the alignment that
# torch's own memory has; then whole steps of the model with misaligned inputs. Prints a digest of all results.
SWEEP = """
import hashlib
assert "torch" not in sys.modules
reproducibility.prepare_environment()
import torch
torch.set_num_threads({num_threads})
torch.set_num_interop_threads(1)
generator = torch.Generator().manual_seed(0)
digest = hashlib.sha256()

def random(*shape):
    return torch.randn(shape, generator=generator)

def placed(tensor, offset):
    room = torch.empty(tensor.nbytes + 4096 + offset, dtype=torch.uint8)
    begin = -room.data_ptr() % 4096 + offset
    return room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

def sweep(what, function, *operands):
    expected = function(*(placed(operand, 0) for operand in operands))
    digest.update(expected.float().numpy().tobytes())
    for moved in range(len(operands)):
        for offset in (4, 8, 16, 48):
            got = function(*(placed(o, offset if i == moved else 0) for i, o in enumerate(operands)))
            assert torch.equal(got, expected), f"{{what}}: operand {{moved}} at {{offset}} bytes gives other bits"

for dtype in (torch.float32, torch.bfloat16):
    for num_inputs, num_outputs in ((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (256, 1)):
        x, weight = random(2048, num_inputs).to(dtype), random(num_outputs, num_inputs).to(dtype)
        bias, grad = random(num_outputs).to(dtype), random(2048, num_outputs).to(dtype)
        where = f"{{dtype}} {{num_inputs}} -> {{num_outputs}}"
        sweep(f"{{where}} forward", torch.nn.functional.linear, x, weight, bias)
        sweep(f"{{where}} gradient of the input", torch.mm, grad, weight)
        sweep(f"{{where}} gradient of the weight", lambda grad, x: grad.t() @ x, grad, x)

class Pooled(torch.nn.Module):
    def forward(self, pooled):
        return pooled

torch.manual_seed(0)
model = load("models.dlrm").DLRM(
    embeddings=Pooled(), num_dense=13, embedding_dim=16, num_features=26, bottom=[512, 256, 64, 16], top=[512, 256, 1]
)

def step(dense, pooled):
    model.zero_grad()
    pooled.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(dense, pooled)
    logits.float().square().mean().backward()
    gradients = [pooled.grad, *(parameter.grad for parameter in model.parameters())]
    return torch.cat([logits.detach().float(), *(gradient.flatten() for gradient in gradients)])

for bf16 in (False, True):
    sweep(f"step, bf16={{bf16}}", step, random(2048, 13), random(2048, 416))
print(digest.hexdigest())
"""


def run(code, environment=None, **values):
    """What `code` prints, in a fresh process without MKL_CBWR unless `environment` has it."""
    script = (LOAD + code).format(source=str(SOURCE), **values)
    variables = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"} | (environment or {})
    process = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


@functools.cache
def swept(num_threads):
    return run(SWEEP, num_threads=num_threads)


@pytest.mark.thorough
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_where_operands_lie(num_threads):
    assert swept(num_threads)


@pytest.mark.thorough
def test_a_fresh_process_gives_the_same_bits():
    assert swept(2) == run(SWEEP, num_threads=2)


@needs_mkl
def test_setting_it_after_importing_torch_but_before_the_first_product_is_in_time():
    assert (
        run("import torch\nreproducibility.prepare_environment()\nprint(reproducibility.check_environment())") == "[]\n"
    )


@needs_mkl
def test_setting_it_after_the_first_product_is_noticed():
    code = """
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
reproducibility.prepare_environment()
print(reproducibility.check_environment(warn=False))
"""
    assert "was set after MKL had read it" in run(code)


@needs_mkl
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "MKL_CBWR is not set: "),
        ({"MKL_CBWR": "AVX512"}, "MKL_CBWR=AVX512 does not ask for a strict branch: "),
        ({"MKL_CBWR": "NONSENSE,STRICT"}, "or MKL does not know it: "),
        ({"MKL_CBWR": "AUTO,STRICT"}, "[]"),
    ],
)
def test_a_variable_that_does_not_suffice_is_named_with_what_to_do(environment, expected):
    problems = run("import torch\nprint(reproducibility.check_environment(warn=False))", environment)
    assert expected in problems
    assert problems == "[]\n" or "set MKL_CBWR=AUTO,STRICT before the process starts, or call holdfast." in problems


def test_a_process_is_warned_once():
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    counts = [len(reproducibility.check_environment()) for _ in range(3)]
print(counts, len(caught), caught[0].category.__name__)
"""
    assert run(code) == "[1, 1, 1] 1 RuntimeWarning\n"


def test_a_value_that_somebody_chose_stays(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    prepare_environment()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
    monkeypatch.delenv("MKL_CBWR")
    prepare_environment()
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"


def test_a_pytorch_without_mkl_needs_nothing(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert check_environment() == []


def test_keeping_freed_memory_saves_the_faults_of_every_step():
    code = """
import resource, torch
print(reproducibility.keep_freed_memory())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    big = [torch.ones(2**20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(5):
    faults()
print(faults())
"""
    kept, faults = run(code).split()
    if kept == "True":
        assert int(faults) < 100
    assert keep_freed_memory() is (kept == "True")
