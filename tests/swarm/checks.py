"""What is found, beside what the model says: bit for bit. Every function returns what differs in words, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from holdfast import _core
from holdfast.admin.by_key import by_key
from holdfast.state import state_tree
from model import Dense, State, rng_now
from twin import read_table

if TYPE_CHECKING:
    from holdfast import EmbeddingBagCollection


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(item.contiguous().reshape(-1).view(torch.uint8) for item in (left, right)))


def rows_differ(directory: Path, state: State, *, exact_touched: bool = True) -> str | None:
    """exact_touched: in a pool that was restored, rows between others may count as touched, too."""
    reader = _core.Reader(str(directory))
    for number, (weights, of_rows) in enumerate(state.rows):
        keys = state.keys[number]
        if keys is None:
            together = read_table(directory, number)
            touched = set(reader.touched_rows(number, 0, len(weights)))
        else:
            # Rows that are no key's have no place here: they are as they begin, as a lookup has them.
            together = weights.clone(), of_rows.clone()
            touched = read_keys(directory, number, keys, *together)
        for what, found, wanted in zip(("weights", "state"), together, (weights, of_rows), strict=True):
            if not same_bits(found, wanted):
                bad = (found.view(torch.int32) != wanted.view(torch.int32)).any(1).nonzero().flatten().tolist()
                return f"{what} of rows {bad} of table {number} are not those of step {state.step}"
        missing = set(state.touched[number]) - touched if not exact_touched else touched ^ set(state.touched[number])
        if missing:
            return f"rows {sorted(missing)} of table {number}: touched, or not, otherwise than at step {state.step}"
    return None


def read_keys(directory: Path, number: int, keys: list[int], weights: Tensor, state: Tensor) -> set[int]:
    """Puts what a pool has of a table's keys where they are in `keys`; returns where it has any."""
    reader = _core.Reader(str(directory))
    dtype = (torch.float32, torch.float16, torch.bfloat16)[reader.tables[number].dtype]
    places = {key: place for place, key in enumerate(keys)}
    found = set()
    for chunk in by_key(reader, number):
        for key, values, floats in zip(chunk.records["key"].tolist(), chunk.weights, chunk.state, strict=True):
            place = places[key]
            weights[place] = torch.from_numpy(values.copy()).view(dtype).float()
            state[place] = torch.from_numpy(np.frombuffer(floats.tobytes(), np.float32).copy())
            found.add(place)
    return found


def stored_dense_differs(directory: Path, state: State) -> str | None:
    """Of the network and torch's random numbers, in a pool at rest."""
    stored = _core.Reader(str(directory)).dense_state()
    if stored is None:  # nobody came so far as to write the initial one
        return None if state.step == 0 else f"there is no dense state at step {state.step}"
    step, structure, tensors = stored
    tree = state_tree.unpack(structure, tensors)
    wanted = {"model": dict(state.dense["network"]), "torch": state.rng[2]}
    place = _first_difference("", {"model": tree["model"], "torch": tree["rng"]["torch"]}, wanted)
    return None if place is None else f"the dense state of step {step}: {place} is not that of step {state.step}"


def dense_of(dense: Dense, collections: Sequence[EmbeddingBagCollection]) -> dict[str, Any]:
    """The dense part as it is in this process, random numbers too."""
    lrs = [rows.optimizer.param_groups[0]["lr"] for rows in collections]
    return {"dense": dense.state(), "lrs": lrs, "rng": rng_now()}


def dense_differs(found: dict[str, Any], state: State) -> str | None:
    place = _first_difference("", found, {"dense": state.dense, "lrs": state.lrs, "rng": state.rng})
    return None if place is None else f"{place} is not that of step {state.step}"


def _first_difference(place: str, found: Any, wanted: Any) -> str | None:
    if isinstance(wanted, Tensor):
        return None if isinstance(found, Tensor) and same_bits(found, wanted) else place
    if isinstance(wanted, np.ndarray):
        return None if np.array_equal(found, wanted) else place
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping) or list(found) != list(wanted):
            return f"{place} (keys)"
        pairs = [(f"{place}[{key!r}]", found[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(found, Sequence) or len(found) != len(wanted):
            return f"{place} (length)"
        pairs = [(f"{place}[{i}]", f, w) for i, (f, w) in enumerate(zip(found, wanted, strict=True))]
    else:
        both_nan = isinstance(wanted, float) and isinstance(found, float) and math.isnan(found) and math.isnan(wanted)
        return None if found == wanted or both_nan else place
    for where, f, w in pairs:
        if (bad := _first_difference(where, f, w)) is not None:
            return bad
    return None
