"""A process's first calls give what all others give.

MKL's vector functions find out at their first call which kernels suit the processor, without a lock. What can go wrong
then is made to go wrong every time by a library that stands before them (first_calls_shim.cpp), on whatever processor
this is. Each test looks at processes of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.state.reproducibility import VECTOR_FUNCTIONS

HERE = Path(__file__).parent
LIBRARY = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
MKL_NAMES = {"log": "Ln", "erfinv": "ErfInv"}
AS_MKL_SAYS = {function: MKL_NAMES.get(function, function.capitalize()) for function in VECTOR_FUNCTIONS}
ALL_CALLS = [f"vm{precision}{name}" for precision in "sd" for name in AS_MKL_SAYS.values()]

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and hasattr(LIBRARY, "vmsSqrt")),
    reason="this PyTorch has no MKL of its own",
)

# All that MKL has, and PyTorch could link.
ALL_OF_MKLS = """
Abs Acos Acosh Acospi Add Arg Asin Asinh Asinpi Atan Atan2 Atan2pi Atanh Atanpi CIS Cbrt CdfNorm CdfNormInv Ceil Conj
CopySign Cos Cosd Cosh Cospi Div Erf ErfInv Erfc ErfcInv Exp Exp10 Exp2 ExpInt1 Expm1 Fdim Floor Fmax Fmin Fmod Frac
Hypot I0 I1 Inv InvCbrt InvSqrt J0 J1 Jn LGamma LinearFrac Ln Log10 Log1p Log2 Logb MaxMag MinMag Modf Mul MulByConj
NearbyInt NextAfter Pow Pow2o3 Pow3o2 Powr Powx Remainder Rint Round Sin SinCos Sind Sinh Sinpi Sqr Sqrt Sub TGamma
Tan Tand Tanh Tanpi Trunc Y0 Y1 Yn
"""

MAKE_CHECKPOINT = """
import sys, torch, holdfast
torch.set_num_threads(2)
net = torch.nn.Linear(4, 1)
pool = holdfast.Pool(sys.argv[1])
holdfast.EmbeddingBagCollection(
    pool,
    [holdfast.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
    optimizer=holdfast.SGD(lr=0.1),
)
holdfast.Checkpoint(pool, model=net, optimizer=torch.optim.Adam(net.parameters()))
"""

COMMAND = """
import sys, torch
torch.set_num_threads(2)
from holdfast.state import reproducibility
reproducibility.prepare_device(torch.device("cpu"))
"""

FIRST_SQRT = """
numbers = torch.rand(100_000) + 0.5
first, second = numbers.sqrt(), numbers.sqrt()
off = ((first - second) / second).abs()
print(off[:50_000].max().item(), off[50_000:].max().item())
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "first_calls_shim.so"
    source = str(HERE / "first_calls_shim.cpp")
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library), source, "-ldl"], check=True)
    return library


def run(code: str, shim: Path, directory: Path, **variables: str) -> str:
    """What `code` prints in a fresh process behind the shim."""
    environment = {**os.environ, "LD_PRELOAD": str(shim), "MKL_CBWR": "AUTO,STRICT", **variables}
    process = subprocess.run(
        [sys.executable, "-c", code, str(directory)], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_list_is_what_torchs_library_has_of_mkls_vector_functions():
    possible = [f"vm{precision}{name}" for precision in "sdcz" for name in ALL_OF_MKLS.split()]
    assert [function for function in possible if hasattr(LIBRARY, function)] == sorted(
        ALL_CALLS, key=lambda function: (function[2] != "s", function)
    )


@pytest.mark.dear
@pytest.mark.parametrize("code", [MAKE_CHECKPOINT, COMMAND], ids=["checkpoint", "command line"])
def test_before_the_first_step_every_vector_function_is_called_once_and_alone(shim, tmp_path, code):
    calls = tmp_path / "calls"
    run(code, shim, tmp_path / "pool", FIRST_CALLS=str(calls))
    written = [line.split() for line in calls.read_text().splitlines()]
    assert sorted(function for function, _, _ in written) == sorted(ALL_CALLS)
    assert {count for _, count, _ in written} == {"1"}
    assert len({thread for _, _, thread in written}) == 1


def test_a_first_call_on_two_threads_is_inexact_on_one_of_them(shim, tmp_path):
    """Without a Checkpoint: PyTorch alone. It is what the next test would find."""
    code = "import torch; torch.set_num_threads(2)" + FIRST_SQRT
    of_first, of_second = run(code, shim, tmp_path, FIRST_CALLS_AS_INTEL="1", FIRST_CALLS_SLOWLY="1").split()
    if float(of_second) == 0.0:
        pytest.skip("this MKL finds out in another way")
    assert float(of_first) == 0.0
    assert float(of_second) < 1e-3  # a last bit without AVX-512, with it a few thousand of them


def test_after_a_checkpoint_is_made_the_first_call_is_like_the_second(shim, tmp_path):
    code = MAKE_CHECKPOINT + FIRST_SQRT
    printed = run(code, shim, tmp_path / "pool", FIRST_CALLS_AS_INTEL="1", FIRST_CALLS_SLOWLY="1")
    assert printed == "0.0 0.0\n"
