"""`holdfast prove` as a process, on scripts of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLANTED = HERE / "planted.py"
USERS = HERE / "users"


@dataclass(frozen=True)
class Proof:
    """What the command gave. report: its JSON, where there was a verdict."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

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
    return prove(*options, "--", sys.executable, PLANTED, pool, "--defect", defect, **variables)
