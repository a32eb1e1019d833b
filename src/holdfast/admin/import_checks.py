"""What an import asks of names, shapes, types and values of a file, each with an error that names the tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.admin.tensor_files import TensorFile
from holdfast.errors import ConfigError


def only(shapes: Mapping[str, tuple[int, ...]], pattern: str, what: str) -> str | None:
    """The name that fits the pattern. Raises ConfigError where there are several."""
    found = [name for name in shapes if re.search(pattern, name)]
    if len(found) > 1:
        raise ConfigError(f"{what}: several names in the file fit: {', '.join(found)}; leave all but one out of it")
    return found[0] if found else None


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[tuple[int, ...], ...], advice: str = "") -> None:
    if found not in wanted:
        raise ConfigError(f"{name} in the file has the shape {found}, the configuration's is {wanted[0]}{advice}")


def check_types(file: TensorFile, names: Iterable[str]) -> None:
    for name in names:
        check_floating(name, file.rows(name, 0, min(1, file.shapes()[name][0])))


def check_floating(name: str, values: Tensor) -> None:
    """Of quantized weights integers, and floats of 8 bits, alone mean nothing: the scale is elsewhere."""
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        words = "weights and their state are floating, of 16 bits or more"
        raise ConfigError(f"{name} in the file has the type {values.dtype}, {words}")


def check_values(
    parts: Mapping[str, Tensor], squares: Collection[str], first: int, records: NDArray[np.void] | None
) -> None:
    """parts: by name in the file, rows `first` and on, in the pool's dtype. squares: names of state whose root an
    update divides by."""
    for name, values in parts.items():
        if not values.numel():
            continue
        least, most = torch.aminmax(values)
        if (
            not (least.isfinite() and most.isfinite())
            and (row := _first_row(~values.isfinite(), first, records)) is not None
        ):
            raise ConfigError(
                f"{name} in the file: row {row} has a value that is not finite in {values.dtype}, with which no step "
                "would succeed: mend it there, or give the table a wider dtype"
            )
        if name in squares and not least >= 0 and (row := _first_row(values < 0, first, records)) is not None:
            raise ConfigError(
                f"{name} in the file: row {row} is below 0, where the configuration's optimizer keeps squares: "
                "it is another optimizer's; state that is left out of the file begins anew"
            )


def _first_row(is_wrong: Tensor, first: int, records: NDArray[np.void] | None) -> int | None:
    """The first row with a value that is wrong; rows that nobody has may hold anything."""
    wrong = is_wrong.reshape(len(is_wrong), -1).any(dim=1).numpy()
    if records is not None:
        wrong &= records["updates"][first : first + len(wrong)] != 0
    return first + int(wrong.argmax()) if wrong.any() else None
