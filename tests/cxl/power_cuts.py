"""Trains in a virtual machine, cuts its power again and again, and checks what comes back.

    python tests/cxl/power_cuts.py [--medium dax|disk|apart] [--cuts 25] [--steps 300] [--seed 1] [--reports DIRECTORY]
    python tests/cxl/power_cuts.py --verbs [--only VERB] [--medium dax|disk] [--cuts 25] [--seed 1]

dax: CXL memory. disk: a disk with a volatile cache. apart: rows on the first, their log on the second, which loses its
power alone at every other cut.

For each medium: a run that is never cut gives the digest; then, on a fresh medium, the same run is cut at random
moments of its training and of its opening. Every life must find the pool whole and open it at a step that is not below
any that was reported durable before, and the last life must end with the digest. Before that, a medium that forgets
what it was told to keep has to make the same campaign fail.

With --verbs the machine does not train: each verb that writes is run and cut so often (verbs_campaign.py). With
--and-verbs N it does both, and cuts N verbs once.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from campaign import Campaign, CampaignFailed, Life, Moment, Pace
from guest_image import MissingPackages, build
from guest_machine import MachineStopped, Snapshot, take_snapshot
from media import Apart, CxlMemory, Disk, Medium
from verbs_campaign import VerbsCampaign, cut_and_judge, notices_forgetfulness
from verbs_campaign import plan as plan_verbs

MEDIA: dict[str, type[Medium]] = {"dax": CxlMemory, "disk": Disk, "apart": Apart}
BOOT_PATIENCE = 3  # booting and importing torch takes longer than anything that a life does
FORGETFUL_CUTS = 6  # within so many a campaign has to notice
FORGETFUL_VERBS = 3
BUILD = Path(__file__).resolve().parents[2] / "build" / "cxl"


def plan(cuts: int, steps: int, chance: random.Random, openings: float = 0.3) -> list[Moment]:
    """Cuts spread over the run, some of them while the pool is being opened."""
    training = sorted(chance.sample(range(1, steps - 1), cuts))
    return [
        Moment(chance.choice(("guest: mounting", "guest: opening")), chance.random())
        if chance.random() < openings
        else Moment("guest: step", chance.random(), step)
        for step in training
    ]


def make(kind: type[Medium], *, forgetful: bool = False) -> Medium:
    """A fresh one."""
    directory = BUILD / f"on-{kind.name}"
    directory.mkdir(exist_ok=True)
    return kind(directory, forgetful=forgetful)


def never_cut(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> tuple[Life, Pace]:
    medium = make(kind)
    campaign = Campaign(medium, snapshot, options.steps, random.Random(0), options.patience)
    translated = medium.directory / "translated"
    life = campaign.live(None, Pace(0, 0), translated)
    life.evidence["persistence instructions that the training process ran"] = persistence_instructions(translated)
    translated.unlink()
    seconds = life.seconds
    assert life.opened == 0 and life.last == options.steps and life.end is not None
    return life, Pace(seconds["opened"] - seconds["mounting"], (seconds["step"] - seconds["opened"]) / options.steps)


def notices_a_forgetful_medium(
    kind: type[Medium], snapshot: Snapshot, pace: Pace, options: argparse.Namespace
) -> str | None:
    """How a campaign fails on a medium that does not keep what it was told to; None where it does not."""
    chance = random.Random(options.seed)
    campaign = Campaign(make(kind, forgetful=True), snapshot, options.steps, chance, options.patience)
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
    campaign = Campaign(make(kind), snapshot, options.steps, chance, options.patience)
    doings: Counter[str] = Counter()
    for number, moment in enumerate([*plan(options.cuts, options.steps, chance), None], 1):
        bound = campaign.durable
        life = campaign.live(moment, pace)
        said = "not opened" if life.opened is None else f"opened at {life.opened}, {bound} had been durable"
        if life.last is not None:
            said += f"; reached {life.last}, durable {campaign.durable}"
        if life.end is None:
            doings[life.doing] += 1
            report(f"life {number:2}: {said}; cut {life.cut}, while {life.doing}{life.lost}")
            continue
        if moment is not None:
            raise CampaignFailed(f"the run was over before cut {number}: more steps are needed")
        report(f"life {number:2}: {said}; the end")
        report(f"cuts: {', '.join(f'{count} while {doing}' for doing, count in doings.items())}")
        report(f"digest {life.end['digest']}")
        report(f"   and {digest} of the run that was never cut")
        if life.end["digest"] != digest:
            raise CampaignFailed("the digests differ")


def persistence_instructions(translated: Path) -> list[str]:
    """Those at user addresses in QEMU's list of the code that it translated, which is the code that ran."""
    places: set[tuple[str, int]] = set()
    with translated.open(errors="replace") as lines:
        for line in lines:
            found = re.match(r"(0x[0-9a-f]+): .*\s(clwb|clflushopt|clflush|sfence)\b", line)
            if found is not None and int(found[1], 16) < 1 << 47:
                places.add((found[2], int(found[1], 16)))
    return sorted(name for name, _ in places)


def describe_use(life: Life) -> list[str]:
    assert life.end is not None
    found = {**life.evidence, "bytes of the log merged": life.end["merged_bytes"]}
    return [f"  {name}: {_words(value)}" for name, value in found.items()]


