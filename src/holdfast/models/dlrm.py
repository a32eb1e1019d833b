"""DLRM (Naumov et al. 2019) in plain PyTorch; this file imports torch and nothing else.

Shapes: B batch size, D ``embedding_dim``, F ``num_features``, N = F + 1 interacting vectors, P = N * (N - 1) / 2 pairs;
X = D columns of the bottom MLP's output. Without dense columns there is no bottom MLP: N = F, X = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Bottom MLP over dense features, pooled embeddings, their interaction, top MLP to one logit.

    embeddings:   any module; ``embeddings(sparse)`` gives float ``[B, F * D]``, feature by feature, as a tensor or
                  as an object whose ``.values()`` is one (TorchRec's ``KeyedTensor``).
    num_dense:    columns of dense; 0: there is no bottom MLP, and the embeddings interact among themselves alone.
    bottom:       sizes of the bottom MLP's layers, without its input; the last must be D. A ReLU follows every layer.
                  Empty where num_dense is 0.
    top:          sizes of the top MLP's layers, without its input; the last must be 1. A ReLU follows every layer but
                  the last.
    interaction:  "dot": the bottom output, then the dot products of every two distinct vectors, in the order of
                  facebookresearch/dlrm (lower triangle, row by row). "concat": bottom output, then the embeddings.

    Weights start as in facebookresearch/dlrm: normal, std ``sqrt(2 / (out + in))``, biases ``sqrt(1 / out)``, drawn
    from torch's global generator. Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        embeddings: nn.Module,
        num_dense: int,
        embedding_dim: int,
        num_features: int,
        bottom: Sequence[int],
        top: Sequence[int],
        interaction: Literal["dot", "concat"] = "dot",
    ) -> None:
        super().__init__()
        if num_dense == 0 and bottom:
            raise ValueError(f"there are no dense columns for a bottom MLP: bottom={list(bottom)} must be empty")
        if num_dense > 0 and (not bottom or bottom[-1] != embedding_dim):
            raise ValueError(
                f"the last size of bottom must equal embedding_dim, because the bottom output interacts with the "
                f"embeddings as one more vector: bottom={list(bottom)}, embedding_dim={embedding_dim}"
            )
        if not top or top[-1] != 1:
            raise ValueError(f"the last size of top must be 1, the logit: top={list(top)}")
        if interaction not in ("dot", "concat"):
            raise ValueError(f'interaction must be "dot" or "concat", not {interaction!r}')
        num_vectors = num_features + (num_dense > 0)
        if interaction == "dot" and num_vectors < 2:
            raise ValueError('interaction "dot" needs two vectors, and there is one feature alone: use "concat"')
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.embedding_dim = embedding_dim
        self.num_features = num_features
        self.interaction = interaction
        x_width = embedding_dim if num_dense > 0 else 0
        if interaction == "dot":
            lower, symmetric = _pair_indices(num_vectors, x_width)
            # Functions of num_features, not state: a state_dict must not carry them.
            self.register_buffer("_lower", lower, persistent=False)
            self.register_buffer("_symmetric", symmetric, persistent=False)
            top_in = x_width + num_vectors * (num_vectors - 1) // 2
        else:
            top_in = embedding_dim * num_vectors
        self.bottom = _mlp(num_dense, bottom, relu_last=True) if num_dense > 0 else nn.Identity()
        self.top = _mlp(top_in, top, relu_last=False)

    @property
    def pooled_width(self) -> int:
        """Columns of the pooled embeddings, F * D."""
        return self.num_features * self.embedding_dim

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Logits ``[B]`` from ``dense`` float ``[B, num_dense]`` and whatever ``embeddings`` takes as ``sparse``."""
        pooled = self.embeddings(sparse)
        return self.from_pooled(dense, pooled if isinstance(pooled, Tensor) else pooled.values())

    def from_pooled(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits ``[B]`` from ``dense`` and the pooled embeddings ``[B, F * D]``: all of forward but the lookup."""
        return self.from_bottom(self.bottom(dense), pooled)

    def from_bottom(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Logits ``[B]`` from the bottom MLP's output, which waits for no lookup, and the pooled embeddings."""
        # Under autocast x is of low precision, and the interaction would round the embeddings to it anyhow.
        pooled = pooled.to(x.dtype)
        if self.interaction == "dot":
            x = _DotInteraction.apply(  # type: ignore[no-untyped-call]
                x, pooled, self._lower, self._symmetric, self.embedding_dim
            )
        else:
            x = torch.cat((x, pooled), dim=1)
        return self.top(x).squeeze(1)  # type: ignore[no-any-return]


class _DotInteraction(torch.autograd.Function):
    """``[B, X]``, ``[B, F * D]`` -> ``[B, X + P]``; one gather and one bmm each way, and deterministic on every device.

    Autograd's own backward of the gather is a scatter into zeros, and of bmm(V, V') two products and a sum. The
    gradient of Z = V V' is symmetric once both are added, so one gather makes G + G', and
    dV = (G + G') V. Forward and backward at B=2048, N=27, D=16 on two cores, float32: 2.0 ms; with autograd's
    gather or index_select 3.1, with Z[:, i, j] 6.3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pooled: Tensor, lower: Tensor, symmetric: Tensor, dim: int) -> Tensor:
        batch_size, ctx.x_width = x.shape
        vectors = torch.cat((x, pooled), dim=1).view(batch_size, (ctx.x_width + pooled.shape[1]) // dim, dim)
        ctx.save_for_backward(vectors, symmetric)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat((x, products.gather(1, lower.expand(batch_size, -1))), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        vectors, symmetric = ctx.saved_tensors
        batch_size, num_vectors, dim = vectors.shape
        grad_products = grad.gather(1, symmetric.expand(batch_size, -1)).view(batch_size, num_vectors, num_vectors)
        grad_products.diagonal(dim1=1, dim2=2).zero_()
        if ctx.x_width == 0:
            return None, torch.bmm(grad_products, vectors).flatten(1), None, None, None
        # Two products rather than one that is cut: what goes to the embeddings is in one piece, and is not copied.
        grad_x = torch.bmm(grad_products[:, :1], vectors).flatten(1)
        grad_pooled = torch.bmm(grad_products[:, 1:], vectors).flatten(1)
        return grad_x + grad[:, :dim], grad_pooled, None, None, None


def _pair_indices(num_vectors: int, first: int) -> tuple[Tensor, Tensor]:
    """Where each pair lies: int64 ``[P]`` into the N * N products, ``[N * N]`` into the output ``[first + P]``.

    The second has no entry for the diagonal, which is in no pair, and points at 0 there.
    """
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    symmetric = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
    symmetric[rows, columns] = torch.arange(first, first + rows.numel())
    return rows * num_vectors + columns, (symmetric + symmetric.t()).flatten()


class _Layer(nn.Linear):
    """A Linear and, if ``relu``, the ReLU after it."""

    def __init__(self, num_inputs: int, num_outputs: int, *, relu: bool) -> None:
        super().__init__(num_inputs, num_outputs)
        self.relu = relu
        # MKL is slow where a few inputs become many outputs, so a layer like that counts as a larger one.
        self._work = num_inputs * num_outputs * (32 if 4 * num_inputs < num_outputs else 1)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / (self.out_features + self.in_features)))
        nn.init.normal_(self.bias, std=math.sqrt(1 / self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self._work >= _LEAST_WORK_FOR_ONEDNN and _onednn_linear_serves(x):
            return _OneDnnLayer.apply(x, self.weight, self.bias, self.relu)  # type: ignore[no-any-return, no-untyped-call]
        y = nn.functional.linear(x, self.weight, self.bias)
        # In place: the Linear's output is needed by nobody else, and ReLU's backward reads its own result.
        return y.relu_() if self.relu else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


class _OneDnnLayer(torch.autograd.Function):
    """Linear and ReLU in float32 on the CPU, by oneDNN, which ships in PyTorch beside MKL.

    PyTorch sends float32 products to MKL, which stays with AVX2 on AMD's processors: at the shapes of these networks
    2.0 to 2.4 times slower than oneDNN's AVX-512 on Zen 5, whose units are as wide. On Zen 4 they are half as wide, and
    oneDNN wins by 2 to 16% in large layers, by half where 13 inputs become 512 outputs. A call of it costs more, here
    up to 0.2 ms for a small layer's three products, so small ones are MKL's everywhere. On Intel's (Granite Rapids) MKL
    is the faster one, by up to a half where a weight's gradient is computed, so it is left to work there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        y = _onednn_linear(x, weight, bias, "relu" if relu else "none")
        ctx.save_for_backward(x, weight, y if relu else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight, y = ctx.saved_tensors
        if y is not None:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        grad_x = _onednn_linear(grad, weight.t(), None) if ctx.needs_input_grad[0] else None
        # The operator makes its first operand contiguous: give it the smaller to transpose.
        if x.shape[1] < grad.shape[1] // 4:
            grad_weight = _onednn_linear(x.t(), grad.t(), None).t().contiguous()
        else:
            grad_weight = _onednn_linear(grad.t(), x.t(), None)
        return grad_x, grad_weight, grad.sum(0), None


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
    return y


def _onednn_linear_serves(x: Tensor) -> bool:
    return bool(
        _HAS_ONEDNN_LINEAR
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() > 0  # oneDNN has no empty products
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and not torch.compiler.is_compiling()  # TorchInductor does not compile this operator, and chooses for itself
    )


def _least_work_for_onednn(cpuinfo: Path = Path("/proc/cpuinfo")) -> float:
    """The weights of a layer from which on oneDNN's float32 products are faster than MKL's: see _OneDnnLayer."""
    try:
        of_first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return math.inf
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in of_first.splitlines())}
    if facts.get("vendor_id") != "AuthenticAMD":
        return math.inf
    return 1 << 13 if int(facts.get("cpu family", "0")) >= _ZEN_5 else 1 << 17


_ZEN_5 = 26
_LEAST_WORK_FOR_ONEDNN = _least_work_for_onednn()

# TorchInductor's operator, since PyTorch 2.0, without a public name; a build that lacks it uses nn.functional.linear.
_HAS_ONEDNN_LINEAR = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)


def _mlp(num_inputs: int, sizes: Sequence[int], *, relu_last: bool) -> nn.Sequential:
    inputs = [num_inputs, *sizes[:-1]]
    relus = [True] * (len(sizes) - 1) + [relu_last]
    return nn.Sequential(*(_Layer(m, n, relu=relu) for m, n, relu in zip(inputs, sizes, relus, strict=True)))
