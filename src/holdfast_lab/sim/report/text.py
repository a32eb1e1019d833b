"""A timeline in letters, for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from holdfast_lab.sim.report.content import Bar, Timeline

_WIDTH = 72  # characters of the time shown


def stage_letters(stages: Sequence[str]) -> dict[str, str]:
    """A capital for each stage, in order; a star for those beyond the alphabet."""
    return {stage: ascii_uppercase[n] if n < len(ascii_uppercase) else "*" for n, stage in enumerate(stages)}


def timeline_lines(timeline: Timeline, letters: dict[str, str], until_ms: float) -> list[str]:
    """A line for each lane: capitals are stages of the first batch shown, small letters of those before and after.
    Of a cell's time most belongs to its stage, but every stage has one cell at least."""
    width = max(map(len, timeline.lanes), default=0)
    lines = [f"{'':{width}}  0 ms{until_ms:>{_WIDTH - 7}.2f} ms"]
    for lane in timeline.lanes:
        bars = [bar for bar in timeline.bars if bar.lane == lane]
        cells = _cells(bars, letters, until_ms)
        lines.append(f"{lane:{width}}  {cells}")
    return lines


def _cells(bars: Sequence[Bar], letters: dict[str, str], until_ms: float) -> str:
    cell_ms = until_ms / _WIDTH
    cells = ["·"] * _WIDTH
    for bar in sorted(bars, key=lambda bar: bar.begin_ms - bar.end_ms):  # the shortest last, over the others
        letter = letters[bar.stage] if bar.batch == 0 else letters[bar.stage].lower()
        first = min(_WIDTH - 1, round(bar.begin_ms / cell_ms))
        last = min(_WIDTH, max(first + 1, round(bar.end_ms / cell_ms)))
        cells[first:last] = letter * (last - first)
    return "".join(cells)
