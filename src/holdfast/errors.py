"""Everything that holdfast raises on purpose. Catch by class; messages name the thing and what to do."""

from __future__ import annotations

import math
import sys


class HoldfastError(Exception):
    """Base of every error that holdfast raises on purpose."""


class ConfigError(HoldfastError):
    """A configuration is wrong, or differs from the one that the pool was made with; names the field."""


class DataError(HoldfastError):
    """Input data is malformed; names file and line (or row)."""


class IdError(DataError, ValueError):
    """An embedding id is negative or out of range; names feature, sample and value."""


class NonFiniteLoss(HoldfastError):
    """The loss, a row, its gradient or a parameter is NaN or infinite; the pool stays at the last good step."""

    @classmethod
    def check(cls, loss: float, step: int) -> None:
        """Raises where the loss of `step` is not finite."""
        if not math.isfinite(loss):
            raise cls(
                f"the loss of step {step} is {loss}: the pool stays at step {step - 1}, and goes on from there when it "
                "is opened again; lower the learning rate, or clip gradients (train.max_grad_norm)"
            )

    @classmethod
    def check_gradient(cls, factor: float, step: int) -> None:
        """Raises where the rows of `step` were updated with gradients times `factor`, and it is not finite."""
        if not math.isfinite(factor):
            raise cls(
                f"the gradient of the rows of step {step} is not finite: the pool stays at step {step - 1}, and goes "
                "on from there when it is opened again; a quotient or a root of 0 in the model has no derivative "
                "(torch.autograd.set_detect_anomaly says where), gradients that grow want clipping; with a GradScaler "
                "step no optimizer where the norm that was clipped is not finite"
            )

    @classmethod
    def of_parameter(cls, name: str, step: int) -> NonFiniteLoss:
        """That a parameter of the model is not finite at the end of `step`."""
        return cls(
            f"{name} is not finite at the end of step {step}: the pool keeps no such state, and goes on from its "
            "newest dense state when it is opened again; lower the learning rate, clip gradients, or "
            "look for a quotient or a root of 0, which has no derivative (torch.autograd.set_detect_anomaly shows it)"
        )


class StateError(HoldfastError):
    """Training state cannot be written down (a lambda in a scheduler, an open file), or does not fit what is loaded."""


class StepError(HoldfastError):
    """The verbs of a step were called in an order without meaning (update without capture, commit in evaluation)."""


class PoolError(HoldfastError):
    """Base of everything that is wrong with a pool."""


class PoolBusy(PoolError):
    """Another process has the pool open for writing."""


class PoolNotFound(PoolError):
    """There is no pool in this directory."""


class PoolExists(PoolError):
    """The directory already holds a pool, or something else."""


class PoolOfGroup(PoolError):
    """The pool is one of several writers, with which this cannot be done; says what can."""


class PoolReadOnly(PoolError):
    """The pool's directory or medium does not allow writing, or not any more."""


class PoolFull(PoolError):
    """The medium has no space left. The pool stays at its last step; where that was found only when something had been
    written, it takes no further one until it is opened again, and the message says so."""


class BatchTooLarge(PoolError):
    """One step's rows do not fit the log; says how many bytes it needs."""


class WindowTooLarge(PoolError):
    """One batch has more different rows than an accelerator's scratchpad has slots; says how many of each."""


class Corrupted(PoolError):
    """A checksum or an invariant of a pool file does not hold; names file and offset."""


class Overtaken(PoolError):
    """A run wrote over what a snapshot had still to read: make log_bytes larger, or stop the run for a moment."""


class BrokenChain(PoolError):
    """A snapshot needs an earlier one that is not there, or is another one."""


class FormatMismatch(PoolError):
    """The files are not a pool, or of a format version that this build does not know."""


class UntrustedPool(PoolError):
    """A `process`-level pool was open when the machine went down: its bytes may be from any moment."""


class PoolFailed(PoolError):
    """A write, a flush or a read failed, now or earlier; a pool takes no further step until it is opened again."""


class GroupError(HoldfastError):
    """The ranks of a group cannot go on together: one died, stalled, or is another one than the group's; names it."""


class PlacementError(HoldfastError):
    """No placement of the tables over the memory tiers was found."""


class DoesNotFit(PlacementError):
    """The tables do not fit the tiers; says how many bytes are missing, and what would help."""


class DeviceError(HoldfastError):
    """The accelerator refused or failed; says what it was doing."""


class OutOfDeviceMemory(DeviceError):
    """The device's memory does not hold what is asked for; says how many bytes that is, how many
    are free, and what to change."""


class DeviceLost(DeviceError):
    """The device failed in a way that ends its use in this process; the pool stays at its last step."""


def by_name(name: str) -> type[HoldfastError]:
    """The class that another rank says that its error is of; GroupError where it is none of these."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, HoldfastError) else GroupError


def level_of_caller() -> int:
    """How far up the first line is that is neither the package's nor PyTorch's, which lie between where modules are
    called: the ``stacklevel`` of a warning of whoever asks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("holdfast.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