def _words(value: object) -> object:
    """Numbered files of a kind as one."""
    if not isinstance(value, list):
        return value
    kinds = Counter(re.sub(r"\d+", "*", Path(name).name) for name in value)
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items()) or "none"


class Report:
    """What is printed, and kept in the end."""

    def __init__(self, snapshot: Snapshot, title: str) -> None:
        self._began = time.monotonic()
        self._lines: list[str] = []
        qemu = subprocess.run(["qemu-system-x86_64", "--version"], check=True, capture_output=True, text=True).stdout
        self(f"power cuts, {title}")
        self(f"{qemu.splitlines()[0].partition('(')[0].strip()}, TCG; guest kernel {snapshot.image.kernel_version}")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)

    def end(self, directory: Path | None, name: str) -> None:
        self(f"passed in {(time.monotonic() - self._began) / 60:.0f} minutes")
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.txt").write_text("\n".join(self._lines) + "\n")


def train(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> None:
    report = Report(snapshot, f"medium {kind.name}: {options.cuts} cuts, {options.steps} steps, seed {options.seed}")
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
    report.end(options.reports, kind.name)


def run_verbs(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> None:
    verbs = options.only or all_verbs()
    report = Report(snapshot, f"medium {kind.name}: {options.cuts} cuts of each verb, seed {options.seed}")
    noticed = a_verb_notices_a_forgetful_medium(kind, snapshot, verbs, options)
    report(f"a medium that forgets what a verb wrote is noticed: {' '.join(noticed.splitlines()[:2])}")
    cut_verbs(kind, snapshot, verbs, options.cuts, options.seed, options.patience, report)
    report.end(options.reports, f"{kind.name}-verbs")


def a_verb_notices_a_forgetful_medium(
    kind: type[Medium], snapshot: Snapshot, verbs: Sequence[str], options: argparse.Namespace
) -> str:
    chance = random.Random(options.seed)
    for verb in chance.sample(verbs, min(FORGETFUL_VERBS, len(verbs))):
        campaign = VerbsCampaign(make(kind), snapshot, chance, options.patience, forgetful=True)
        if (noticed := notices_forgetfulness(campaign, verb)) is not None:
            return noticed
    raise CampaignFailed(f"a forgetful medium was not noticed by {FORGETFUL_VERBS} verbs")


def run_some_verbs(kind: type[Medium], snapshot: Snapshot, options: argparse.Namespace) -> None:
    """What a short campaign has time for: one cut of each of a few, others each time."""
    seed = time.time_ns() // 1_000_000
    verbs = random.Random(seed).sample(all_verbs(), options.and_verbs)
    report = Report(snapshot, f"medium {kind.name}: a cut of {' and '.join(verbs)}, seed {seed}")
    only = " ".join(f"--only {verb}" for verb in verbs)
    report(f"again: --verbs {only} --medium {kind.name} --cuts 1 --seed {seed}")
    cut_verbs(kind, snapshot, verbs, 1, seed, options.patience, report)
    report.end(None, "")


def cut_verbs(
    kind: type[Medium],
    snapshot: Snapshot,
    verbs: Sequence[str],
    cuts: int,
    seed: int,
    patience: float,
    report: Callable[[str], None],
) -> None:
    campaign = VerbsCampaign(make(kind), snapshot, random.Random(seed), patience)
    cut_and_judge(campaign, plan_verbs(verbs, cuts, random.Random(seed)), report)


def all_verbs() -> list[str]:
    import guest_verbs

    return list(guest_verbs.VERBS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medium", choices=MEDIA, action="append", help="default: all")
    parser.add_argument("--cuts", type=int, default=25, help="of the run, or of each verb")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reports", type=Path, metavar="DIRECTORY", help="keep the reports there")
    parser.add_argument("--verbs", action="store_true", help="cut every verb that writes, instead of a run")
    parser.add_argument("--only", action="append", metavar="VERB", help="of the verbs, this one; may be repeated")
    parser.add_argument("--and-verbs", type=int, default=0, metavar="N", help="cut N verbs, too, drawn by the clock")
    parser.add_argument("--patience", type=float, default=600, help="seconds of silence that count as a hang")
    options = parser.parse_args()
    if unknown := set(options.only or ()).difference(all_verbs() if options.only else ()):
        parser.error(f"no verb {', '.join(sorted(unknown))}; there are {', '.join(all_verbs())}")
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        print("building the guest, and booting it once: minutes on an emulated processor", flush=True)
        image = build(BUILD)
        snapshot = take_snapshot(image, BUILD, patience=BOOT_PATIENCE * options.patience)
        for name in options.medium or MEDIA:
            if options.verbs and name != "apart":
                run_verbs(MEDIA[name], snapshot, options)
            else:
                train(MEDIA[name], snapshot, options)
            if options.and_verbs and name != "apart":
                run_some_verbs(MEDIA[name], snapshot, options)
    except MissingPackages as error:
        sys.exit(f"power cuts: {error}")
    except (CampaignFailed, MachineStopped) as error:
        sys.exit(f"power cuts: {error}\nagain: python tests/cxl/power_cuts.py {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
