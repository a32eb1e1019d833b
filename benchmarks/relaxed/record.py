"""results.json: what was trained, on what, and what came of it. Written anew after every trial."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from holdfast.files.config import to_plain
from relaxed.workloads import Workload


class Record:
    """Trials by workload and seed. Those that the file has are kept; those of other settings are an error."""

    def __init__(self, path: Path, workloads: list[Workload], *, memory: Path) -> None:
        self._path = path
        self.settings = {
            workload.name: {
                "config_of_seed_0": to_plain(workload.config(0)),
                "lags": {str(step): list(lags) for step, lags in workload.lags.items()},
                "last_step": workload.last_step,
            }
            for workload in workloads
        }
        self.machine = machine.describe(memory, memory)
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.trials: list[dict[str, Any]] = []
        if path.exists():
            kept = json.loads(path.read_text())
            if other := [name for name, found in self.settings.items() if kept["settings"].get(name, found) != found]:
                raise SystemExit(f"{path} has {other[0]} of other settings: remove it, or name another --report-dir")
            self.settings = kept["settings"] | self.settings
            self.trials = kept["trials"]

    def has(self, workload: str, seed: int) -> bool:
        return any(trial["workload"] == workload and trial["seed"] == seed for trial in self.trials)

    def of(self, workload: str) -> list[dict[str, Any]]:
        """A workload's trials in order of seeds."""
        return sorted(
            (trial for trial in self.trials if trial["workload"] == workload), key=lambda trial: trial["seed"]
        )

    def add(self, trial: dict[str, Any]) -> None:
        self.trials.append({**trial, "holdfast_commit": self.machine["holdfast_commit"]})
        found = {
            "date": self.date,
            "machine": self.machine,
            "settings": self.settings,
            "trials": self.trials,
        }
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(found, indent=1) + "\n")
        written.replace(self._path)
