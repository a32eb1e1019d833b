"""Trains in a virtual machine, cuts its power again and again, and checks what comes back.

    python tests/cxl/power_cuts.py [--medium dax|disk] [--cuts 25] [--steps 300] [--seed 1] [--reports DIRECTORY]

For each medium: a run that is never cut gives the digest; then, on a fresh medium, the same run is cut at random
moments of its training and of its opening. Every life must find the pool whole and open it at a step that is not below
any that was reported durable before, and the last life must end with the digest. Before that, a medium that forgets
what it was told to keep has to make the same campaign fail.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guest_image import MissingPackages, build
from machine import Machine, MachineStopped, Snapshot, take_snapshot
from media import CxlMemory, Disk, Medium

MEDIA: dict[str, type[Medium]] = {"dax": CxlMemory, "disk": Disk}
FORGETFUL_CUTS = 6  # within so many a campaign has to notice
BUILD = Path(__file__).resolve().parents[2] / "build" / "cxl"


class CampaignFailed(Exception):
    """A life was not as the promise says."""


@dataclass(frozen=True)
class Moment:
    """When the power goes: `share` of a while after the console said `after`, or a step at or beyond `step`."""

    after: str
    share: float
    step: int = 0


@dataclass
class Life:
    """What the console said. opened: the step that the pool was at; last: the newest step; seconds: when lines came."""

    opened: int | None = None
    last: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    lost: str = ""
    doing: str = "waking up"
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pace:
    """Of the run that is never cut, in seconds."""

    opening: float
    step: float


def plan(cuts: int, steps: int, chance: random.Random, openings: float = 0.3) -> list[Moment]:
    """Cuts spread over the run, some of them while the pool is being opened."""
    training = sorted(chance.sample(range(1, steps - 1), cuts))
    return [
        Moment(chance.choice(("guest: mounting", "guest: opening")), chance.random())
        if chance.random() < openings
        else Moment("guest: step", chance.random(), step)
        for step in training
    ]


class Campaign:
    """The lives of one medium's run."""

    def __init__(self, medium: Medium, snapshot: Snapshot, steps: int, chance: random.Random, patience: float) -> None:
        self._medium = medium
        self._snapshot = snapshot
        self._steps = steps
        self._chance = chance
        self._patience = patience
        self._is_formatted = False
        self.durable = 0  # the newest step that any life reported durable

    def live(self, moment: Moment | None, pace: Pace) -> Life:
        """One life, until the cut or the end of the run. Raises CampaignFailed."""
        life = Life()
        with (
            self._medium.plugged() as plugged,
            Machine.from_snapshot(self._snapshot, BUILD, cxl_memory=plugged.cxl_memory, disk=plugged.disk) as machine,
        ):
            self._start(machine)
            cut_at: float | None = None
            while cut_at is None or time.monotonic() < cut_at:
                wait = self._patience if cut_at is None else cut_at - time.monotonic()
                try:
                    line = machine.line(wait)
                except MachineStopped as error:
                    raise CampaignFailed(f"the machine stopped by itself:\n{error}") from error
                if line is None and cut_at is None:
                    console = "\n".join(machine.transcript[-20:])
                    raise CampaignFailed(f"nothing was said for {self._patience:.0f} s, after\n{console}")
                if line is not None and line.startswith("guest: "):
                    self._hear(line.removeprefix("guest: "), life, machine)
                    if life.end is not None:
                        break
                    if (
                        cut_at is None
                        and moment is not None
                        and line.startswith(moment.after)
                        and (life.last or 0) >= moment.step
                    ):
                        a_while = 2 * pace.step if moment.step else pace.opening
                        cut_at = time.monotonic() + moment.share * a_while
            machine.cut()
        life.lost = self._medium.lose(self._chance)
        return life

    def _start(self, machine: Machine) -> None:
        for _ in range(60):
            machine.send("")
            try:
                machine.wait_for("guest: waiting", 2)
                break
            except MachineStopped:
                continue
        job = {
            "medium": self._medium.name,
            "boot_id": str(uuid.UUID(int=self._chance.getrandbits(128), version=4)),
            "format": not self._is_formatted,
            "steps": self._steps,
        }
        machine.send(json.dumps(job))

    def _hear(self, said: str, life: Life, machine: Machine) -> None:
        kind, _, rest = said.partition(" ")
        life.seconds[kind] = time.monotonic()
        match kind:
            case "mounting":
                self._is_formatted = True
                life.doing = "mounting"
            case "opening":
                life.doing = "opening the pool"
            case "opened":
                life.opened = json.loads(rest)["step"]
                life.doing = "training"
                life.seconds.setdefault("training", time.monotonic())
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
            case "end":
                life.end = json.loads(rest)
            case "failed" | "exit":
                while machine.line(5) is not None:
                    pass
                raise CampaignFailed("\n".join(machine.transcript[-40:]))


