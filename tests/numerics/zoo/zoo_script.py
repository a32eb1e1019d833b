"""One process of the zoo: users' own loops, one for each layer, over a pool of their own; prints a digest of each.

    python tests/numerics/zoo/zoo_script.py fp32 2 17        # precision, threads, the process's number

A process's number decides which optimizer each layer gets, in which order the layers come, and where in memory operands
lie: nothing that a digest may show. It is a Latin square, so that first calls are everybody's by turns: of
`NUM_OPTIMIZERS` times n processes of one precision and number of threads, each combination of layer and optimizer runs
in n, each optimizer comes first in n, and each layer in n * NUM_OPTIMIZERS / NUM_LAYERS.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast
from holdfast import _core
from holdfast.admin.digest import digest_pool

BATCH = 512
FEATURES = ("a", "b", "c")
DIM = 16
WIDTH = DIM * len(FEATURES)
STEPS = 3

optim = torch.optim
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    f"{name} {way}": partial(kind, **{way: True} if way != "plain" else {"foreach": False}, **options)
    for name, kind, options, ways in (
        ("SGD", optim.SGD, {"lr": 0.05, "momentum": 0.9}, ("plain", "foreach", "fused")),
        ("Adam", optim.Adam, {"lr": 0.01}, ("plain", "foreach", "fused")),
        ("AdamW", optim.AdamW, {"lr": 0.01}, ("plain", "foreach", "fused")),
        ("Adagrad", optim.Adagrad, {"lr": 0.05}, ("plain", "foreach", "fused")),
        ("RMSprop", optim.RMSprop, {"lr": 0.01}, ("plain", "foreach")),
        ("NAdam", optim.NAdam, {"lr": 0.01}, ("plain", "foreach")),
    )
    for way in ways
}


class Attention(nn.Module):
    """The batch's vectors in sequences of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).view(-1, 64, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, WIDTH)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.view(-1, len(FEATURES), DIM))[0][:, -1]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(len(FEATURES), len(FEATURES), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, len(FEATURES), DIM)).flatten(1)


class Cross(nn.Module):
    """A layer of a deep and cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x) + x


class Beside(nn.Module):
    """A table of PyTorch's own beside the pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[0]) * 7 % 501)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear 1": partial(linear, 1),
    "Linear 64": partial(linear, 64),
    "Linear 1000": partial(linear, 1000),
    "Linear 4096": partial(linear, 4096),
    "LayerNorm": partial(nn.LayerNorm, WIDTH),
    "BatchNorm1d": partial(nn.BatchNorm1d, WIDTH),
    "Dropout": partial(nn.Dropout, 0.3),
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "tanh": nn.Tanh,
    "softmax": partial(Of, partial(F.softmax, dim=1)),
    "attention": Attention,
    "GRU": Recurrent,
    "Conv1d": Convolution,
    "Embedding": Beside,
    "cross": Cross,
}
NUM_OPTIMIZERS = len(OPTIMIZERS)
NUM_LAYERS = len(LAYERS)


def combinations(number: int) -> Iterator[tuple[str, str]]:
    """Layer and optimizer, in the order in which process `number` takes them."""
    layers, optimizers = list(LAYERS), list(OPTIMIZERS)
    turn = number // NUM_OPTIMIZERS
    first = turn % NUM_LAYERS
    others = [layer for layer in range(NUM_LAYERS) if layer != first]
    random.Random(number).shuffle(others)
    for layer in (first, *others):
        yield layers[layer], optimizers[(number + layer - first) % NUM_OPTIMIZERS]


class Memory:
    """Puts operands somewhere else in every process: at any multiple of their elements' size."""

    def __init__(self, number: int) -> None:
        self._draws = random.Random(f"memory {number}")
        self._kept: list[Tensor] = []

    def disturb(self) -> None:
        self._kept = [torch.empty(self._draws.randrange(1, 200_000)) for _ in range(self._draws.randrange(8))]

    def place(self, tensor: Tensor) -> Tensor:
        offset = self._draws.randrange(64)
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        return room[offset:].view(tensor.shape).copy_(tensor)


def train(directory: Path, layer: str, optimizer: str, precision: str, memory: Memory) -> dict[str, str]:
    """A user's script."""
    torch.manual_seed(1)
    draws = torch.Generator().manual_seed(2)
    with holdfast.Pool(directory, seed=3) as pool:
        rows = holdfast.EmbeddingBagCollection(
            pool,
            [
                holdfast.EmbeddingBagConfig(name=name, num_embeddings=3000, embedding_dim=DIM, feature_names=[name])
                for name in FEATURES
            ],
            optimizer=holdfast.RowWiseAdagrad(lr=0.1),
        )
        net = nn.Sequential(LAYERS[layer](), nn.Linear(WIDTH, 1))
        for parameter in net.parameters():
            parameter.data = memory.place(parameter.data)
        dense = OPTIMIZERS[optimizer](net.parameters())
        checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=dense)
        checkpoint.resume()
        offsets = torch.arange(BATCH + 1)
        torch.compiler.reset()  # else the ninth network of a process is over dynamo's limit, and runs as it is
        forward: Any = torch.compile(net) if precision == "compile" else net
        for step in range(STEPS):
            memory.disturb()
            ids = torch.randint(3000, (len(FEATURES), BATCH), generator=draws)
            labels = memory.place((torch.rand(BATCH, generator=draws) > 0.5).float())
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                pooled = rows({name: (part, offsets) for name, part in zip(FEATURES, ids, strict=True)}).values()
                logits = forward(pooled).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
            dense.zero_grad()
            loss.backward()
            dense.step()
            rows.optimizer.step()
            checkpoint.commit((step + 1) * BATCH)
        found = {
            "parameters": digest(*net.state_dict().values()),
            "optimizer": digest(*(value for state in dense.state.values() for value in state.values())),
            "random numbers": digest(torch.get_rng_state()),
        }
    return {"rows": digest(*digest_pool(_core.Reader(str(directory))).tables.values()), **found}


def digest(*items: Tensor | str) -> str:
    sha = hashlib.sha256()
    for item in items:
        sha.update(item.encode() if isinstance(item, str) else item.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def main(precision: str, num_threads: int, number: int) -> None:
    torch.set_num_threads(num_threads)
    memory = Memory(number)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        for position, (layer, optimizer) in enumerate(combinations(number)):
            found = train(Path(directory) / str(position), layer, optimizer, precision, memory)
            print(json.dumps([layer, optimizer, found]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
