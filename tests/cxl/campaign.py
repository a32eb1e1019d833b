"""The lives of one medium, and those of a run: each begins where the power cut before it left the medium.

What is checked
- Every life of a run finds the pool whole, and opens it at a step that is not below any that was reported durable
  before.
- Whatever the guest says to have failed is a failure, but for trouble before it mounted anything: its kernel stumbles
  over the emulated CXL bus now and then, and such a life is begun again.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from guest_machine import Machine, MachineStopped, Snapshot
from media import Medium, Span

TRIES = 3
WAKING_UP = "waking up"
WAKE_UP_SECONDS = 600  # beside other work
ATTACHING_SECONDS = 120  # it takes a few, or does not end


class CampaignFailed(Exception):
    """A life was not as the promise says."""


@dataclass
class Life:
    """What the console said. opened: the step that the pool was at; last: the newest step; seconds: when lines came.
    cut, doing, lost: when the power goes, what the guest was at, and what it cost the medium; is_over: whether nothing
    more is waited for."""

    opened: int | None = None
    last: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    is_over: bool = False
    cut: str = ""
    lost: str = ""
    doing: str = WAKING_UP
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """When the power goes: a `share` of a while after the console said `after`, or a step at or beyond `step`."""

    after: str
    share: float
    step: int = 0

    def has_come(self, line: str, life: Life) -> bool:
        return line.startswith(self.after) and (life.last or 0) >= self.step


@dataclass(frozen=True)
class Pace:
    """Of the run that is never cut, in seconds."""

    opening: float
    step: float


_Life = TypeVar("_Life", bound=Life)


class Lives(ABC):
    """The lives of one medium."""

    def __init__(self, medium: Medium, snapshot: Snapshot, chance: random.Random, patience: float) -> None:
        self._medium = medium
        self._snapshot = snapshot
        self._chance = chance
        self._patience = patience
        self._heard = 0.0  # when the guest last said something

    @abstractmethod
    def _job(self) -> dict[str, Any]:
        """What the guest is to do, beside what it is told of the medium."""

    def _live(
        self,
        begin: Callable[[], _Life],
        hear: Callable[[str, _Life, Machine], None],
        translated: Path | None = None,
    ) -> _Life:
        """One life, until the cut or its end. hear: told what the guest says. Raises CampaignFailed."""
        for left in reversed(range(TRIES)):
            try:
                return self._try(begin(), hear, translated)
            except MachineStopped:  # before it mounted anything: the guest's own trouble with its devices
                if not left:
                    raise
        raise AssertionError("one try at least")

    def _try(self, life: _Life, hear: Callable[[str, _Life, Machine], None], translated: Path | None) -> _Life:
        with (
            self._medium.plugged() as plugged,
            Machine.from_snapshot(
                self._snapshot,
                self._medium.directory,
                cxl_memory=plugged.cxl_memory,
                disk=plugged.disk,
                translated=translated,
            ) as machine,
        ):
            self._start(machine)
            self._heard = time.monotonic()
            while not life.is_over and not (life.cut and self._medium.is_due()):
                line = self._listen(machine, life, 0.02 if life.cut else self._patience)
                if line is None or not line.startswith("guest: "):
                    continue
                said = line.removeprefix("guest: ")
                self._hear_of_the_machine(said, life, machine)
                hear(said, life, machine)
            machine.cut()
        life.lost = self._medium.lose(self._chance)
        return life

    def _listen(self, machine: Machine, life: Life, seconds: float) -> str | None:
        try:
            line = machine.line(min(seconds, 1.0))
        except MachineStopped as error:
            if life.doing == WAKING_UP:
                raise
            raise CampaignFailed(f"the machine stopped by itself:\n{error}") from error
        silence = time.monotonic() - self._heard
        if line is not None:
            self._heard = time.monotonic()
        elif life.doing == WAKING_UP and silence > ATTACHING_SECONDS:
            raise MachineStopped("the guest does not come to mount its medium")
        elif silence > self._patience:
            console = "\n".join(machine.transcript[-20:])
            raise CampaignFailed(f"nothing was said for {self._patience:.0f} s, after\n{console}")
        return line

    def _start(self, machine: Machine) -> None:
        until = time.monotonic() + WAKE_UP_SECONDS
        machine.send("")
        while machine.line(2) != "guest: waiting":
            if time.monotonic() > until:
                raise MachineStopped("the guest does not wake up")
            machine.send("")
        job = {
            "time": time.time(),
            "medium": self._medium.name,
            "boot_id": str(uuid.UUID(int=self._chance.getrandbits(128), version=4)),
            "format": not self._medium.is_formatted,
            **self._job(),
        }
        machine.send(json.dumps(job))

    def _hear_of_the_machine(self, said: str, life: Life, machine: Machine) -> None:
        kind, _, rest = said.partition(" ")
        life.seconds[kind] = time.monotonic()
        match kind:
            case "mounting":
                self._medium.is_formatted = True
                life.doing = "mounting"
            case "end":
                life.end = json.loads(rest)
                life.is_over = True
            case "lost" if self._medium.may_fail:
                life.is_over = True
                life.doing = f"training, which ended in: {rest}"
            case "lost" | "failed" | "exit":
                with suppress(MachineStopped):  # it ends by itself, too
                    while machine.line(5) is not None:
                        pass
                kind_of_failure = MachineStopped if life.doing == WAKING_UP else CampaignFailed
                raise kind_of_failure("\n".join([f"while {life.doing}: {rest}", *machine.transcript[-40:]]))


class Campaign(Lives):
    """The lives of one medium's run."""

    def __init__(self, medium: Medium, snapshot: Snapshot, steps: int, chance: random.Random, patience: float) -> None:
        super().__init__(medium, snapshot, chance, patience)
        self._steps = steps
        self.durable = 0  # the newest step that any life reported durable

    def _job(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def live(self, moment: Moment | None, pace: Pace, translated: Path | None = None) -> Life:
        """One life, until the cut or the end of the run. Raises CampaignFailed."""

        def hear(said: str, life: Life, machine: Machine) -> None:
            self._hear(said, life)
            if life.end is None and not life.cut and moment is not None and moment.has_come(f"guest: {said}", life):
                span = Span(2 * pace.step if moment.step else pace.opening)
                life.cut = f"{self._medium.arm(moment.share, span)} after '{said}'"

        return self._live(Life, hear, translated)

    def _hear(self, said: str, life: Life) -> None:
        kind, _, rest = said.partition(" ")
        match kind:
            case "opening":
                life.doing = "opening the pool"
            case "opened":
                life.opened = json.loads(rest)["step"]
                life.doing = "training"
                if life.opened < self.durable:
                    raise CampaignFailed(
                        f"the pool opened at step {life.opened}, and step {self.durable} had been durable:\n{rest}"
                    )
            case "evidence":
                life.evidence = json.loads(rest)
            case "step":
                step, _, durable = rest.split()
                life.last = int(step)
                self.durable = max(self.durable, int(durable))
