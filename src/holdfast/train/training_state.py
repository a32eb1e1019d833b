"""What a Checkpoint writes down of the objects that it was given: their state by name, as text and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.errors import StateError
from holdfast.pools.dense_state import DenseState, Stepped
from holdfast.rows.anchor import Anchor
from holdfast.state import state_tree
from holdfast.state.generators import as_stateful, rng_state
from holdfast.state.loading import ORDER, load_all, refuse_other_order
from holdfast.state.provenance import RECORD, Provenance
from holdfast.state.reproducibility import check_environment, check_model, resolve_vector_functions
from holdfast.train.dense_snapshot import Snapshots

# As _core.first_non_finite has them; complex numbers are two each.
_FLOAT_FORMATS = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.complex64: 2,
    torch.complex128: 3,
}


class Stateful(Protocol):
    """Anything with PyTorch's state_dict habit: schedulers, GradScaler, samplers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class SeekableLoader(Stateful, Protocol):
    """A loader whose position is a number of samples (``holdfast.data.Loader``)."""

    @property
    def samples(self) -> int: ...
    def seek(self, num_samples: int) -> None: ...


@dataclass(frozen=True, slots=True)
class OfAllRanks:
    """Plain values of `extra` of which rank 0's are kept for all, whatever the others would say."""

    tree: Any

    def state_dict(self) -> Any:
        return self.tree


