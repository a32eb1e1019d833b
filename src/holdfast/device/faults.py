"""Devices by name, and what they raise, as holdfast's own errors.

PyTorch, Triton and CUDA's libraries report a failing device by several classes, one of them a plain RuntimeError, and
the text alone says what it was. Here is the one place that reads it. What is no device's error goes through untouched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from holdfast.errors import ConfigError, DeviceError, DeviceLost, OutOfDeviceMemory

_NAME = re.compile(r"(cpu)|cuda(?::(0|[1-9]\d*))?")

# What is in the texts of PyTorch (c10/cuda), Triton's driver, cuBLAS, cuDNN and cuRAND.
_OF_A_DEVICE = re.compile(
    r"CUDA (?:driver )?error|CUDA out of memory|Triton Error \[CUDA\]|CU(?:BLAS|RAND|DNN)_STATUS_"
)
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|STATUS_ALLOCATION_FAILED", re.IGNORECASE)
# After these CUDA's context gives nothing but the same error (driver API, CUresult: 214, 220, 700 to 720, 999).
_LOST = re.compile(
    r"device-side assert|uncorrectable (?:ECC|NVLink) error|unspecified launch failure|illegal memory access"
    r"|illegal instruction|misaligned address|invalid program counter|hardware stack error|launch timed out"
    r"|operation not supported on global/shared address space|(?:GPU|device) (?:is|was) lost|fallen off the bus"
    r"|unknown error|CU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)",
    re.IGNORECASE,
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMG]iB) is free")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def device_errors(what: str, bytes_wanted: int | None = None, step: Callable[[], int] | None = None) -> Iterator[None]:
    """Names the device's errors: what comes out of the block is an error of holdfast, caused by the original.

    what: was being done, as in "allocating the scratchpad". bytes_wanted: of device memory, where the block asks for
    a known amount (else PyTorch's word is taken). step: gives the pool's last step, for the message.

    Raises OutOfDeviceMemory, DeviceLost, and DeviceError for whatever else a device says.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        named = _named(error, what, bytes_wanted, step)
        if named is None:
            raise
        raise named from error


def open_device(name: str) -> torch.device:
    """The device called `name`, "cpu", "cuda" (the current one; under torchrun each rank's own) or "cuda:1", with its
    number; makes it the current one.

    Raises ConfigError where the name is no such name, CUDA cannot be used here, or has no device of that number.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f'device.kind = "{name}": it must be "cpu", "cuda", or a numbered one such as "cuda:1"')
    if found[1]:
        return torch.device("cpu")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f'device.kind = "{name}": this PyTorch ({torch.__version__}) is built without CUDA; install one that is '
            '(https://pytorch.org/get-started), or set device.kind = "cpu"'
        )
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise ConfigError(
            f'device.kind = "{name}": CUDA finds no device; look at what nvidia-smi says of driver and devices and at '
            'CUDA_VISIBLE_DEVICES, or set device.kind = "cpu"'
        )
    if found[2] is not None and int(found[2]) >= num_devices:
        devices = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(num_devices))
        raise ConfigError(f'device.kind = "{name}": there is no such device; there are {devices}')
    of_rank = int(os.environ.get("LOCAL_RANK", "0")) % num_devices
    number = torch.cuda.current_device() or of_rank if found[2] is None else int(found[2])
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _named(error: Exception, what: str, bytes_wanted: int | None, step: Callable[[], int] | None) -> DeviceError | None:
    text = str(error)
    of_a_device = isinstance(error, (torch.OutOfMemoryError, *_ACCELERATOR_ERRORS)) or _OF_A_DEVICE.search(text)
    if not of_a_device:
        return None
    first_line = text.strip().split("\n")[0]
    stays = "the pool stays at its last step" if step is None else f"the pool stays at step {step()}"
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(text):
        asked = _bytes(bytes_wanted if bytes_wanted is not None else _said(_ASKED, text))
        return OutOfDeviceMemory(
            f"{what}: out of device memory: {asked} asked for, {_bytes(_bytes_free(text))} free; {stays}. Make "
            f"device.scratchpad_bytes, train.batch_size or train.window smaller, or give up what else holds memory of "
            f"this device. ({first_line})"
        )
    if _LOST.search(text):
        return DeviceLost(
            f"{what}: the device is lost to this process: {first_line}; {stays}. Start the run again: it goes on from "
            "there. If it comes again, look at the device's state (nvidia-smi -q, the kernel's log)"
        )
    return DeviceError(f"{what}: the device failed: {first_line}; {stays}")


def _bytes_free(text: str) -> int | None:
    """Of device memory: as PyTorch's message says, else as the driver does, where it still answers."""
    said = _said(_FREE, text)
    if said is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return said
    try:
        return torch.cuda.mem_get_info()[0]
    except RuntimeError:
        return None


def _said(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def _bytes(count: int | None) -> str:
    if count is None:
        return "an unknown number of bytes"
    return f"{count} bytes" if count < 2**20 else f"{count} bytes ({count / 2**30:.2f} GiB)"


# Since PyTorch 2.8; before, the same texts came as RuntimeError.
_ACCELERATOR_ERRORS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
