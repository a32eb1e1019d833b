"""The row optimizers, in slots: new weights and state from the old ones and the summed gradient.

The definitions and the order of operations are those of core/kernels/optimizers.inc.h, one float32 operation an
operator and none contracted, divisions and square roots rounded correctly; so the bits are the CPU's for the same sums,
stochastic rounding of 16-bit rows included (core/kernels/row_formats.inc.h: f(seed, table, row, step, element)).

Bytes a row: its sum read, weights and state read, both written twice: to the slot, and compactly for the way home. Rows
are independent, so a tile has whole rows and nothing in it waits but for the slot's number; what is summed over a row
(the mean square) is read a second time, from the first-level cache, sixteen lanes at a time as the fixed tree wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import runs_triton
from holdfast.device.kernels.keys import RECORD_FLOATS, KeyUpdate, read_records, records
from holdfast.device.kernels.rounding import random_bits, round_stochastically
from holdfast.device.kernels.rows import fold_lanes, lane_sums

SGD, ROWWISE_ADAGRAD, ADAGRAD, ADAM, ROWWISE_ADAM = range(5)  # as holdfast.pools.optim.OPTIMIZERS counts them

Rounding = tuple[int, Tensor, Tensor]

_MOST_UPDATES = 0xFFFFFFFF  # that a record counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Of one step of a row optimizer. `step` counts updates from 1."""

    learning_rate: float
    step: int
    epsilon: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Constants:
    """Hyperparameters as float32 numbers, and what they give that is the same for all rows of a step."""

    learning_rate: float
    epsilon: float
    weight_decay: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    correction1: float
    correction2: float

    @classmethod
    def of(cls, given: Hyperparameters) -> Constants:
        beta1, beta2 = np.float32(given.beta1), np.float32(given.beta2)
        return cls(
            learning_rate=float(np.float32(given.learning_rate)),
            epsilon=float(np.float32(given.epsilon)),
            weight_decay=float(np.float32(given.weight_decay)),
            beta1=float(beta1),
            beta2=float(beta2),
            rest1=float(np.float32(1) - beta1),
            rest2=float(np.float32(1) - beta2),
            correction1=float(np.float32(1.0 - _power_of(float(beta1), given.step))),
            correction2=float(np.float32(1.0 - _power_of(float(beta2), given.step))),
        )


def _power_of(base: float, exponent: int) -> float:
    """base^exponent by repeated squaring, as the core has it: pow differs from library to library."""
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        base *= base
        exponent >>= 1
    return power


def update_rows(
    kind: int,
    weights: Tensor,
    state: Tensor | None,
    slots: Tensor,
    sums: Tensor,
    *,
    hyperparameters: Hyperparameters,
    gradient_scale: Tensor,
    rounding: Rounding | None,
    fresh_weights: Tensor,
    fresh_state: Tensor | None,
    keyed: KeyUpdate | None = None,
) -> None:
    """Updates rows in their slots, and writes them compactly to `fresh_weights` and `fresh_state` as well.

    kind: index in ``holdfast.pools.optim.OPTIMIZERS``. weights: ``[num_slots, dim]``, float32, float16 or bfloat16.
    state: float32 ``[num_slots, state_floats]``, None where the optimizer keeps none. slots: int32 ``[num_unique]``,
    different ones. sums: float32 ``[num_unique, dim]``. gradient_scale: float32, 0-d, on the device: multiplies the
    sums. rounding: the pool's seed, and of each row its table's number (int32) and its own (int64); 16-bit rows need
    it. fresh_weights: ``[num_unique, dim]`` of the rows' dtype. fresh_state: float32 ``[num_unique, state_floats]``.
    keyed: of tables with keys, where state ends with records, which are written; a row whose key does not train yet
    stays as it is but for that. There rows go by their keys in `rounding`, too.
    """
    if slots.numel() == 0:
        return
    constants = Constants.of(hyperparameters)
    rounds = weights.dtype != torch.float32
    if runs_triton(weights):
        from holdfast.device.kernels import update_triton

        update_triton.update_rows(
            kind,
            weights,
            state,
            slots,
            sums,
            constants=constants,
            step=hyperparameters.step,
            gradient_scale=gradient_scale,
            rounding=rounding if rounds else None,
            fresh_weights=fresh_weights,
            fresh_state=fresh_state,
            keyed=keyed,
        )
        return
    place = slots.long()
    g = gradient_scale * sums
    old_weights = weights[place]
    w = old_weights.float()
    if constants.weight_decay != 0 and kind in (SGD, ROWWISE_ADAGRAD, ADAGRAD):
        g = g + constants.weight_decay * w
    there = w.new_empty(w.shape[0], 0) if state is None else state[place]
    old = there if keyed is None else there[:, :-RECORD_FLOATS]
    new, new_state = _RULES[kind](constants, w, old, g)
    if rounds:
        assert rounding is not None
        new = round_stochastically(new, weights.dtype, random_bits(rounding, hyperparameters.step, weights.shape[1]))
    if keyed is not None:
        updates = read_records(there)[2]
        trains = (updates + 1 >= keyed.admit_after[keyed.tables.long()])[:, None]
        new = torch.where(trains, new, old_weights)
        of_keys = records(keyed.keys, keyed.step, (updates + 1).clamp(max=_MOST_UPDATES))
        new_state = torch.cat((torch.where(trains, new_state, old), of_keys), dim=1)
    weights[place] = new
    fresh_weights.copy_(new)
    if state is not None and fresh_state is not None:
        state[place] = new_state
        fresh_state.copy_(new_state)


# Divisors are tensors, and no number is divided by a tensor: torch takes either as a product with a reciprocal.

_Rule = Callable[[Constants, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _sgd(c: Constants, w: Tensor, state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return w - c.learning_rate * g, state


def _rowwise_adagrad(c: Constants, w: Tensor, state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    m = state + _mean_square(g)
    multiplier = _like(w, c.learning_rate) / (_square_root(m) + c.epsilon)
    return w - multiplier * g, m


def _adagrad(c: Constants, w: Tensor, state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    m = state + g * g
    return w - (c.learning_rate * g) / (_square_root(m) + c.epsilon), m


def _either_adam(c: Constants, w: Tensor, state: Tensor, g: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    dim = w.shape[1]
    m = c.beta1 * state[:, :dim] + c.rest1 * g
    v = c.beta2 * state[:, dim:] + c.rest2 * square
    root = _square_root(v / _like(w, c.correction2))
    direction = (m / _like(w, c.correction1)) / (root + c.epsilon)
    if c.weight_decay != 0:
        direction = direction + c.weight_decay * w
    return w - c.learning_rate * direction, torch.cat([m, v], dim=1)


def _adam(c: Constants, w: Tensor, state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _either_adam(c, w, state, g, g * g)


def _rowwise_adam(c: Constants, w: Tensor, state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _either_adam(c, w, state, g, _mean_square(g))


_RULES: tuple[_Rule, ...] = (_sgd, _rowwise_adagrad, _adagrad, _adam, _rowwise_adam)


def _mean_square(g: Tensor) -> Tensor:
    return (fold_lanes(lane_sums(g * g)) / _like(g, g.shape[1]))[:, None]


def _square_root(x: Tensor) -> Tensor:
    """Rounded correctly: torch.sqrt of float32 may be MKL's, one bit off."""
    return x.double().sqrt().float()


def _like(x: Tensor, number: float) -> Tensor:
    return torch.full((1,), number, dtype=torch.float32, device=x.device)
