"""What a witness writes and the command reads: one JSON object a line, in the run's folder.

Invariants
- A line counts when it ends with a newline: the writer may be killed in the middle of one.
- Orders are whole when a process starts: they are written before it is.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ORDERS_FILE = "orders.json"
POOLS_FILE = "pools.json"
STACKS_FILE = "stacks.txt"
STACKS_SIGNAL = signal.SIGRTMAX - 3  # asks a witness where its process is

# In the order in which one can be the cause of another within a step.
PARTS = (
    "cursor",
    "batch",
    "random numbers",
    "schedulers",
    "scaler",
    "loader",
    "extra",
    "plain values",
    "optimizer state",
    "parameters",
    "rows",
)
OUTSIDE = "outside"  # of the Checkpoint: the script's own variables, which are evidence and no part of the state

KillKind = Literal["outside", "persist", "opening", "before commit", "after commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a process is to die by SIGKILL.

    kind: outside: sent by the command, a while after step `after`. persist: by the core itself at its `points`-th
    persist point from then. opening: the same, from the opening of the pool on. before commit: of step `after` + 1,
    whose rows are updated; after commit: of that step.
    """

    kind: KillKind
    after: int = 0
    points: int = 0
    delay: float = 0.0  # in steps

    @property
    def is_own(self) -> bool:
        """Whether the process kills itself."""
        return self.kind != "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """For one process. steps: it ends after so many. token: in the names of the run's pools, which lie in `pools`, or
    beside the script's own. values_bytes: of tensors that the run may keep for comparison."""

    life: int
    steps: int
    token: str
    pools: str | None
    kill: Kill | None
    values_bytes: int

    def write(self, folder: Path) -> None:
        (folder / ORDERS_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Orders:
        plain = json.loads((folder / ORDERS_FILE).read_text())
        kill = plain.pop("kill")
        return cls(kill=None if kill is None else Kill(**kill), **plain)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or value of the state. words: a value as text; of a tensor "dtype [shape]"; outside, what and where.
    offset: of a tensor's bytes in the life's file of values; negative where they were not kept."""

    part: str
    name: str
    digest: str
    words: str
    offset: int = -1
    num_bytes: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name


@dataclass(frozen=True, slots=True)
class Observed:
    """The state at the end of a step (`resumed`: as it was loaded)."""

    step: int
    life: int
    resumed: bool
    leaves: dict[tuple[str, str], Leaf]


@dataclass(slots=True)
class LifeRecord:
    """What the witness of one process told, so far. steps: what was observed; may be forgotten once it is compared.
    resumed, step: where the process went on, and its newest; None before the Checkpoint has resumed. facts: of the
    process, for the verdict. start: digests of what it began with.
    points_a_step: how often the core persisted something in one."""

    life: int
    steps: list[Observed] = field(default_factory=list)
    resumed: int | None = None
    step: int | None = None
    durable: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    openings: list[str] = field(default_factory=list)
    refusal: str | None = None
    ended: dict[str, Any] | None = None
    start: dict[tuple[str, str], str] = field(default_factory=dict)
    points_a_step: int = 1

    def take(self, line: dict[str, Any]) -> None:
        """Believes one line."""
        match line["event"]:
            case "resumed" | "step":
                self._observed(line)
            case "checkpoint":
                self.facts = line["facts"]
            case "opening":
                self.openings.append(line["pool"])
            case "refused":
                self.refusal = line["why"]
            case "ended":
                self.ended = line

    def _observed(self, line: dict[str, Any]) -> None:
        is_resumed = line["event"] == "resumed"
        leaves = {leaf.key: leaf for leaf in (Leaf(*fields) for fields in line["leaves"])}
        self.steps.append(Observed(line["step"], self.life, is_resumed, leaves))
        self.step = line["step"]
        self.durable = max(self.durable, line["durable"])
        if is_resumed:
            self.resumed = self.step
            self.start = {key: leaf.digest for key, leaf in leaves.items() if leaf.part == "random numbers"}
        else:
            self.points_a_step = max(self.points_a_step, line["points"])


def events_file(folder: Path, life: int) -> Path:
    return folder / f"life-{life}.jsonl"


def values_file(folder: Path, life: int) -> Path:
    return folder / f"life-{life}.values"


def output_file(folder: Path, life: int) -> Path:
    return folder / f"life-{life}.output"


def pools_of(folder: Path) -> dict[str, str]:
    """Where the run's pools are, by the names that the script has for them."""
    try:
        found: dict[str, str] = json.loads((folder / POOLS_FILE).read_text())
    except FileNotFoundError:
        return {}
    return found


class Follower:
    """Reads a life's lines as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Those that are new and whole."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
