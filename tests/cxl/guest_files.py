"""Lists the files that the guest's run takes up to the moment at which it waits: what a guest needs to have.

The run finds what a plain installation of holdfast has, and none of the packages that only its extras and tools bring:
torch imports a few of them (Triton is a gigabyte) wherever it can, and uses them for nothing that a run does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

opened: set[str] = set()


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        opened.add(arguments[0])


class Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, absent: set[str]) -> None:
        self._finder = finder
        self._absent = absent

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._absent else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def of_extras(modules: Mapping[str, Sequence[str]]) -> set[str]:
    """Those of the top-level modules (each with its distributions) that a plain installation lacks."""
    plain: set[str] = set()
    wanted = ["holdfast"]
    while wanted:
        name = _normal(wanted.pop())
        if name in plain:
            continue
        plain.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        unconditional = (requirement for requirement in requirements if "extra ==" not in requirement)
        wanted.extend(re.split(r"[^\w.-]", requirement)[0] for requirement in unconditional)
    return {module for module, owners in modules.items() if not plain & {_normal(owner) for owner in owners}}


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def used_files() -> set[Path]:
    """Files that were opened, sources of those that were compiled, and what is mapped."""
    names = {sys.executable, *opened}
    for module in list(sys.modules.values()):
        names.update(name for key in ("__file__", "__cached__") if isinstance(name := vars(module).get(key), str))
    names.update(source_from_cache(name) for name in list(names) if name.endswith(".pyc"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        names.update(line.split(maxsplit=5)[5:])
    # torch wants this program to be there
    names.update(f"{path}/torch/bin/torch_shm_manager" for path in sys.path if path.endswith("site-packages"))
    return {path for path in map(Path, names) if path.is_absolute() and path.is_file()}


if __name__ == "__main__":
    absent = of_extras(metadata.packages_distributions())
    sys.meta_path[:] = [Without(finder, absent) for finder in sys.meta_path]
    sys.addaudithook(watch)
    import guest_run

    guest_run.warm_up()
    for path in sorted(used_files()):
        if not str(path).startswith(("/dev/", "/proc/", "/sys/")):
            print(path)
