"""Builds what the guest boots: Debian's kernel, and one archive (initrd) with everything that it ever runs.

Every file has the path in the guest that it has here, so this Python and its packages work there as they are. Needs
Debian's apt; packages that are missing are installed where this is root, and named by MissingPackages elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HERE = Path(__file__).resolve().parent
# A program of each package.
PACKAGES = {
    "qemu-system-x86": "qemu-system-x86_64",
    "busybox-static": "busybox",
    "ndctl": "ndctl",  # brings cxl, too
    "e2fsprogs": "mkfs.ext4",
    "kmod": "depmod",
}
TOOLS = ("cxl", "ndctl", "mkfs.ext4")
MODULES = (
    "crc32c_generic", "crc32c_intel", "virtio_pci", "virtio_blk", "ext4",
    "cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem", "libnvdimm", "nd_pmem", "dax_pmem", "device_dax",
)  # fmt: skip
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
ENVIRONMENT = {**os.environ, "PATH": PATH}


class MissingPackages(Exception):
    """What has to be installed, and how."""


@dataclass(frozen=True)
class GuestImage:
    """kernel_version: as Debian names it."""

    kernel: Path
    initrd: Path
    kernel_version: str


def build(directory: Path) -> GuestImage:
    """Makes the image in `directory`; the kernel is downloaded once, the archive is written anew."""
    provide_packages()
    modules = unpack_kernel(directory / "kernel")
    initrd = directory / "initrd"
    with initrd.open("wb") as out:
        archive = Archive(out)
        add_system(archive, modules)
        listing = subprocess.run(
            [sys.executable, HERE / "guest_files.py"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"},
        )
        for path in map(Path, listing.stdout.splitlines()):
            archive.add(path)
            if ".so" in path.name:
                archive.add_links_to(path)
        for directory_of_packages in {Path(path) for path in sys.path if path.endswith("site-packages")}:
            for hook in directory_of_packages.glob("*.pth"):
                archive.add(hook)
        archive.add(Path(sys.prefix) / "pyvenv.cfg")
        archive.end()
    kernel = next((directory / "kernel" / "unpacked" / "boot").glob("vmlinuz-*"))
    return GuestImage(kernel, initrd, modules.name)


def provide_packages() -> None:
    """Installs what is missing where this is root, else raises MissingPackages."""
    if shutil.which("apt-get") is None:
        raise MissingPackages("the guest's kernel and tools are Debian's packages, and there is no apt-get here")
    missing = [package for package, program in PACKAGES.items() if shutil.which(program, path=PATH) is None]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise MissingPackages(f"missing: {', '.join(missing)}; as root: apt-get update && {' '.join(install)}")
    print(f"installing {' '.join(missing)}", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)


def unpack_kernel(directory: Path) -> Path:
    """Downloads Debian's kernel, unless it is there, and returns the directory of its modules."""
    unpacked = directory / "unpacked"
    if not unpacked.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], check=False, capture_output=True, text=True
        ).stdout
        found = re.search(r"Depends: (linux-image-\S+)", depends)
        if found is None:
            raise MissingPackages("apt knows no linux-image-amd64; on Debian, run apt-get update as root")
        subprocess.run(["apt-get", "download", "-qq", found[1]], check=True, cwd=directory)
        partial = directory / "partial"
        subprocess.run(["dpkg", "-x", next(directory.glob("*.deb")), partial], check=True)
        release = next((partial / "lib/modules").iterdir()).name
        subprocess.run(["depmod", "-b", partial, release], check=True, env=ENVIRONMENT)
        partial.rename(unpacked)
    return next((unpacked / "lib/modules").iterdir())


