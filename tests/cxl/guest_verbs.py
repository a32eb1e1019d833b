"""The verbs that write (tests/power/verbs.py), inside the guest: a life runs some, and the next judges what is left.

A job says what an earlier life left of which verbs, "left": [{"root", "verb", "sources", "has_returned"}], and which
are to be run, "verbs": [NAME]. What was left is judged and removed. Then each verb is prepared in a directory of its
own, which is synced; ``guest: prepared`` tells what it will read, and it runs once the host has said ``go``. That it
has returned is said afterwards: whatever was read of these lines before a cut binds what the verb left.

What a verb makes does not depend on the medium, so it is computed in memory before the machine is snapshotted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "power"))

from holdfast import _core
from verbs import VERBS, keep_rows_in

SUPERBLOCK = "pool.holdfast"
Say = Callable[[str, object], None]

expected: dict[str, str] = {}


def warm_up() -> None:
    """Whatever verbs and their judgements import or compute only once; and what they make."""
    for name, verb in VERBS.items():
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            verb.prepare(root)
            sources = verb.sources(root)
            verb.run(root)
            made = verb.value(root)
            assert made is not None
            expected[name] = made
            verb.judge(root, sources, made, has_returned=True)


def live(job: dict[str, Any], mounted: Path, say: Say) -> None:
    """One life, until its last verb has returned."""
    keep_rows_in("auto")
    verbs = mounted / "verbs"
    for left in job["left"]:
        say("judging", left["root"])
        say("judged", {"root": left["root"], **judge(verbs / left["root"], left)})
    shutil.rmtree(verbs, ignore_errors=True)
    for number, name in enumerate(job["verbs"]):
        run(verbs / f"{number}-{name}", name, say)
    say("end", {})


def judge(root: Path, left: dict[str, Any]) -> dict[str, Any]:
    """Raises what the verb's judgement does."""
    assert root.exists(), "what had been prepared is not there"
    verb = VERBS[left["verb"]]
    found = verb.judge(root, left["sources"], expected[left["verb"]], has_returned=left["has_returned"])
    headers = [_core.Reader(str(path.parent)).header for path in root.rglob(SUPERBLOCK)]
    return {"found": found, "pools": sorted({f"{header['store']}, {header['level']}" for header in headers})}


def run(root: Path, name: str, say: Say) -> None:
    root.mkdir(parents=True)
    verb = VERBS[name]
    verb.prepare(root)
    sources = verb.sources(root)
    os.sync()
    say("prepared", {"root": root.name, "verb": name, "sources": sources})
    while sys.stdin.readline().strip() != "go":
        pass
    verb.run(root)
    say("returned", root.name)
