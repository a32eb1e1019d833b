"""What is computed where rows lie in slots of a device's memory.

Each function has two implementations that give the same bits: kernels in Triton (the modules `*_triton`), which CUDA
tensors get where Triton is installed, and their twins in plain torch, beside the function, for everything else. See
`dispatch`.

Invariants
- Bits do not depend on slots, on tiles, or on what else is in the batch; there are no atomics, and no sum is left in an
  order that a compiler or a scheduler chooses.
- Tensors are contiguous, and all on one device. Nothing waits for the device (the twins may). Work is queued on its
  current stream, and nothing is queued for empty inputs.
- lookup · segment_sum · update · move · keys · finite
"""

from holdfast.device.kernels.finite import all_finite
from holdfast.device.kernels.keys import InitialValues, KeyUpdate, start_keys
from holdfast.device.kernels.lookup import pooled_lookup, scale_gradients
from holdfast.device.kernels.move import gather_home, gather_rows, scatter_rows
from holdfast.device.kernels.segment_sum import segment_sum
from holdfast.device.kernels.update import Hyperparameters, update_rows

__all__ = [
    "Hyperparameters",
    "InitialValues",
    "KeyUpdate",
    "all_finite",
    "gather_home",
    "gather_rows",
    "pooled_lookup",
    "scale_gradients",
    "scatter_rows",
    "segment_sum",
    "start_keys",
    "update_rows",
]
