"""What a process needs for PyTorch to give the same bits in it as in every other. Imports no torch.

MKL, which PyTorch calls for float32 products, chooses among its paths by where operands lie in memory unless MKL_CBWR
asks for a strict branch. It reads that variable once, at its first call in the process, and importing torch calls
nothing in it: setting the variable between ``import torch`` and the first product is still in time.

What was found with PyTorch 2.13 (MKL 2024.2, oneDNN 3.12; AVX-512, one and two threads), sweeping operands over
offsets of 4 to 2112 bytes at the shapes of DLRM's layers, forward and both products of backward:
- Without the variable, the product of a matrix and a vector (a last layer with one output) has other bits whenever the
  matrix does not begin at a multiple of 16 bytes. With it, no product does.
- oneDNN (all of bfloat16, and holdfast.models' float32 layers) does not depend on alignment, with or without it.
- The strict branch costs nothing that could be measured. Its bits differ from the default's, so all processes of a run
  must have it, or none.

The strict branch says nothing about a process's first calls. MKL's vector functions, to which PyTorch sends sqrt, exp,
log and the like (`VECTOR_FUNCTIONS`) of contiguous float32 and float64 tensors, cut among its threads, find out at the
first call of any of them which kernels suit the processor, and MKL 2024.2 does so without a lock: it stores the kind of
processor as it was found, then, over it, the column of the kernels' table. A thread that reads in between takes the one
for the other. On Intel's AVX-512 processors it finds 9, where the column is 5; column 9 of the accurate kernels is one
of the inaccurate: whatever that thread computes in that call is up to 3e-4 off. So Adam, AdamW, Adagrad and RMSprop
ended in other bits in some processes, where the first such call was the optimizer's on two threads. On AMD's processors
both are 0, and nothing can be seen. (pytorch/pytorch#188792; oneMKL 2025.0 no longer does it.)
- One call on one thread, before any other, settles it for all of them: `resolve_vector_functions`.
- Products have no such moment: the kind of processor and MKL_CBWR are found under a lock and stored once, and a
  function's address is stored once, the same by whichever thread. Neither has PyTorch's own choice of an instruction
  set. There are no random streams of MKL's in PyTorch 2.13.
- What the first calls of layers, optimizers, autocast and compiled code do otherwise is what tests/numerics/zoo looks
  for, in fresh processes.

On CUDA devices, by the documentation of cuBLAS, cuDNN and PyTorch:
- cuBLAS splits some products over streams and workspaces of its own, and gives the same bits in every run only where
  CUBLAS_WORKSPACE_CONFIG fixes their number and size. It is read once, at the first product on the device.
- PyTorch has several kernels for some operators, and takes the deterministic ones where it is told to
  (``torch.use_deterministic_algorithms``); cuDNN must not choose kernels by measuring them.
- TF32 is the user's choice, and nothing here changes it. It changes every product's bits, so all processes of a run
  must have made the same one (`device_settings`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path
from typing import Any

_VARIABLE = "MKL_CBWR"
_STRICT = "AUTO,STRICT"
_ADVICE = (
    f"set {_VARIABLE}={_STRICT} before the process starts, or call holdfast.prepare_environment() "
    "before the first computation with torch"
)
# MKL's own words (mkl_types.h): ask for branch and flags at once; the flag of a strict branch.
_MKL_CBWR_ALL = -1
_MKL_CBWR_STRICT = 0x10000
_MKL_BRANCHES = {
    1: "OFF",
    2: "AUTO",
    3: "COMPATIBLE",
    4: "SSE2",
    6: "SSSE3",
    7: "SSE4_1",
    8: "SSE4_2",
    9: "AVX",
    10: "AVX2",
    11: "AVX512_MIC",
    12: "AVX512",
    13: "AVX512_MIC_E1",
    14: "AVX512_E1",
}
# The first is PyTorch's wheels', which carry MKL inside libtorch_cpu; the other that of an MKL of its own (conda).
_MKL_FUNCTIONS = ("mkl_serv_cbwr_get", "MKL_CBWR_Get")
# mallopt's parameters (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_FIXED = (":4096:8", ":16:8")  # the two under which NVIDIA promises the same bits; the second is slow

# What ATen/cpu/vml.h sends to MKL, which is what torch's library contains of MKL's vector functions. (Of complex, half
# and bfloat16 numbers, of what is not contiguous, and of log1p and expm1 there is nothing in MKL's hands.)
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)

# It builds its buckets anew after the first step of a process.
_REDUCING_OTHERWISE = ("DistributedDataParallel",)

_already_warned: set[str] = set()
_are_resolved = False


def prepare_environment() -> None:
    """Sets MKL_CBWR and CUBLAS_WORKSPACE_CONFIG where they are not set. In time at any moment before torch's first
    product: call it early.

    A value that somebody chose stays; `check_environment` and `prepare_device` say if it does not suffice. Where torch
    is imported already, MKL's vector functions are resolved, too, so that whatever is computed from here on is exact.
    """
    os.environ.setdefault(_VARIABLE, _STRICT)
    os.environ.setdefault(_CUBLAS_VARIABLE, _CUBLAS_FIXED[0])
    resolve_vector_functions()


def resolve_vector_functions() -> None:
    """Calls each of MKL's vector functions once in each precision, on this thread alone: one element is not cut. Some
    milliseconds, once in the life of the process; nothing where torch is not imported yet.

    Of each, although in MKL 2024.2 one call settles all: another version may find out anew for every function.
    """
    global _are_resolved
    torch: Any = sys.modules.get("torch")
    if _are_resolved or torch is None or not torch.backends.mkl.is_available():
        return
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for dtype in (torch.float32, torch.float64):
            half = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in VECTOR_FUNCTIONS:
                getattr(torch, name)(half)
    _are_resolved = True


def prepare_device(device: Any, warn: bool = True) -> list[str]:
    """Sets what PyTorch needs on `device` (a ``torch.device``) for the same bits in every process, as far as that can
    still be set, and gives what stands in the way of it, as sentences that say what to do.

    For the whole process: MKL's vector functions are resolved, on whatever device; on CUDA's, deterministic algorithms,
    cuDNN without benchmarking, CUBLAS_WORKSPACE_CONFIG where it is not set. An operator that has no deterministic
    algorithm then raises RuntimeError.
    warn: also as RuntimeWarning, each only once in the life of the process.
    """
    resolve_vector_functions()
    if device.type != "cuda":
        return []
    torch: Any = sys.modules["torch"]
    torch.use_deterministic_algorithms(True)
    # It would fill every fresh tensor, in case something reads what it has not written: nothing here does.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    problems = []
    value = os.environ.get(_CUBLAS_VARIABLE)
    advice = (
        f"set {_CUBLAS_VARIABLE}={_CUBLAS_FIXED[0]} before the process starts, or call "
        "holdfast.prepare_environment() before the first computation on the device"
    )
    if value is None:
        os.environ[_CUBLAS_VARIABLE] = _CUBLAS_FIXED[0]
        if torch.cuda.is_initialized():
            problems.append(
                f"{_CUBLAS_VARIABLE} was not set when CUDA was initialised, and cuBLAS may have been called since: "
                f"training on {device} may end in other bits in another process; {advice}"
            )
    elif value not in _CUBLAS_FIXED:
        problems.append(
            f"{_CUBLAS_VARIABLE}={value} is none of the values under which cuBLAS gives the same bits "
            f"({', '.join(_CUBLAS_FIXED)}): training on {device} may end in other bits in another process; {advice}"
        )
    if warn:
        _warn_once(problems)
    return problems


def device_settings(device: Any) -> dict[str, Any]:
    """What the bits of products on `device` (a ``torch.device``) depend on, and a run must not change between two of
    its processes, as plain values by name: kind of device, versions, TF32, reductions in low precision. Empty on the
    CPU.
    """
    if device.type != "cuda":
        return {}
    torch: Any = sys.modules["torch"]
    matmul = torch.backends.cuda.matmul
    return {
        "device": torch.cuda.get_device_name(device),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "torch": torch.__version__.split("+")[0],
        "cuda": torch.version.cuda or torch.version.hip,
        "tf32": _uses_tf32(torch),
        "reduced_precision_bf16": _plain(matmul.allow_bf16_reduced_precision_reduction),
        "reduced_precision_fp16": _plain(matmul.allow_fp16_reduced_precision_reduction),
    }


def mkl_mode() -> str:
    """The branch that MKL runs, and whether a strict one: what MKL_CBWR said when MKL read it. Asking makes it read."""
    torch: Any = sys.modules["torch"]
    said = _mkl_cbwr(torch) if torch.backends.mkl.is_available() else None
    if said is None:
        return "none"
    branch = said & ~_MKL_CBWR_STRICT
    return _MKL_BRANCHES.get(branch, f"branch {branch}") + (",STRICT" if said & _MKL_CBWR_STRICT else "")


def check_environment(warn: bool = True) -> list[str]:
    """What stands in the way of the same bits in every process, as sentences that say what to do.

    Asks MKL itself where it can be asked, so a variable that was set too late is noticed, too.
    warn: also as RuntimeWarning, each only once in the life of the process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and not torch.backends.mkl.is_available():
        return []
    problems = []
    value = os.environ.get(_VARIABLE)
    # Asking makes MKL read the variable, so it must not be asked while the user could still set it.
    if value is None:
        problems.append(f"{_VARIABLE} is not set: float32 training may end in other bits in another process; {_ADVICE}")
    elif not value.upper().endswith(",STRICT"):
        problems.append(
            f"{_VARIABLE}={value} does not ask for a strict branch: float32 training may end in other bits in another "
            f"process; {_ADVICE}"
        )
    elif torch is not None and _mkl_is_strict(torch) is False:
        problems.append(
            f"{_VARIABLE}={value} was set after MKL had read it, or MKL does not know it: float32 training may end in "
            f"other bits in another process; {_ADVICE}"
        )
    if warn:
        _warn_once(problems)
    return problems


