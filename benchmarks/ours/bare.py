"""The native baseline (benchmarks/core/bare.cpp) through ctypes, and its tables as a module."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from peers.batches import Batch
    from peers.shapes import Shape

_OPTIMIZERS = {"sgd": 0, "rowwise_adagrad": 1}  # core/kernels/kernels.h, RowOptimizer


class Library:
    """libbare.so; a failed call raises RuntimeError with its message."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, u32, u64, f32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
        self._declare("error", ctypes.c_char_p)
        self._declare("open", pointer, ctypes.c_char_p, u64, u64, u32, u32, u64, u64, u64, ctypes.c_int)
        self._declare("close", None, pointer)
        self._declare("write_table", ctypes.c_int, pointer, u64, pointer)
        self._declare("plan", ctypes.c_int, pointer, pointer, pointer)
        self._declare("lookup", ctypes.c_int, pointer, pointer, pointer)
        self._declare("update", ctypes.c_int, pointer, pointer, f32, f32)
        self._declare("log_rows", u64, pointer)
        self._declare("log_dense", ctypes.c_int, pointer, u64, pointer, pointer)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, f"bare_{name}")
        function.restype, function.argtypes = result, arguments

    def __call__(self, name: str, *arguments: Any) -> Any:
        result = getattr(self._library, f"bare_{name}")(*arguments)
        if message := self._library.bare_error():
            raise RuntimeError(f"bare_{name}: {message.decode()}")
        return result


class BareTables(nn.Module):
    """Tables of a shape in files of ``directory``, updated in place. Nothing is logged unless asked."""

    def __init__(
        self, library: Path, directory: Path, shape: Shape, optimizer: str, *, dense_bytes: int, num_threads: int
    ) -> None:
        super().__init__()
        self._call = Library(library)
        self.batch_size = shape.batch_size
        self.width = shape.num_tables * shape.embedding_dim
        self.anchor = torch.zeros((), requires_grad=True)
        self.grad: Tensor | None = None
        lookups = shape.num_tables * shape.batch_size * shape.lookups_per_bag
        # A pool's log holds a few batches (core/pool/pool.cpp, grow_log): so does this one.
        log_bytes = max(16 << 20, 5 * lookups * (shape.embedding_dim * 4 + 12))
        self._handle = self._call(
            "open",
            str(directory).encode(),
            shape.num_tables,
            shape.num_embeddings,
            shape.embedding_dim,
            _OPTIMIZERS[optimizer],
            shape.batch_size,
            log_bytes,
            dense_bytes,
            num_threads,
        )

    def write_table(self, number: int, weights: Tensor) -> None:
        self._call("write_table", self._handle, number, weights.data_ptr())

    def plan(self, batch: Batch) -> None:
        self._call("plan", self._handle, batch.ids.data_ptr(), batch.offsets.data_ptr())

    def lookup(self, rows: Tensor) -> Tensor:
        """``rows``: the planned batch's ids as int32. Float ``[B, F * D]``."""
        out: Tensor = _Lookup.apply(self.anchor, self, rows)  # type: ignore[no-untyped-call]
        return out

    def lookup_into(self, rows: Tensor, out: Tensor) -> None:
        self._call("lookup", self._handle, rows.data_ptr(), out.data_ptr())

    def update(self, learning_rate: float, epsilon: float) -> None:
        assert self.grad is not None
        self._call("update", self._handle, self.grad.data_ptr(), learning_rate, epsilon)
        self.grad = None

    def log_rows(self) -> int:
        return int(self._call("log_rows", self._handle))

    def log_dense(self, tensors: list[Tensor]) -> None:
        count = len(tensors)
        addresses = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in tensors))
        sizes = (ctypes.c_uint64 * count)(*(tensor.nbytes for tensor in tensors))
        self._call("log_dense", self._handle, count, addresses, sizes)

    def close(self) -> None:
        self._call("close", self._handle)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: BareTables, rows: Tensor) -> Tensor:
        ctx.tables = tables
        out = torch.empty(tables.batch_size, tables.width)
        tables.lookup_into(rows, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.tables.grad = grads[0].contiguous()
        return None, None, None
