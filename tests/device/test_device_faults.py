"""What a device says becomes an error that names the thing and what to do; what others say stays as it is."""

from __future__ import annotations

import pytest
import torch

from holdfast.device.faults import device_errors, open_device
from holdfast.errors import ConfigError, DeviceError, DeviceLost, HoldfastError, OutOfDeviceMemory, PoolFull

# PyTorch 2.13's words, shortened where they go on with advice.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.84 GiB memory in use."
)
LOST = [
    torch.AcceleratorError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    ),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
]
REFUSED = [
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
]
NO_MEMORY = [
    torch.OutOfMemoryError(OUT_OF_MEMORY),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
NOT_OF_A_DEVICE = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: out of memory"
    ),
    PoolFull("the medium is full"),
    ValueError("CUDA error: said by somebody else"),
    KeyError("a"),
]


def raised(error, **options):
    """What comes out of a block that raises `error`."""
    with pytest.raises(Exception) as caught, device_errors("computing step 8", **options):  # noqa: PT011
        raise error
    return caught.value


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_out_of_memory_says_what_was_asked_for_and_what_to_change(error):
    named = raised(error, bytes_wanted=3 * 2**30, step=lambda: 7)
    assert type(named) is OutOfDeviceMemory and named.__cause__ is error
    assert str(named).startswith(f"computing step 8: out of device memory: {3 * 2**30} bytes (3.00 GiB) asked for")
    for word in ("device.scratchpad_bytes", "train.batch_size", "train.window", "the pool stays at step 7"):
        assert word in str(named)


def test_out_of_memory_takes_pytorchs_word_where_nobody_knows_better(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # a device knows what it has free
    assert f"{5 * 2**29} bytes (2.50 GiB) asked for, {5 * 2**28} bytes (1.25 GiB) free" in str(raised(NO_MEMORY[0]))
    assert "an unknown number of bytes asked for, an unknown number of bytes free" in str(raised(NO_MEMORY[1]))


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_device_says_where_the_pool_stays(error):
    named = raised(error, step=lambda: 7)
    assert type(named) is DeviceLost and named.__cause__ is error
    assert str(named).startswith("computing step 8: the device is lost to this process: ")
    assert "the pool stays at step 7. Start the run again" in str(named)
    assert "\n" not in str(named)


@pytest.mark.parametrize("error", REFUSED, ids=str)
def test_whatever_else_a_device_says_is_a_device_error(error):
    named = raised(error)
    assert type(named) is DeviceError and named.__cause__ is error
    assert str(named) == f"computing step 8: the device failed: {error}; the pool stays at its last step"


@pytest.mark.parametrize("error", NOT_OF_A_DEVICE, ids=str)
def test_what_no_device_said_goes_through_untouched(error):
    assert raised(error) is error


def test_all_of_them_are_holdfasts_own():
    for kind in (OutOfDeviceMemory, DeviceLost):
        assert issubclass(kind, DeviceError) and issubclass(kind, HoldfastError)


def test_the_cpu_is_always_there():
    assert open_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["", "gpu", "cpu:1", "CUDA", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "mps"])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ConfigError, match=r'^device\.kind = ".*": it must be "cpu", "cuda", or a numbered one'):
        open_device(name)


def test_a_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match=r'device\.kind = "cuda": this PyTorch \(.*\) is built without CUDA'):
        open_device("cuda")


@pytest.fixture
def devices(monkeypatch):
    """Says how many CUDA devices there seem to be; returns the ones that were made the current one."""
    made_current = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Device {number}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)

    def there_are(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return made_current

    return there_are


def test_a_machine_without_devices_is_named(devices):
    devices(0)
    with pytest.raises(ConfigError, match="CUDA finds no device; look at what nvidia-smi says"):
        open_device("cuda:0")


def test_a_device_that_is_not_there_is_refused_with_those_that_are(devices):
    devices(2)
    with pytest.raises(
        ConfigError, match=r"there is no such device; there are cuda:0 \(Device 0\), cuda:1 \(Device 1\)"
    ):
        open_device("cuda:2")


@pytest.mark.parametrize(("name", "number"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_is_opened_with_its_number_and_made_the_current_one(devices, name, number):
    made_current = devices(2)
    assert open_device(name) == torch.device("cuda", number)
    assert made_current == [torch.device("cuda", number)]