def add_system(archive: Archive, modules: Path) -> None:
    """First process, shell, kernel modules, and the tools that make namespaces and file systems."""
    run = HERE / "guest_run.py"
    for file in (run, HERE / "run.toml", HERE.parent / "power" / "verbs.toml"):
        archive.add(file)
    init = (HERE / "init.sh").read_text().replace("@PYTHON@", sys.executable).replace("@RUN@", str(run))
    archive.add_file("/init", init.encode(), mode=0o755)
    archive.add_file("/attach.sh", (HERE / "attach.sh").read_bytes(), mode=0o755)
    archive.add_file("/bin/busybox", Path(_which("busybox")).read_bytes(), mode=0o755)
    there = f"/lib/modules/{modules.name}"
    for name in module_files(modules):
        archive.add_file(f"{there}/{name}", (modules / name).read_bytes())
    for index in ("modules.dep", "modules.alias", "modules.softdep", "modules.builtin"):
        archive.add_file(f"{there}/{index}", (modules / index).read_bytes())
    for tool in TOOLS:
        path = _which(tool)
        archive.add(Path(path))
        libraries = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+\.so\S*)", libraries):
            archive.add(Path(library))
    loader = subprocess.run(["ldd", os.path.realpath(sys.executable)], check=True, capture_output=True, text=True)
    for library in re.findall(r"(/\S+\.so\S*)", loader.stdout):
        archive.add(Path(library))


def module_files(modules: Path) -> list[str]:
    """MODULES and what they depend on, as paths in `modules`."""
    depends = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, others = line.partition(":")
        depends[name] = others.split()
    by_name = {Path(name).name.partition(".")[0].replace("-", "_"): name for name in depends}
    wanted = [by_name[name] for name in MODULES if name in by_name]
    return sorted({*wanted, *(other for name in wanted for other in depends[name])})


def _which(program: str) -> str:
    path = shutil.which(program, path=PATH)
    assert path is not None, f"{program} is not there after its package was installed"
    return path


class Archive:
    """Writes a cpio archive as the kernel unpacks it (newc). Directories come by themselves, each path once."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._there = {"/"}
        for link in filter(Path.is_symlink, map(Path, ("/bin", "/sbin", "/lib", "/lib64"))):
            self._entry(str(link), stat.S_IFLNK | 0o777, str(link.readlink()).encode())
            self.add_directory(os.path.realpath(link))

    def add(self, path: Path) -> None:
        """A file as it is here, by the way that leads to it: its symbolic links are links in the guest."""
        at = Path("/")
        parts = list(Path(os.path.normpath(path)).parts[1:])
        while parts:
            at /= parts.pop(0)
            if at.is_symlink():
                target = str(at.readlink())
                self._entry(str(at), stat.S_IFLNK | 0o777, target.encode())
                self.add(Path(os.path.normpath(at.parent / target)).joinpath(*parts))
                return
        self.add_file(str(at), at.read_bytes(), mode=at.stat().st_mode & 0o777, modified=int(at.stat().st_mtime))

    def add_links_to(self, path: Path) -> None:
        """Other names of a library in its directory: those that programs ask for."""
        for other in path.parent.glob(f"{path.name.partition('.so')[0]}.so*"):
            if other.is_symlink() and other.resolve() == path.resolve():
                self.add(other)

    def add_file(self, name: str, data: bytes, *, mode: int = 0o644, modified: int = 0) -> None:
        directory = os.path.realpath(Path(name).parent)  # /lib may be a link
        self.add_directory(directory)
        self._entry(str(Path(directory) / Path(name).name), stat.S_IFREG | mode, data, modified)

    def add_directory(self, name: str) -> None:
        if name not in self._there:
            self.add_directory(str(Path(name).parent))
            self._entry(name, stat.S_IFDIR | 0o755)

    def end(self) -> None:
        self._write("TRAILER!!!", 0, b"", 0)

    def _entry(self, name: str, mode: int, data: bytes = b"", modified: int = 0) -> None:
        if name in self._there:
            return
        if stat.S_ISLNK(mode):
            self.add_directory(str(Path(name).parent))
        self._there.add(name)
        self._write(name, mode, data, modified)

    def _write(self, name: str, mode: int, data: bytes, modified: int) -> None:
        path = name.lstrip("/").encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, device (2), device it stands for (2), length of the name, checksum
        fields = (len(self._there), mode, 0, 0, 1, modified, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        for part in (head, data):
            self._out.write(part + bytes(-len(part) % 4))
