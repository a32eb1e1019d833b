"""torch.compile for runs that must be resumed exactly.

Compiled code is a function of the source, the shapes and the versions, as long as no kernel is chosen by what was
fastest when it was measured: the next process may measure otherwise. So autotuning is refused, and what the compiler
would measure without being asked (padding of products, tiles of reductions) is turned off for what is compiled here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import ConfigError

# Names in torch._inductor.config, and the environment variables that set them.
_AUTOTUNING = {
    "max_autotune": "TORCHINDUCTOR_MAX_AUTOTUNE",
    "max_autotune_pointwise": "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "max_autotune_gemm": "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "coordinate_descent_tuning": "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "benchmark_fusion": "TORCHINDUCTOR_BENCHMARK_FUSION",
    "incremental_autotune": "TORCHINDUCTOR_INCREMENTAL_AUTOTUNE",
}
# "deterministic" came after 2.6, the oldest PyTorch that holdfast takes.
_FIXED: dict[str, Any] = {"deterministic": True, "shape_padding": False}


def refuse_autotuning() -> None:
    """Raises ConfigError where TorchInductor is set to choose kernels by measuring them; names the setting."""
    config = importlib.import_module("torch._inductor.config")
    for name, variable in _AUTOTUNING.items():
        if getattr(config, name, False):
            raise ConfigError(
                f"device.compile: torch._inductor.config.{name} is on ({variable}=1 sets it): an autotuned kernel may "
                "be another one in the next process, and a resumed run would end in other bits; turn it off, or set "
                "device.compile = false"
            )


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled by TorchInductor at its first call, for the shapes of that call; its default mode.

    Raises ConfigError where autotuning is on, and, from that call, where the compiler does not get through.
    """
    refuse_autotuning()
    config = importlib.import_module("torch._inductor.config")
    failures = importlib.import_module("torch._dynamo.exc").TorchDynamoException
    options = {name: value for name, value in _FIXED.items() if hasattr(config, name)}
    fast = torch.compile(function, dynamic=False, options=options)

    def call(*tensors: Tensor) -> Tensor:
        try:
            return fast(*tensors)
        except failures as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"device.compile: the dense part could not be compiled: {reason}; TorchInductor needs a C++ compiler "
                "for the CPU and Triton for a GPU; install what is missing, or set device.compile = false"
            ) from error

    return call
