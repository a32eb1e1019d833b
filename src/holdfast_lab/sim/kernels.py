"""Kernels that a processor launches for a stage, as PyTorch and TensorFlow do: products, and what each layer reads and
writes around them. Of one of the GPUs that share a batch.

What is counted of a layer: a forward pass is the product, and bias and activation (a read and a write); a backward pass
the activation's gradient (two reads, a write), the bias's (a read), two products, and the optimizer's pass over weights
(two reads and a write of fp32). In half precision weights and vectors are cast before, gradients of vectors after. The
interaction is one kernel each way, around which its vectors are put together and taken apart. Between GPUs vectors and
their gradients are packed by where they go, and unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from holdfast_lab.sim.device import Kernel
from holdfast_lab.sim.model import ELEMENT_BYTES, Workload
from holdfast_lab.sim.system import Does

_SORTED_BYTES = 4 * 2 * 8  # of an id that is sorted with its place: four passes of 8 bits, read and written


def network_kernels(does: Does, workload: Workload) -> tuple[Kernel, ...]:
    samples = workload.batch_size / workload.gpus
    element = ELEMENT_BYTES[workload.precision]
    if does == "bottom_forward":
        return tuple(_forward(workload.bottom_layers, samples, element))
    if does == "bottom_backward":
        return tuple(_backward(workload.bottom_layers, samples, element, to_input=False))
    return (
        *_interaction(workload, samples, element),
        *_forward(workload.top_layers, samples, element),
        *_backward(workload.top_layers, samples, element, to_input=True),
        *_interaction_backward(workload, samples, element),
    )


def row_kernels(does: Does, workload: Workload, part: float) -> tuple[Kernel, ...]:
    """What moves beside the rows themselves: vectors that are written, gradients that are read, ids that are sorted so
    that each row is updated once."""
    if does not in ("lookup", "update"):
        return ()
    share = part * workload.skew / workload.gpus
    vectors_bytes = share * workload.pooled_bytes * workload.partial_vectors
    kernels = [Kernel(vectors_bytes)]
    if workload.gpus > 1:
        kernels.append(Kernel(2 * vectors_bytes))
    if does == "update":
        kernels.append(Kernel(share * workload.accesses * _SORTED_BYTES))
    return tuple(kernels)


def _forward(layers: Sequence[int], samples: float, element: int) -> Iterator[Kernel]:
    for before, after in pairwise(layers):
        if element < 4:
            yield Kernel((4 + element) * before * after)
        yield _product(samples, after, before, element)
        yield Kernel(2 * element * samples * after)


def _backward(layers: Sequence[int], samples: float, element: int, *, to_input: bool) -> Iterator[Kernel]:
    for number, (before, after) in enumerate(pairwise(layers)):
        yield Kernel(3 * element * samples * after)
        yield Kernel(element * samples * after)
        yield _product(before, after, samples, element)
        if number or to_input:
            yield _product(samples, before, after, element)
        yield Kernel(3 * 4 * (before + 1) * after)


def _interaction(workload: Workload, samples: float, element: int) -> Iterator[Kernel]:
    vectors, dim = _vectors(workload)
    yield from _moving_vectors(workload, element)
    yield Kernel(2 * element * samples * _width(workload))
    if not _is_dot(workload):
        return
    moved = element * samples * (vectors * dim + workload.top_layers[0])
    yield Kernel(moved, rows=vectors, columns=vectors, inner=dim, copies=samples)


def _interaction_backward(workload: Workload, samples: float, element: int) -> Iterator[Kernel]:
    vectors, dim = _vectors(workload)
    if _is_dot(workload):
        moved = element * samples * (2 * vectors * dim + workload.top_layers[0])
        yield Kernel(moved, rows=vectors, columns=dim, inner=vectors, copies=2 * samples)
    yield Kernel(2 * element * samples * _width(workload))
    yield from _moving_vectors(workload, element)


def _moving_vectors(workload: Workload, element: int) -> Iterator[Kernel]:
    """Of a GPU's samples: unpacked or packed, and cast."""
    of_samples = workload.pooled_bytes / workload.gpus
    if workload.gpus > 1:
        yield Kernel(2 * of_samples)
    if element < 4:
        yield Kernel((1 + element / 4) * of_samples)


def _product(rows: float, columns: float, inner: float, element: int) -> Kernel:
    moved = element * (rows * inner + inner * columns + rows * columns)
    return Kernel(moved, rows=rows, columns=columns, inner=inner)


def _vectors(workload: Workload) -> tuple[int, int]:
    """Of a sample, how many interact, and their size."""
    return workload.num_tables + 1, workload.bottom_layers[-1]


def _is_dot(workload: Workload) -> bool:
    return workload.interaction_flops > 0


def _width(workload: Workload) -> float:
    """Elements of a sample that are put together."""
    pooled = workload.pooled_bytes / 4 / workload.batch_size
    return workload.bottom_layers[-1] + pooled
