"""What a rank does that owns rows and trains nothing: its half of what the trainers do, as rank 0 says.

Rank 0 sends a message before each call of its own that others take part in (Verb, the collection's number, and what
the call takes); a rank that serves then makes the same call, without a batch.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from holdfast.group.remote_rows import RemoteRows
    from holdfast.group.shared_pool import SharedPool

HYPERPARAMETERS = ("learning_rate", "epsilon", "beta1", "beta2", "weight_decay")  # in the order in which they travel

MESSAGE_NUMBERS = 9  # float64: verb, collection, and up to seven of the call


class Verb(IntEnum):
    """The calls of RemoteRows and SharedPool that every rank makes."""

    ANNOUNCE = auto()
    CAPTURE = auto()
    CAPTURE_AHEAD = auto()
    LOOKUP = auto()
    LOOKUP_AHEAD = auto()
    EVALUATE = auto()
    ADD_GRADIENT = auto()
    WEIGHT_GRADIENT = auto()
    NORM = auto()
    UPDATE = auto()
    DROP = auto()
    FINISH = auto()
    COMMIT = auto()
    SETTLE = auto()
    FLUSH = auto()
    REST = auto()  # nothing is left to do of what the trainers had begun
    CLOSE = auto()
    # What memory ranks with the trainers' own script do in the same order without being told.
    DENSE_STATE = auto()
    FIRST_DENSE = auto()


def message(verb: Verb, *numbers: float) -> torch.Tensor:
    """float64 ``[MESSAGE_NUMBERS]``: whole numbers up to 2**53 are exact."""
    said = torch.zeros(MESSAGE_NUMBERS, dtype=torch.float64, device="cpu")
    said[0] = verb
    said[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return said


def serve_until(pool: SharedPool, *last: Verb) -> Verb:
    """Does what rank 0 says until it has done one of `last`, which it returns. Raises GroupError where rank 0 is
    gone."""
    verb = None
    while verb not in last:
        said = torch.zeros(MESSAGE_NUMBERS, dtype=torch.float64, device="cpu")
        pool.group.tell_memory_ranks(said, "rank 0 to say what comes next").wait()
        code, first, *numbers = said.tolist()
        verb = Verb(int(code))
        match verb:
            case Verb.REST | Verb.CLOSE:
                pass
            case Verb.COMMIT:
                pool.commit(int(first))
            case Verb.SETTLE:
                pool.flush()
            case Verb.FLUSH:
                pool.flush_with(lambda: None)
            case Verb.DENSE_STATE:
                pool.dense_state()
            case Verb.FIRST_DENSE:
                pool.write_dense(None)
            case _:
                _serve_rows(pool.rows[int(first)], verb, numbers)
    return verb


def _serve_rows(rows: RemoteRows, verb: Verb, numbers: list[float]) -> None:
    match verb:
        case Verb.ANNOUNCE:
            rows.announce(None)
        case Verb.CAPTURE:
            rows.capture(None)
        case Verb.CAPTURE_AHEAD:
            rows.capture_ahead(None)
        case Verb.LOOKUP_AHEAD:
            rows.pool_ahead(None, rows.before(None, is_known=bool(numbers[0])))
        case Verb.EVALUATE:
            rows.evaluate(None)
        case Verb.FINISH:
            rows.finish()
        case _:
            _serve_step(rows, verb, numbers)


def _serve_step(rows: RemoteRows, verb: Verb, numbers: list[float]) -> None:
    """Of the step that is under way."""
    match verb:
        case Verb.LOOKUP:
            rows.lookup(rows.captured(int(numbers[0])))
        case Verb.ADD_GRADIENT:
            rows.add_gradient(rows.captured(int(numbers[0])), None)
        case Verb.WEIGHT_GRADIENT:
            rows.weight_gradient(rows.captured(int(numbers[0])), None, None)
        case Verb.NORM:
            rows.square_of_gradients()
        case Verb.UPDATE:
            scale, *values = numbers[: 1 + len(HYPERPARAMETERS)]
            rows.update(gradient_scale=scale, **dict(zip(HYPERPARAMETERS, values, strict=True)))
        case Verb.DROP:
            rows.drop_gradients()
