"""Cuts of verbs: when they come, and what is made of what the guest says."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verbs_campaign
from campaign import CampaignFailed
from guest_machine import MachineStopped
from media import CxlMemory, Medium, Span
from verbs_campaign import AT_ITS_RETURN, Cut, Left, VerbsCampaign, VerbsLife, plan

VERBS = ["snapshot", "export", "repair"]


class Armed(CxlMemory):
    """Notes for what share of which span it was armed, and counts as many requests as it is told."""

    made = 0
    armed: tuple[float, Span] | None = None
    is_forgotten = False

    @property
    def requests(self) -> int:
        return self.made

    def arm(self, share: float, span: Span) -> str:
        self.armed = share, span
        return "a while"

    def forget_from_now_on(self) -> None:
        self.is_forgotten = True


class Console:
    """Of a machine that is over, or silent, when it is listened to."""

    transcript = ("the last words",)

    def __init__(self, *, is_silent: bool = False) -> None:
        self.sent: list[str] = []
        self.is_silent = is_silent

    def send(self, line: str) -> None:
        self.sent.append(line)

    def line(self, seconds: float) -> str | None:
        if self.is_silent:
            return None
        raise MachineStopped("that was all")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only value is the time."""
    now = [100.0]
    monkeypatch.setattr(verbs_campaign.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def medium(tmp_path: Path) -> Armed:
    return Armed(tmp_path)


def campaign_on(medium: Medium, cut: Cut | None = None, left: list[Left] | None = None, **options: Any) -> Any:
    campaign: Any = VerbsCampaign(medium, None, random.Random(1), 1.0, **options)
    campaign._cut = cut
    campaign._left = left or []
    return campaign


def prepared(number: int) -> str:
    return f"prepared {json.dumps({'root': f'{number}-export', 'verb': 'export', 'sources': 'as they were'})}"


def run_once(campaign: Any, life: VerbsLife, console: Console, medium: Armed, clock: list[float]) -> None:
    """The run that tells how long the verb takes: 3 s and 50 requests."""
    campaign.hear(prepared(0), life, console)
    clock[0] += 3
    medium.made += 50
    campaign.hear("returned 0-export", life, console)


def test_cuts_are_spread_evenly_over_verbs_and_over_their_time() -> None:
    cuts = plan(VERBS, 22, random.Random(1))
    for number in range(22):
        assert sorted(cut.verb for cut in cuts[3 * number : 3 * number + 3]) == sorted(VERBS)
    for verb in VERBS:
        shares = sorted(cut.share for cut in cuts if cut.verb == verb)
        assert [int(share / AT_ITS_RETURN * 22) for share in shares] == list(range(22))
        assert sum(share >= 1 for share in shares) >= 2


def test_neither_verbs_nor_shares_come_in_their_order() -> None:
    cuts = plan(VERBS, 10, random.Random(1))
    shares = [cut.share for cut in cuts if cut.verb == "export"]
    assert shares != sorted(shares)
    assert len({tuple(cut.verb for cut in cuts[at : at + 3]) for at in range(0, 30, 3)}) > 1


def test_the_seed_decides_the_plan() -> None:
    assert plan(VERBS, 5, random.Random(3)) == plan(VERBS, 5, random.Random(3)) != plan(VERBS, 5, random.Random(4))


def test_the_power_goes_in_the_second_run_at_a_share_of_the_first(medium: Armed, clock: list[float]) -> None:
    campaign, life, console = campaign_on(medium, Cut("export", 0.25)), VerbsLife(), Console()
    run_once(campaign, life, console, medium, clock)
    assert medium.armed is None and not life.cut and not life.is_over
    campaign.hear(prepared(1), life, console)
    assert medium.armed == (0.25, Span(3, 50)) and life.cut
    assert console.sent == ["go", "go"]
    assert [left.has_returned for left in life.left] == [True, False]


def test_a_verb_that_returns_before_the_power_goes_is_cut_then(medium: Armed, clock: list[float]) -> None:
    campaign, life, console = campaign_on(medium, Cut("export", 0.99)), VerbsLife(), Console()
    run_once(campaign, life, console, medium, clock)
    campaign.hear(prepared(1), life, console)
    campaign.hear("returned 1-export", life, console)
    assert life.is_over
    assert [left.has_returned for left in life.left] == [True, True]


def test_how_much_faster_the_second_time_is_is_known_from_a_life_before(medium: Armed, clock: list[float]) -> None:
    campaign, console = campaign_on(medium, Cut("export", 1.05)), Console()
    life = VerbsLife()
    run_once(campaign, life, console, medium, clock)
    campaign.hear(prepared(1), life, console)
    clock[0] += 1.5
    campaign.hear("returned 1-export", life, console)
    campaign._cut, life = Cut("export", 0.5), VerbsLife()
    run_once(campaign, life, console, medium, clock)
    campaign.hear(prepared(1), life, console)
    assert medium.armed == (0.5, Span(1.5, 50))


def test_a_share_beyond_the_end_waits_for_the_return(medium: Armed, clock: list[float]) -> None:
    campaign, life, console = campaign_on(medium, Cut("export", 1.05)), VerbsLife(), Console()
    run_once(campaign, life, console, medium, clock)
    campaign.hear(prepared(1), life, console)
    assert medium.armed is None and not life.cut


def test_what_is_forgotten_is_what_the_verb_that_is_cut_wrote(medium: Armed, clock: list[float]) -> None:
    campaign, life, console = campaign_on(medium, Cut("export", 0.5), forgetful=True), VerbsLife(), Console()
    run_once(campaign, life, console, medium, clock)
    assert not medium.is_forgotten
    campaign.hear(prepared(1), life, console)
    assert medium.is_forgotten


def test_the_next_life_is_told_what_is_left_and_what_had_returned(medium: Armed) -> None:
    left = [Left("0-export", "export", "as they were", has_returned=True), Left("1-export", "export", "as they were")]
    job = campaign_on(medium, Cut("repair", 0.5), left)._job()
    assert job["verbs"] == ["repair", "repair"]
    assert [(part["root"], part["has_returned"]) for part in job["left"]] == [("0-export", True), ("1-export", False)]
    assert campaign_on(medium, None, left)._job()["verbs"] == []


@pytest.mark.parametrize(
    ("has_returned", "found", "outcome"),
    [(True, True, "had returned"), (False, True, "made it"), (False, False, "ran again")],
)
def test_a_judgement_says_where_the_cut_found_the_verb(
    medium: Armed, has_returned: bool, found: bool, outcome: str
) -> None:
    campaign = campaign_on(medium, None, [Left("1-export", "export", None, has_returned)])
    life = VerbsLife()
    campaign.hear("judging 1-export", life, Console())
    assert "export" in life.doing
    campaign.hear(
        f"judged {json.dumps({'root': '1-export', 'found': found, 'pools': ['in place, power']})}", life, Console()
    )
    campaign._judged = campaign._left
    assert campaign.outcome(life) == outcome


def test_a_pool_that_promises_nothing_for_a_power_cut_fails_the_campaign(medium: Armed) -> None:
    campaign = campaign_on(medium, None, [Left("1-export", "export", None)])
    with pytest.raises(CampaignFailed, match="process"):
        campaign.hear(
            f"judged {json.dumps({'root': '1-export', 'found': True, 'pools': ['in place, process']})}",
            VerbsLife(),
            Console(),
        )


def test_what_the_guest_says_to_have_failed_after_it_mounted_fails_the_campaign(medium: Armed) -> None:
    campaign, life = campaign_on(medium), VerbsLife()
    with pytest.raises(MachineStopped):
        campaign._hear_of_the_machine("failed OSError: no device", life, Console())
    campaign._hear_of_the_machine("mounting", life, Console())
    with pytest.raises(CampaignFailed, match="AssertionError"):
        campaign._hear_of_the_machine("failed AssertionError: it is damaged", life, Console())


def test_silence_is_the_guests_own_trouble_before_it_mounts_and_a_failure_afterwards(
    medium: Armed, clock: list[float]
) -> None:
    campaign, life, console = campaign_on(medium), VerbsLife(), Console(is_silent=True)
    campaign._heard, campaign._patience = clock[0], 600.0
    assert campaign._listen(console, life, 1.0) is None
    clock[0] += 150
    with pytest.raises(MachineStopped):
        campaign._listen(console, life, 1.0)
    campaign._hear_of_the_machine("mounting", life, console)
    assert campaign._listen(console, life, 1.0) is None
    clock[0] += 600
    with pytest.raises(CampaignFailed):
        campaign._listen(console, life, 1.0)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[CxlMemory]:
    directory = tmp_path / "device"
    directory.mkdir()
    yield CxlMemory(directory)
    shutil.rmtree(directory)


def test_a_device_that_forgets_is_as_it_was_when_that_began(device: CxlMemory) -> None:
    with device.plugged() as plugged, plugged.cxl_memory.open("r+b") as stored:
        stored.write(b"kept")
        stored.flush()
        device.forget_from_now_on()
        stored.write(b"lost")
    assert device.lose(random.Random(1)) != ""
    assert plugged.cxl_memory.read_bytes()[:8] == b"kept\0\0\0\0"
    with device.plugged() as plugged, plugged.cxl_memory.open("r+b") as stored:
        stored.write(b"KEPT")
    assert device.lose(random.Random(1)) == ""
    assert plugged.cxl_memory.read_bytes()[:8] == b"KEPT\0\0\0\0"
