"""The state at the end of a step, as leaves: everything that a Checkpoint holds, and the rows that the step touched.

Observing changes nothing: it draws no random number, updates nothing, and reads rows as an evaluation does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.proving.record import Leaf
from holdfast.rows.collection import RowCollection
from holdfast.rows.row_access import PlannedFeatures
from holdfast.state import generators
from holdfast.train.checkpoint import Checkpoint

_PARTS = {
    "model": "parameters",
    "optimizers": "optimizer state",
    "row_optimizers": "optimizer state",
    "schedulers": "schedulers",
    "scaler": "scaler",
    "loader": "loader",
}
_WORDS = 120


@dataclass(slots=True)
class Values:
    """Bytes of tensors, one after the other in a file, as long as there is room."""

    file: BinaryIO
    room_bytes: int
    end: int = 0

    def keep(self, data: memoryview) -> int:
        """Where it is; -1 if it was not kept."""
        if data.nbytes > self.room_bytes:
            self.room_bytes = 0  # all of a run from here on, or nothing: what lies between would only confuse
            return -1
        offset, self.end = self.end, self.end + data.nbytes
        self.room_bytes -= data.nbytes
        self.file.write(data)
        return offset


def short_digest(*pieces: bytes | memoryview) -> str:
    sha = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def tensor_leaf(part: str, name: str, tensor: Tensor, values: Values | None = None) -> Leaf:
    data = bytes_of(tensor)
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    offset = -1 if values is None else values.keep(data)
    return Leaf(part, name, short_digest(words.encode(), data), words, offset, data.nbytes)


def value_leaf(part: str, name: str, value: Any) -> Leaf:
    text = repr(value)
    return Leaf(part, name, short_digest(text.encode()), text if len(text) <= _WORDS else f"{text[:_WORDS]}...")


def dense_leaves(checkpoint: Checkpoint, values: Values | None) -> Iterator[Leaf]:
    """Everything that the Checkpoint holds beside rows; random numbers, too."""
    objects = checkpoint._state._objects
    model = objects["model"]
    for name, target in objects.items():
        # As Checkpoint.load: what has no load_state_dict, the script puts back itself.
        part = _PARTS.get(name.partition("[")[0], "extra" if hasattr(target, "load_state_dict") else "plain values")
        tree = target.state_dict() if hasattr(target, "state_dict") else target
        shown = name
        if isinstance(target, torch.optim.Optimizer) and isinstance(model, nn.Module):
            shown = f"{name} ({type(target).__name__})"
            tree = _named_by_parameter(tree, target, model)
        if name == "loader" and isinstance(tree, Mapping):
            # Batches taken ahead are not consumed: the cursor says where the data is.
            tree = {key: value for key, value in tree.items() if key != "samples"}
        yield from _leaves(part, shown, tree, values)
    for name, state in generators.rng_state().items():
        yield from _leaves("random numbers", f"the global generator of {name}", _rng_of(state), values)


def row_leaves(touched: Sequence[tuple[RowCollection, PlannedFeatures]], values: Values) -> Iterator[Leaf]:
    """The rows of a step's batches, and which they are."""
    for collection in dict.fromkeys(collection for collection, _ in touched):
        plans = [planned.plan for where, planned in touched if where is collection]
        for number, table in enumerate(collection.tables):
            # Which row a key has is nobody's business: it may be another one after a resume.
            what, ids = ("rows", _ids(plan.rows(number) for plan in plans))
            if table.keys is not None:
                what, ids = ("keys", _ids(plan.keys(number) for plan in plans))
            yield tensor_leaf("batch", f"{what} that the batch reads of table '{table.name}'", ids, values)
            yield tensor_leaf("rows", f"table '{table.name}'", collection.read(number, ids), values)


def _ids(found: Iterable[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.unique(np.concatenate([np.array(some, np.uint64) for some in found])).view(np.int64))


def _leaves(part: str, name: str, node: Any, values: Values | None) -> Iterator[Leaf]:
    if isinstance(node, Tensor):
        yield tensor_leaf(part, name, node, values)
    elif isinstance(node, np.ndarray):
        contiguous = np.ascontiguousarray(node)
        yield Leaf(part, name, short_digest(str(node.dtype).encode(), contiguous.tobytes()), f"array {node.shape}")
    elif isinstance(node, torch.Generator):
        yield tensor_leaf(part, name, node.get_state(), values)
    elif isinstance(node, np.random.Generator):
        yield value_leaf(part, name, node.bit_generator.state)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(part, f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]", value, values)
    elif isinstance(node, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in node):
        for number, item in enumerate(node):
            yield from _leaves(part, f"{name}[{number}]", item, values)
    else:
        yield value_leaf(part, name, node)


def _named_by_parameter(tree: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """An optimizer's state_dict with the names of parameters instead of their numbers."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("state"), Mapping):
        return tree
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: names.get(id(parameter), str(number)) for number, parameter in enumerate(parameters)}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in tree["param_groups"]]
    state = {f"[{numbered.get(number, number)}]": value for number, value in tree["state"].items()}
    return {"param_groups": groups, "state": state}


def _rng_of(state: Any) -> Any:
    """One leaf a generator."""
    if isinstance(state, Mapping):
        pieces = [
            value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode() for value in state.values()
        ]
        return short_digest(*pieces)
    return state
