"""Prepares verbs and records each while it runs: `record_verbs.py DIRECTORY VERB...`, with the recorder preloaded.

Leaves in DIRECTORY, for each verb: VERB/before, as it was prepared; VERB/log, what was recorded; VERB/root, the end.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

from verbs import VERBS


def record(directory: Path, name: str) -> None:
    shim = ctypes.CDLL(None)
    verb = VERBS[name]
    root = directory / name / "root"
    root.mkdir(parents=True)
    verb.prepare(root)
    shutil.copytree(root, directory / name / "before")
    shim.holdfast_record(str(root).encode(), str(directory / name / "log").encode())
    verb.run(root)
    shim.holdfast_record(b"", b"")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        record(Path(sys.argv[1]), name)
