"""The lives of the verbs that write: each runs one, and the power is cut while it runs it again.

A life first judges, by the rules of tests/power/verbs.py, what the cut before it left. Then it runs one verb twice,
each time prepared anew in a directory of its own. The first run returns, and says how long the verb takes here and now;
in the second, at a share of that, the power goes. So every life but the last is a cut, and every life but the first a
judgement: of a verb that was cut, and of one that had returned.

The second time is the faster one, since the emulator has translated the code by then: how much faster is known from the
newest life in which the verb returned twice.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from campaign import CampaignFailed, Life, Lives
from guest_machine import Machine, Snapshot
from media import Medium, Span

NOTHING = Span(0, 0)
AT_ITS_RETURN = 1.1  # what shares are drawn up to: some of the cuts come as soon as the verb has returned


@dataclass(frozen=True)
class Cut:
    """share: of the verb's time; from 1 on, as soon as it has returned."""

    verb: str
    share: float


@dataclass
class Left:
    """What a life left of a verb: what the host was told of it."""

    root: str
    verb: str
    sources: str | None
    has_returned: bool = False


@dataclass
class VerbsLife(Life):
    """judged: what the guest found, by root; left: what is to be judged next; span: of the run that returned; began:
    when the newest run did."""

    judged: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    span: Span = NOTHING
    began: Span = NOTHING


def plan(verbs: Sequence[str], cuts: int, chance: random.Random) -> list[Cut]:
    """So many of each verb, spread evenly over its time, in rounds that have every verb once."""
    shares = {verb: [(part + chance.random()) / cuts * AT_ITS_RETURN for part in range(cuts)] for verb in verbs}
    for of_verb in shares.values():
        chance.shuffle(of_verb)
    return [Cut(verb, shares[verb][number]) for number in range(cuts) for verb in chance.sample(verbs, len(verbs))]


class VerbsCampaign(Lives):
    """The lives of one medium. forgetful: whether it forgets what the verb that is cut wrote."""

    def __init__(
        self, medium: Medium, snapshot: Snapshot, chance: random.Random, patience: float, *, forgetful: bool = False
    ) -> None:
        super().__init__(medium, snapshot, chance, patience)
        self._forgetful = forgetful
        self._cut: Cut | None = None
        self._left: list[Left] = []
        self._judged: list[Left] = []
        self._second_times: dict[str, float] = {}  # of a verb: as a share of its first time, in seconds

    def live(self, cut: Cut | None) -> VerbsLife:
        """One life, until the cut; without one, until what is left is judged. Raises CampaignFailed."""
        self._cut = cut
        self._medium.keep_copy()
        life = self._live(VerbsLife, self.hear)
        missing = {left.root for left in self._left} - life.judged.keys()
        assert not missing, f"not judged: {missing}"
        self._judged, self._left = self._left, life.left
        return life

    def outcome(self, life: VerbsLife) -> str:
        """What the newest life found of the verb that was cut before it."""
        cut = self._judged[-1]
        if cut.has_returned:
            return "had returned"
        return "made it" if life.judged[cut.root]["found"] else "ran again"

    def _job(self) -> dict[str, Any]:
        verbs = [] if self._cut is None else [self._cut.verb] * 2
        return {"left": [vars(left) for left in self._left], "verbs": verbs}

    def hear(self, said: str, life: VerbsLife, machine: Machine) -> None:
        kind, _, rest = said.partition(" ")
        match kind:
            case "judging":
                left = next(left for left in self._left if left.root == rest)
                life.doing = f"judging {left.verb}, {'which had returned' if left.has_returned else 'which was cut'}"
            case "judged":
                found = json.loads(rest)
                life.judged[found.pop("root")] = found
                if any(not pool.endswith(", power") for pool in found["pools"]):
                    raise CampaignFailed(f"no pool for power cuts: {found['pools']}")
            case "prepared":
                life.left.append(Left(**json.loads(rest)))
                life.doing = f"running {life.left[-1].verb}"
                if len(life.left) == 2:
                    self._arm(life)
                life.began = self._now()
                machine.send("go")
            case "returned":
                life.left[-1].has_returned = True
                now = self._now()
                span = Span(now.seconds - life.began.seconds, now.requests - life.began.requests)
                if len(life.left) == 1:
                    life.span = span
                else:
                    self._second_times[life.left[-1].verb] = span.seconds / life.span.seconds
                    life.cut = f"as soon as it had returned, after {_words(span)}"
                    life.is_over = True

    def _arm(self, life: VerbsLife) -> None:
        assert self._cut is not None
        if self._forgetful:
            self._medium.forget_from_now_on()
        if self._cut.share < 1:
            seconds = life.span.seconds * self._second_times.get(self._cut.verb, 1.0)
            life.cut = f"{self._medium.arm(self._cut.share, Span(seconds, life.span.requests))} after it began"

    def _now(self) -> Span:
        return Span(time.monotonic(), self._medium.requests)


def cut_and_judge(campaign: VerbsCampaign, cuts: Sequence[Cut], report: Callable[[str], None]) -> None:
    """Reports each cut with what the next life found of the verb: it `had returned`, and its result is there; it `made
    it`, and had not said so; or there was no result, or a run that was not over, and it `ran again`. Raises
    CampaignFailed."""
    began = time.monotonic()
    outcomes: dict[str, Counter[str]] = {}
    before = ""
    for number, cut in enumerate([*cuts, None], 1):
        try:
            life = campaign.live(cut)
        except CampaignFailed as failure:
            raise CampaignFailed(f"after {before or 'nothing'}: {failure}") from failure
        if number > 1:
            last = cuts[number - 2]
            outcome = campaign.outcome(life)
            outcomes.setdefault(last.verb, Counter())[outcome] += 1
            report(f"{before}: {outcome}")
        if cut is not None:
            before = f"cut {number:2}: {cut.verb}, {life.cut} (the first time {_words(life.span)}){life.lost}"
    for verb, found in sorted(outcomes.items()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))
        report(f"{verb}: {found.total()} cuts; {counts}")
    report(f"a cut and its judgement took {(time.monotonic() - began) / len(cuts):.0f} s")


def _words(span: Span) -> str:
    return f"{span.seconds:.2f} s" + (f", {span.requests} requests" if span.requests else "")


def notices_forgetfulness(campaign: VerbsCampaign, verb: str) -> str | None:
    """How a campaign on a medium that forgets what the verb wrote fails; None where it does not."""
    campaign.live(Cut(verb, share=1.0))
    try:
        campaign.live(None)
    except CampaignFailed as failure:
        return f"{verb}, {failure}"
    return None
