"""`holdfast prove` as a process, on scripts of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLANTED = HERE / "planted.py"
USERS = HERE / "users"


@dataclass(frozen=True)
class Proof:
    """What the command gave. report: its JSON, where there was a verdict. left: beside
    the pool that the script names, when it was over."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    left: Sequence[Path] = ()

    @property
    def difference(self) -> dict[str, Any]:
        assert self.report.get("difference"), f"{self.out}\n{self.err}"
        return self.report["difference"]

    @property
    def words(self) -> str:
        return "\n".join(self.report["verdict"])


def environment(**variables: str) -> dict[str, str]:
    """With what a user sets; threads that wait sleep, because other tests want the cores."""
    return {**os.environ, "MKL_CBWR": "AUTO,STRICT", "OMP_WAIT_POLICY": "PASSIVE", **variables}


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", "prove", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def prove(*arguments: object, **variables: str) -> Proof:
    process = start("--json", *arguments, **variables)
    out, err = process.communicate()
    return Proof(process.returncode, out, err, json.loads(out) if out.startswith("{") else {})


def prove_planted(defect: str, pool: Path, *options: object, **variables: str) -> Proof:
    found = prove(*options, "-j", "1", "--", sys.executable, PLANTED, pool, "--defect", defect, **variables)
    return replace(found, left=list(pool.parent.iterdir()))


@contextmanager
def proving(new_root: Callable[[], Path], options: dict[str, Sequence[str]]) -> Iterator[dict[str, Future[Proof]]]:
    """Proofs of planted defects with these options, as many at once as there are cores: what they cost is importing
    torch, and a proof of one run has one process at a time."""
    with ThreadPoolExecutor(1 + (os.cpu_count() or 1)) as executor:
        yield {
            defect: executor.submit(prove_planted, defect, new_root() / "pool", *each)
            for defect, each in options.items()
        }
