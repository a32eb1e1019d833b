"""A virtual machine with an emulated CXL type-3 persistent memory device and a disk, and a switch to cut its power.

Its processor is emulated (TCG), and importing torch takes it a minute or more. So it is booted once, up to the moment
at which the training run waits for its medium; its DRAM is then a file and its devices' state another (the *snapshot*).
Every life begins there within a second: DRAM is mapped copy-on-write. A life meets its medium as after a boot: no
driver of it is loaded, nothing of it is cached.

What had to be found out:
- With a single root port Linux leaves the CXL host bridge's decoder unprogrammed and QEMU 7.2 drops every access.
- QEMU 7.2 keeps no state of CXL devices in a snapshot: the guest removes them before and rescans the bus after.
- Labels of an earlier life say that the space is taken: the label area is new with each life.
- A cut is a SIGKILL: what had reached the device is in its file, shared with the host. The emulated processor has no
  write-back cache before the device, so a missing flush does not show; a missing order, flag or recovery step does.
- Characters written to the console while a machine wakes up may be lost.
- The kernel says nothing there, since a device that loses its power under a run makes it say something in the middle of
  the run's own lines.
- One boot in dozens stalls before the guest does anything.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from guest_image import GuestImage

DRAM_MIB = 3072
MEDIUM_BYTES = 256 << 20  # of the CXL device and of the disk; CXL regions come in multiples of this


class MachineStopped(Exception):
    """It ended by itself, or says nothing any more."""


@dataclass(frozen=True)
class Snapshot:
    """Where machines begin. image: what was booted."""

    image: GuestImage
    dram: Path
    devices: Path


class Machine:
    """A running machine. Context manager: its end is a power cut, if nothing else was."""

    def __init__(self, image: GuestImage, directory: Path, *, dram: str, cxl_memory: Path, disk: str, more: list[str]):
        labels = directory / "labels"
        labels.unlink(missing_ok=True)
        for file, size in ((labels, 256 << 20), (cxl_memory, MEDIUM_BYTES)):
            file.touch()
            os.truncate(file, size)
        monitor = directory / "monitor"
        monitor.unlink(missing_ok=True)
        shared = "share=on,id"
        self._process = subprocess.Popen(
            [
                "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
                "-M", "q35,cxl=on,accel=tcg,memory-backend=dram", "-cpu", "max", "-smp", "2",
                "-m", f"{DRAM_MIB}M,maxmem=64G,slots=4",
                "-object", f"memory-backend-file,id=dram,size={DRAM_MIB}M,{dram}",
                "-kernel", str(image.kernel), "-initrd", str(image.initrd),
                "-append", "console=ttyS0 loglevel=1 panic=-1",
                "-serial", "stdio", "-qmp", f"unix:{monitor},server=on,wait=off",
                "-object", f"memory-backend-file,{shared}=cxl-memory,mem-path={cxl_memory},size={MEDIUM_BYTES}",
                "-object", f"memory-backend-file,{shared}=labels,mem-path={labels},size=256M",
                "-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl",
                "-device", "cxl-rp,port=0,bus=cxl,id=port0,chassis=0,slot=2",
                "-device", "cxl-rp,port=1,bus=cxl,id=port1,chassis=0,slot=3",
                "-device", "cxl-type3,bus=port0,memdev=cxl-memory,lsa=labels,id=cxl-device",
                "-M", "cxl-fmw.0.targets.0=cxl,cxl-fmw.0.size=4G",
                "-drive", f"if=none,id=disk,{disk}",
                "-device", "virtio-blk-pci,bus=pcie.0,drive=disk",
                *more,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.transcript: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name="console", daemon=True).start()
        try:
            self.monitor = Monitor(monitor)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            raise MachineStopped(f"QEMU does not start: {' '.join(self.transcript)}") from error

    @classmethod
    def from_snapshot(
        cls, snapshot: Snapshot, directory: Path, *, cxl_memory: Path, disk: str, translated: Path | None = None
    ) -> Self:
        """translated: where QEMU lists the code that it translates, which is the code that runs."""
        dram = f"mem-path={snapshot.dram},share=off"
        more = ["-incoming", "defer"]
        if translated is not None:
            more += ["-d", "in_asm", "-D", str(translated)]
        machine = cls(snapshot.image, directory, dram=dram, cxl_memory=cxl_memory, disk=disk, more=more)
        machine.monitor.skip_shared_memory()
        machine.monitor("migrate-incoming", uri=f"exec:cat {snapshot.devices}")
        machine.monitor.wait_for_migration()
        machine.monitor("cont")
        return machine

    def line(self, seconds: float) -> str | None:
        """The next line of the console; None where none comes in time. Raises MachineStopped."""
        try:
            line = self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        if line is None:
            raise MachineStopped("\n".join(self.transcript[-30:]))
        return line

    def wait_for(self, start: str, seconds: float) -> str:
        """The next line that begins so. Raises MachineStopped."""
        until = time.monotonic() + seconds
        while (line := self.line(until - time.monotonic())) is not None:
            if line.startswith(start):
                return line
        raise MachineStopped(f"no line {start!r} in {seconds:.0f} s, but\n" + "\n".join(self.transcript[-30:]))

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def cut(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.transcript.append(line)
            self._lines.put(line)
        self._lines.put(None)


class Monitor:
    """QEMU's machine protocol."""

    def __init__(self, address: Path) -> None:
        connection = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + 60
        while True:
            try:
                connection.connect(str(address))
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        self._file = connection.makefile("rw")
        self._file.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments: Any) -> Any:
        self._file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._file.flush()
        while line := self._file.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise MachineStopped(f"QEMU refuses {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise MachineStopped(f"QEMU ended at {command}")

    def skip_shared_memory(self) -> None:
        self("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])

    def wait_for_migration(self) -> None:
        while (status := self("query-migrate").get("status")) != "completed":
            if status == "failed":
                raise MachineStopped("QEMU could not make or read the snapshot")
            time.sleep(0.05)


def take_snapshot(image: GuestImage, directory: Path, *, patience: float, tries: int = 3) -> Snapshot:
    """Boots the guest up to where it waits for its medium. patience: seconds for either half of that."""
    snapshot = Snapshot(image, directory / "dram", directory / "devices")
    for left in reversed(range(tries)):
        snapshot.dram.unlink(missing_ok=True)
        dram = f"mem-path={snapshot.dram},share=on"
        disk = f"driver=null-co,size={MEDIUM_BYTES}"
        with Machine(image, directory, dram=dram, cxl_memory=directory / "no-memory", disk=disk, more=[]) as machine:
            try:
                machine.wait_for("guest: init", patience)
            except MachineStopped:
                if left:
                    continue
                raise
            machine.wait_for("guest: waiting", patience)
            machine.monitor("stop")
            machine.monitor.skip_shared_memory()
            machine.monitor("migrate", uri=f"exec:cat > {snapshot.devices}")
            machine.monitor.wait_for_migration()
            break
    return snapshot