def check_model(model: Any, warn: bool = True) -> list[str]:
    """What about `model` (an ``nn.Module``) and torch's settings lets a resumed run end in other bits, as sentences
    that say what to do. warn: also as RuntimeWarning, each only once in the life of the process.
    """
    torch: Any = sys.modules["torch"]
    problems = []
    wrapped = [module for module in model.modules() if type(module).__name__ in _REDUCING_OTHERWISE]
    if wrapped:
        problems.append(
            f"{type(wrapped[0]).__name__} reduces gradients in an order that it finds in the first steps of a process: "
            "a resumed run goes on with other bits; several ranks train exactly with torchrun -m holdfast train"
        )
    if any(parameter.device.type == "cuda" for parameter in model.parameters()):
        if torch.backends.cudnn.benchmark:
            problems.append(
                "torch.backends.cudnn.benchmark chooses kernels by measuring them, in every process anew: a resumed "
                "run may go on with other bits; set it to False"
            )
        if not torch.are_deterministic_algorithms_enabled():
            problems.append(
                "torch.use_deterministic_algorithms is not set: some operators on the device sum in any order; call "
                "holdfast.state.reproducibility.prepare_device(device), which sets it"
            )
    if warn:
        _warn_once(problems)
    return problems


def keep_freed_memory() -> bool:
    """Tells glibc to keep the memory of freed tensors instead of giving it back to the kernel. False if it cannot.

    It changes no bits, only time: by default glibc returns freed tensors of megabytes in every step, and the next step
    faults them in again page by page; and so with the pieces in which a restore moves rows. That is 4282 faults a step
    for a DLRM of batch 2048 in float32, 19 after this; each takes 1 to 7 µs in a virtual machine whose host takes back
    free memory. The process then keeps the memory of its largest step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    largest_int = 2**31 - 1
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, largest_int))


def _warn_once(problems: list[str]) -> None:
    """In the name of whoever called the function that found them."""
    for problem in problems:
        if problem not in _already_warned:
            _already_warned.add(problem)
            warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _uses_tf32(torch: Any) -> bool:
    """Whether float32 products are computed in TF32. PyTorch 2.9 has a word for it, and forbids the older one once
    somebody has used the new."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        return bool(matmul.allow_tf32)
    said = matmul.fp32_precision
    return bool((torch.backends.fp32_precision if said == "none" else said) == "tf32")


def _plain(value: Any) -> Any:
    """Some versions of PyTorch say these as an enum's member or a tuple."""
    return value if isinstance(value, bool) else str(value)


def _mkl_is_strict(torch: Any) -> bool | None:
    """Whether MKL runs a strict branch; None if it cannot be asked."""
    said = _mkl_cbwr(torch)
    return None if said is None else bool(said & _MKL_CBWR_STRICT)


def _mkl_cbwr(torch: Any) -> int | None:
    """MKL's branch and flags, as it has read them or reads them now; None if it cannot be asked."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    for name in _MKL_FUNCTIONS:
        function = getattr(loaded, name, None)
        if function is not None:
            function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
            return int(function(_MKL_CBWR_ALL))
    return None