def never_cut(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> tuple[Life, Pace]:
    campaign = Campaign(kind(BUILD), snapshot, options.steps, random.Random(0), options.patience)
    life = campaign.live(None, Pace(0, 0))
    seconds = life.seconds
    assert life.opened == 0 and life.last == options.steps and life.end is not None
    return life, Pace(seconds["opened"] - seconds["mounting"], (seconds["step"] - seconds["opened"]) / options.steps)


def notices_a_forgetful_medium(
    kind: type[Medium], snapshot: Snapshot, pace: Pace, options: argparse.Namespace
) -> str | None:
    """How a campaign fails on a medium that does not keep what it was told to; None where it does not."""
    chance = random.Random(options.seed)
    campaign = Campaign(kind(BUILD, forgetful=True), snapshot, options.steps, chance, options.patience)
    for moment in plan(FORGETFUL_CUTS, options.steps, chance, openings=0.0):
        try:
            campaign.live(moment, pace)
        except CampaignFailed as failure:
            return str(failure)
    return None


def cut_and_resume(
    kind: type[Medium],
    snapshot: Snapshot,
    pace: Pace,
    digest: str,
    options: argparse.Namespace,
    report: Callable[[str], None],
) -> None:
    chance = random.Random(options.seed)
    campaign = Campaign(kind(BUILD), snapshot, options.steps, chance, options.patience)
    for number, moment in enumerate([*plan(options.cuts, options.steps, chance), None], 1):
        bound = campaign.durable
        life = campaign.live(moment, pace)
        opened = "not opened yet" if life.opened is None else f"opened at {life.opened} (durable: {bound})"
        reached = "" if life.last is None else f", reached {life.last}"
        if life.end is None:
            report(
                f"cut {number:2}: {opened}{reached}, durable {campaign.durable}; cut while {life.doing}; {life.lost}"
            )
            continue
        if moment is not None:
            raise CampaignFailed(f"the run was over before cut {number}: more steps are needed")
        report(f"the end: {opened}{reached}")
        report(f"digest {life.end['digest']}")
        report(f"of the run that was never cut {digest}")
        if life.end["digest"] != digest:
            raise CampaignFailed(f"digest {life.end['digest']} after cuts, {digest} without")


def describe_use(life: Life) -> list[str]:
    assert life.end is not None
    found = {**life.evidence, "bytes of the log merged": life.end["merged_bytes"]}
    return [f"  {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in found.items()]


def run(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> None:
    began = time.monotonic()
    lines: list[str] = []

    def report(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    qemu = subprocess.run(["qemu-system-x86_64", "--version"], check=True, capture_output=True, text=True).stdout
    report(f"power cuts, medium {kind.name}: {options.cuts} cuts, {options.steps} steps, seed {options.seed}")
    report(f"{qemu.splitlines()[0].partition('(')[0].strip()}, TCG; guest kernel {snapshot.image.kernel_version}")
    uncut, pace = never_cut(kind, snapshot, options)
    assert uncut.end is not None
    report("how the medium is used, as the guest's kernel shows it:")
    for line in describe_use(uncut):
        report(line)
    noticed = notices_a_forgetful_medium(kind, snapshot, pace, options)
    if noticed is None:
        raise CampaignFailed(f"{FORGETFUL_CUTS} cuts of a forgetful medium were not noticed")
    report(f"a forgetful medium is noticed: {noticed.splitlines()[0]}")
    cut_and_resume(kind, snapshot, pace, uncut.end["digest"], options, report)
    report(f"passed in {(time.monotonic() - began) / 60:.0f} minutes")
    if options.reports is not None:
        options.reports.mkdir(parents=True, exist_ok=True)
        (options.reports / f"{kind.name}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medium", choices=MEDIA, action="append", help="default: both")
    parser.add_argument("--cuts", type=int, default=25)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reports", type=Path, metavar="DIRECTORY", help="keep the reports there")
    parser.add_argument("--patience", type=float, default=600, help="seconds of silence that count as a hang")
    parser.add_argument("--snapshot", action="store_true", help="begin at the snapshot that an earlier start made")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        image = build(BUILD)
        snapshot = take_snapshot(image, BUILD, boot_seconds=options.patience)
        for name in options.medium or MEDIA:
            run(MEDIA[name], snapshot, options)
    except MissingPackages as error:
        sys.exit(f"power cuts: {error}")
    except (CampaignFailed, MachineStopped) as error:
        again = f"--medium {name}" if "name" in locals() else ""
        sys.exit(
            f"power cuts: {error}\nagain: python tests/cxl/power_cuts.py {again} --cuts {options.cuts} "
            f"--steps {options.steps} --seed {options.seed}"
        )


if __name__ == "__main__":
    main()
