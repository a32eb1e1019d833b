"""Loading of training state that gives back what was saved.

Invariants
- When `load_all` returns, the `state_dict` of every object is the saved one: keys and their order, types, values,
  tensors to the bit. Where an object's own loading changes something (an optimizer casts its state to the dtype of the
  parameter, a scheduler sets the learning rate anew), the saved value is put back in its place.
- What cannot be put back is a StateError that names its place.
- One exception is warned of and stays: a setting that an optimizer or a scheduler has and that was not saved, as a
  later PyTorch has more of them.
- Objects are loaded before any is compared: what one does to another is noticed.
- An optimizer's state lies in memory as it did, or, where it was saved without an order, as its parameter does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import HoldfastError, StateError
from holdfast.state import state_tree
from holdfast.state.tree_writer import path_of

ORDER = "parameters"  # in the tree of a dense state: of each optimizer, the names of what it steps

_Path = tuple[Any, ...]
_Flat = tuple[bytes, list[Tensor]]


def load_all(objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Loads each object from what was saved under its name, but for plain values, which cannot be. Raises
    StateError."""
    objects = {name: target for name, target in objects.items() if hasattr(target, "load_state_dict")}
    # Before anything is loaded: some objects rearrange what they are given.
    wanted = {name: state_tree.flatten(saved[name]) for name in objects}
    for name, target in objects.items():
        _load(name, target, saved[name])
    repaired = [_repair(name, target, wanted[name]) for name, target in objects.items()]
    for target in objects.values():
        if isinstance(target, torch.optim.Optimizer):
            _lay_out(target)
    if any(repaired):
        for name, target in objects.items():
            _check(name, target, wanted[name])