class TrainingState:
    """Objects with a ``state_dict``, generators, and plain values, by name: what a dense state holds beside the
    process's own random numbers.

    snapshots: what `collect` gives is a copy of its own. So it is wherever tensors are on a device; those may be on
    their way when it returns.

    Raises StateError that names what cannot be written down (a lambda in a scheduler, an open file).
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        row_optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Stateful] = (),
        scaler: Stateful | None = None,
        loader: SeekableLoader | None = None,
        extra: Mapping[str, Any] | None = None,
        snapshots: bool = False,
    ) -> None:
        self._are_snapshots = snapshots
        self._snapshots = Snapshots()
        self._objects: dict[str, Any] = {"model": model}
        # Of row optimizers, too, that a trainer wrapped into its own objects, as Lightning and Accelerate do.
        groups_of_rows = [id(row.param_groups) for row in row_optimizers]
        self._objects |= {
            f"optimizers[{i}]": dense
            for i, dense in enumerate(optimizers)
            if id(dense.param_groups) not in groups_of_rows
        }
        self._objects |= {f"row_optimizers[{i}]": row for i, row in enumerate(row_optimizers)}
        self._objects |= {f"schedulers[{i}]": item for i, item in enumerate(schedulers)}
        if scaler is not None:
            self._objects["scaler"] = scaler
        if loader is not None:
            self._objects["loader"] = loader
        self._objects |= {f"extra[{name!r}]": as_stateful(value) for name, value in (extra or {}).items()}
        self._tensors: list[Tensor] = []
        self._never_finite: set[int] = set()
        self._num_checked, self._order = len(self.parameters), self._order_now()
        check_environment()
        check_model(model)
        resolve_vector_functions()
        self._provenance = Provenance(model)
        self.collect(rng_state()).wait()
        self._check_held()
        # A mask that is learned may be infinite where nothing is to pass.
        self._never_finite = {id(parameter) for parameter in self.parameters if not parameter.isfinite().all()}

    def collect(self, rng: Mapping[str, Any], cursor: int | None = None, **beside: Any) -> DenseState:
        """All of it as it is now, with the random numbers `rng` and whatever else goes `beside` them. Its tensors live
        until the next call. Raises StateError for a parameter that an optimizer steps and nothing holds, or holds any
        more."""
        if len(self.parameters) != self._num_checked:
            self._check_held()
        tree = {
            name: target.state_dict() if hasattr(target, "state_dict") else target
            for name, target in self._objects.items()
        }
        loader = tree.get("loader")
        if cursor is not None and isinstance(loader, Mapping) and "samples" in loader:
            # Batches that were taken ahead are not consumed: how many there are is not part of the state.
            tree["loader"] = {**loader, "samples": cursor}
        tree["rng"] = rng
        tree[RECORD] = self._provenance.record()
        tree[ORDER] = self._order
        tree |= beside
        structure, tensors = state_tree.flatten(tree, ordered=True)
        if self._are_snapshots or any(tensor.device.type != "cpu" for tensor in tensors):
            state = self._snapshots.take(structure, tensors)
        else:
            # Kept until the next call: the pool reads their memory after this returns.
            self._tensors = [tensor.detach().contiguous() for tensor in tensors]
            offsets, total = state_tree.layout(self._tensors)
            pointers = [
                (tensor.data_ptr(), tensor.nbytes, offset)
                for tensor, offset in zip(self._tensors, offsets, strict=True)
            ]
            state = DenseState(structure, pointers, total)
        self._check_saved(tensors)
        return replace(state, stepped=self._stepped(tensors, state))

    def _check_saved(self, tensors: Sequence[Tensor]) -> None:
        """What a module was given in the place of a parameter, the optimizer does not step; it steps what was there."""
        saved = {tensor.data_ptr() for tensor in tensors}
        if not all(parameter.data_ptr() in saved for parameter in self.parameters if parameter.numel()):
            self._check_held()

    def _stepped(self, tensors: Sequence[Tensor], state: DenseState) -> Stepped:
        """Of `tensors`, which `state` holds, the parameters that optimizers update."""
        parameters = {parameter.data_ptr(): parameter for parameter in self.parameters if parameter.numel()}
        found, floats = [], []
        for tensor, (address, num_bytes, _) in zip(tensors, state.tensors, strict=True):
            parameter = parameters.get(tensor.data_ptr())
            if parameter is not None and id(parameter) not in self._never_finite and tensor.dtype in _FLOAT_FORMATS:
                found.append(parameter)
                floats.append((address, num_bytes, _FLOAT_FORMATS[tensor.dtype]))
        return Stepped(floats, lambda number: self._name_of(found[number]))

    def _name_of(self, parameter: Tensor) -> str:
        return self._names().get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")

    def _names(self) -> dict[int, str]:
        """Of the parameters of modules; of one that several have, the first's."""
        names: dict[int, str] = {}
        for holder, item in self._objects.items():
            for name, own in item.named_parameters() if isinstance(item, nn.Module) else ():
                names.setdefault(id(own), f"{holder}.{name}")
        return names

    def _order_now(self) -> dict[str, list[str]]:
        """Of each dense optimizer the names of what it steps; empty where a parameter is none of a module's."""
        names = self._names()
        return {
            name: [names.get(id(parameter), "") for group in item.param_groups for parameter in group["params"]]
            for name, item in self._objects.items()
            if name.startswith("optimizers[")
        }

    @property
    def parameters(self) -> list[Tensor]:
        """What the dense optimizers step."""
        return [
            parameter
            for name, item in self._objects.items()
            if name.startswith("optimizers[")
            for group in item.param_groups
            for parameter in group["params"]
        ]

    def own(self) -> dict[str, Any]:
        """The part that may differ from rank to rank: buffers of the model, what `extra` holds but for OfAllRanks."""
        model = self._objects["model"]
        parameters = {name for name, _ in model.named_parameters()}
        tree: dict[str, Any] = {
            name: item.state_dict() if hasattr(item, "state_dict") else item
            for name, item in self._objects.items()
            if name.startswith("extra[") and not isinstance(item, OfAllRanks)
        }
        tree["buffers"] = {name: value for name, value in model.state_dict().items() if name not in parameters}
        return tree

    def load_own(self, tree: Mapping[str, Any]) -> None:
        """Puts back what `own` gave. Raises StateError."""
        tree = dict(tree)
        buffers = tree.pop("buffers")
        model = self._objects["model"]
        model.load_state_dict({**model.state_dict(), **buffers})
        load_all({name: self._objects[name] for name in tree}, tree)

    def _check_held(self) -> None:
        """A parameter that is stepped and not saved would begin anew in the next process."""
        holders = [item for item in self._objects.values() if not isinstance(item, torch.optim.Optimizer)]
        held = {id(tensor) for item in holders if isinstance(item, nn.Module) for tensor in item.parameters()}
        others = [
            item.state_dict() if hasattr(item, "state_dict") else item
            for item in holders
            if not isinstance(item, nn.Module)
        ]
        memory = {tensor.data_ptr() for tensor in state_tree.flatten(others)[1]}
        for name, optimizer in self._objects.items():
            if not name.startswith("optimizers["):
                continue
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if isinstance(parameter, Anchor):
                        raise StateError(
                            f"{name}.param_groups[{number}]: parameter {place} is that of a row optimizer, and stands "
                            "for rows, which rows.optimizer.step() alone updates: leave it to that"
                        )
                    if id(parameter) not in held and parameter.data_ptr() not in memory and parameter.numel():
                        raise StateError(
                            f"{name}.param_groups[{number}]: parameter {place}, of shape {tuple(parameter.shape)}, is "
                            "no part of the model: give the module that has it to extra"
                        )
        self._num_checked, self._order = len(self.parameters), self._order_now()

    def provenance(self) -> dict[str, Any]:
        """What this process's bits depend on beside all that, as plain values."""
        return self._provenance.present()

    def load(self, tree: Mapping[str, Any], whose: str = "") -> None:
        """Warns where `tree` was saved under other circumstances than these; whose: begins the warning. Raises
        StateError where it, without random numbers, does not fit the objects, or is not what they hold then; names
        them."""
        tree = dict(tree)
        self._provenance.compare(tree.pop(RECORD, {}), whose)
        order = tree.pop(ORDER, {})
        if missing := [name for name in self._objects if name not in tree]:
            raise StateError(f"the saved state has no {missing[0]}; it has {', '.join(tree)}")
        if unknown := [name for name in tree if name not in self._objects]:
            raise StateError(f"the saved state has a {unknown[0]}, the Checkpoint was made without it")
        # Plain values are read with `saved`.
        load_all(self._objects, tree)
        refuse_other_order(order, self._order)
