"""Lists the files that the guest's run takes up to the moment at which it waits: what a guest needs to have."""

from __future__ import annotations

import sys
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

opened: set[str] = set()


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        opened.add(arguments[0])


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
    sys.addaudithook(watch)
    import guest_run

    guest_run.warm_up()
    for path in sorted(used_files()):
        if not str(path).startswith(("/dev/", "/proc/", "/sys/")):
            print(path)