def refuse_other_order(saved: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> None:
    """Of optimizers, which know parameters by their order alone. Raises StateError for one that was saved in another
    place, whose state would be that of the one that is there now. Dense states of before there were names have none."""
    known = {name for names in now.values() for name in names if name}
    for optimizer, names in now.items():
        for place, (was, is_) in enumerate(zip(saved.get(optimizer, ()), names, strict=False)):
            if was != is_ and was in known:
                raise StateError(
                    f"{optimizer}: its parameter {place} is {is_ or 'without a name'}, where {was} was saved; give "
                    "parameters, groups and optimizers in the same order in every process (a set has none: sort it)"
                )


def _load(name: str, target: Any, saved: Any) -> None:
    groups = target.param_groups if isinstance(target, torch.optim.Optimizer) else []
    settings = [dict(group) for group in groups]
    try:
        target.load_state_dict(saved)
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    except HoldfastError:
        raise
    except Exception as error:
        raise StateError(f"{name} does not fit the saved state: {error!r}") from error
    if isinstance(target, torch.optim.Optimizer):
        moved: dict[int, Tensor] = {}
        for number, (before, group) in enumerate(zip(settings, target.param_groups, strict=False)):
            if lost := before.keys() - group.keys():
                raise StateError(
                    f"{name}.param_groups[{number}] was saved without {min(lost)!r}: by another kind of optimizer, or "
                    "beside another scheduler; make them as they were"
                )
            for key, value in before.items():
                _move_back(group, key, value, moved)


def _move_back(group: dict[str, Any], key: str, before: Any, moved: dict[int, Tensor]) -> None:
    """What is saved has no device: a learning rate that was a tensor on one comes back on the processor."""
    loaded = group[key]
    if isinstance(before, Tensor) and isinstance(loaded, Tensor) and loaded.device != before.device:
        group[key] = moved.setdefault(id(loaded), loaded.to(before.device))


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Gives state that has a parameter's shape the parameter's order in memory (channels last, a transposed matrix), as
    it had when it was made, unless it came with one of its own; where an optimizer is fused, which goes through both as
    they lie, in any case."""
    moved: dict[int, Tensor] = {}
    fused = {id(of) for group in optimizer.param_groups if group.get("fused") for of in group["params"]}
    states: dict[Any, Any] = optimizer.state  # whose keys are parameters, and what else an optimizer of a user's keeps
    for parameter, state in states.items():
        for key, value in state.items() if isinstance(parameter, Tensor) else ():
            if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
                continue
            if not value.is_contiguous() and id(parameter) not in fused:
                continue
            like = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
            state[key] = moved.setdefault(id(value), like.copy_(value))


def _repair(name: str, target: Any, wanted: _Flat) -> bool:
    """Puts back what loading changed; returns whether there was anything."""
    found = []
    for difference in _differences(target, wanted):
        if difference.is_new_setting(target):
            warnings.warn(
                f"{difference.place(name)} was not saved (by an earlier PyTorch, which had none?): it stays as it is",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            found.append(difference)
            difference.put_back(target)
    return bool(found)


def _check(name: str, target: Any, wanted: _Flat) -> None:
    for difference in _differences(target, wanted):
        if not difference.is_new_setting(target):
            place = difference.place(name)
            raise StateError(f"{place}: {difference.reason}; loading does not give back what was saved")


@dataclass(frozen=True, slots=True)
class _Difference:
    """saved: the value at `path`, None where there was none."""

    path: _Path
    reason: str
    saved: Any = None
    was_saved: bool = True

    def place(self, name: str) -> str:
        return path_of([*reversed(self.path), name])

    def is_new_setting(self, target: Any) -> bool:
        is_setting = isinstance(target, torch.optim.lr_scheduler.LRScheduler) or (
            isinstance(target, torch.optim.Optimizer) and self.path[:1] == ("param_groups",) and len(self.path) == 3
        )
        return is_setting and not self.was_saved

    def put_back(self, target: Any) -> None:
        """Into the live object, where its state_dict shares memory or containers with it; elsewhere in vain."""
        if not self.was_saved or not self.path:
            return
        path = self.path
        container: Any = target.state_dict()
        if isinstance(target, torch.optim.Optimizer) and path[0] == "param_groups" and len(path) > 1:
            container, path = target.param_groups, path[1:]  # its state_dict has copies of them
        for key in path[:-1]:
            container = container[key]
        if not isinstance(container, (dict, list)):
            return
        present = isinstance(container, list) or path[-1] in container
        now = container[path[-1]] if present else None
        if not isinstance(now, Tensor) or not isinstance(self.saved, Tensor):
            container[path[-1]] = self.saved
        elif now.dtype == self.saved.dtype and now.shape == self.saved.shape:
            with torch.no_grad():
                now.copy_(self.saved)
        else:
            container[path[-1]] = self.saved.to(now.device)


def _differences(target: Any, wanted: _Flat) -> list[_Difference]:
    structure, tensors = state_tree.flatten(target.state_dict())
    if structure == wanted[0] and all(map(_same_bytes, wanted[1], tensors)):
        return []
    found = list(_compare(state_tree.unflatten(*wanted), state_tree.unflatten(structure, tensors), ()))
    return found or [_Difference((), "tensors that were one are several now, or the other way round")]


def _compare(saved: Any, now: Any, path: _Path) -> Iterator[_Difference]:
    """Both as `unflatten` gives them."""
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        if (saved.dtype, saved.shape) != (now.dtype, now.shape):
            was, is_ = ([str(tensor.dtype), tuple(tensor.shape)] for tensor in (saved, now))
            yield _Difference(path, f"saved as {was[0]} {was[1]}, loaded as {is_[0]} {is_[1]}", saved)
        elif not _same_bytes(saved, now):
            yield _Difference(path, "the tensor has other values than were saved", saved)
    elif type(saved) is not type(now):
        yield _Difference(path, f"saved as {type(saved).__name__}, loaded as {type(now).__name__}", saved)
    elif isinstance(saved, dict):
        yield from _compare_dicts(saved, now, path)
    elif isinstance(saved, (list, tuple)) and len(saved) == len(now):
        for number, (mine, other) in enumerate(zip(saved, now, strict=True)):
            yield from _compare(mine, other, (*path, number))
    elif not _same_value(saved, now):
        yield _Difference(path, f"saved as {saved!r:.60}, loaded as {now!r:.60}", saved)


def _compare_dicts(saved: dict[Any, Any], now: dict[Any, Any], path: _Path) -> Iterator[_Difference]:
    mine, others = ([(type(key), key) for key in keys] for keys in (saved, now))
    for key in others:
        if key not in mine:
            yield _Difference((*path, key[1]), "there is none in the saved state", was_saved=False)
    for key in mine:
        if key not in others:
            yield _Difference((*path, key[1]), "saved, and not loaded", saved[key[1]])
        else:
            yield from _compare(saved[key[1]], now[key[1]], (*path, key[1]))
    common = [key for key in mine if key in others]
    for was, is_ in zip(common, [key for key in others if key in mine], strict=True):
        if was != is_:
            yield _Difference(path, f"{was[1]!r} was saved where {is_[1]!r} is now: in another order", was_saved=False)
            return


def _same_bytes(saved: Tensor, now: Tensor) -> bool:
    if (saved.dtype, saved.shape) != (now.dtype, now.shape):
        return False
    mine, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (saved.to(now.device), now))
    return torch.equal(mine, other)


def _same_value(saved: Any, now: Any) -> bool:
    if isinstance(saved, np.ndarray):
        return (saved.dtype, saved.shape) == (now.dtype, now.shape) and saved.tobytes() == now.tobytes()
    if isinstance(saved, bytes):
        return bool(saved == now)
    # To the bit, as they are written down: NaN is NaN, and -0.0 is not 0.0.
    return state_tree.flatten(saved)[0] == state_tree.flatten(now)[0]
