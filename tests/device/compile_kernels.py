"""Compiles the kernels for an H100, which needs none, as their own launches ask for it.

    compile_kernels.py: prints JSON, [[kernel, dim, dtype, PTX], …]

A process of its own: where Triton's interpreter was asked for, nothing is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from holdfast.device import kernels
from holdfast.device.kernels.dispatch import using


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def run_kernels(dim: int, dtype: torch.dtype, batch_size: int, optimizers: Sequence[int]) -> None:
    features, rows = 3, batch_size + 7
    weights = torch.zeros(9, dim, dtype=dtype)
    indexes = torch.zeros(40 * batch_size, dtype=torch.int32)
    columns, starts = indexes[:features], indexes[: features * batch_size + 1]
    pooled = torch.zeros(batch_size, features * dim)
    alignment = 4 if dim % 4 == 0 else 1
    for lookups in (indexes[:batch_size], indexes):
        kernels.pooled_lookup(weights, lookups, starts, columns, pooled, scale=None, mean=False, alignment=alignment)
        for most in (60, 3000):
            kernels.segment_sum(
                pooled, starts, lookups, dim, scale=None, max_occurrences=min(most, batch_size), alignment=alignment
            )
    kernels.scale_gradients(weights, indexes, starts, columns, pooled, mean=True, alignment=alignment)
    slots = indexes[:rows]
    for kind in optimizers:
        width = (0, 1, dim, 2 * dim, dim + 1)[kind]
        state, fresh_state = (torch.zeros(count, width) if width else None for count in (9, rows))
        fresh = torch.zeros(rows, dim, dtype=dtype)
        update = partial(
            kernels.update_rows,
            kind,
            weights,
            slots=slots,
            sums=torch.zeros(rows, dim),
            hyperparameters=kernels.Hyperparameters(learning_rate=0.1, step=batch_size, beta1=0.9, beta2=0.99),
            gradient_scale=torch.ones(()),
            rounding=(7, slots, slots.long()),
            fresh_weights=fresh,
        )
        update(state=state, fresh_state=fresh_state)
        keyed_state, keyed_fresh = torch.zeros(9, width + 4), torch.zeros(rows, width + 4)
        keyed = kernels.KeyUpdate(slots.long(), slots, slots.long(), batch_size)
        update(state=keyed_state, fresh_state=keyed_fresh, keyed=keyed)
        if kind < 2:
            initial = kernels.InitialValues.of(7, [(-0.5, 0.5)], slots.device)
            kernels.start_keys(weights, keyed_state, slots, slots.long(), slots, slots.long(), initial)
            kernels.gather_rows(weights, state, slots, fresh, fresh_state)
            kernels.scatter_rows(fresh, fresh_state, slots, slots, weights, state)
            kernels.gather_home(torch.zeros(4, 2, dtype=torch.int64), slots, slots.long(), slots, slots, weights, state)


def main() -> None:
    triton.runtime.driver.set_active(NoDevice())
    compiled: dict[int, list[Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(id(kernel), [kernel, self.fn.__name__, *shape])

    JITFunction.run = compile_only
    with using("triton"):
        for dim, dtype, optimizers in ((128, torch.float32, range(5)), (33, torch.float16, (1,))):
            shape = [dim, str(dtype)]
            for batch_size in (2048, 1000, 4097):
                run_kernels(dim, dtype, batch_size, optimizers)
    print(json.dumps([[*names, kernel.asm["ptx"]] for kernel, *names in compiled.values()]))


main()
