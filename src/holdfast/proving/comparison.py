"""Where a run parts from the first one: the first step, and what of its state differs there.

A run is compared step by step, in the order in which it did them. Steps that are done again after a kill count again,
and so does the state as it was loaded: it must be what the reference had at that step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.proving.record import OUTSIDE, PARTS, KillKind, Leaf, LifeRecord, Observed, values_file

_DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "uint8": np.uint8,
    "bool": np.bool_,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What all processes of one run told. folder: where the tensors are that they kept. difference: that ended it."""

    number: int
    folder: Path
    lives: Sequence[LifeRecord]
    kills: Sequence[KillKind] = ()
    difference: Difference | None = None

    @property
    def last_step(self) -> int:
        return int(self.end["step"])

    def draws_nothing(self, leaf: Leaf | None) -> bool:
        """Whether it is a generator at which the run has never drawn: without a seed it is another in every run, and
        that does no harm."""
        start = next((life.start for life in reversed(self.lives) if life.resumed == 0), {})
        return leaf is not None and leaf.part == "random numbers" and start.get(leaf.key) == leaf.digest

    @property
    def end(self) -> dict[str, Any]:
        """What its last process told of the pool that it left."""
        found = self.lives[-1].ended
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """One tensor or value. words: both values, or how far they are apart."""

    part: str
    name: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where `run` parts from the reference. resumed_at: the step at which the process that did it had gone on; None
    where nothing was killed before. loaded: it differs as it was loaded, before any step. leaves: in PARTS' order.
    outside: names and kinds of the script's own variables that differ there, the likeliest first."""

    run: int
    step: int
    resumed_at: int | None
    loaded: bool
    leaves: list[LeafDifference]
    outside: list[tuple[str, str]] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        return [part for part in PARTS if any(leaf.part == part for leaf in self.leaves)]


class Reference:
    """The run that others are compared with."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._seen = {(seen.step, seen.resumed): seen for life in run.lives for seen in life.steps}

    def first_difference(self, run: Run) -> Difference | None:
        """None where every step and the ends are alike."""
        for life in run.lives:
            if (found := self.difference_in(run, life)) is not None:
                return found
        return self.different_end(run)

    def difference_in(self, run: Run, life: LifeRecord) -> Difference | None:
        """Where a process of `run` parts, as far as it came."""
        for seen in life.steps:
            # What was loaded is compared with what there was at that step, rows and cursor apart.
            against = self._seen.get((seen.step, seen.resumed and seen.step == 0))
            if against is None:
                words = f"run 1 ended at step {self.run.last_step}, run {run.number} went on"
                leaves = [LeafDifference("cursor", "number of steps", words)]
                return Difference(
                    run=run.number, step=seen.step, resumed_at=_went_on(life), loaded=False, leaves=leaves
                )
            if pairs := self._differing(against, seen, run):
                return Difference(
                    run=run.number,
                    step=seen.step,
                    resumed_at=_went_on(life),
                    loaded=seen.resumed,
                    leaves=[_describe(self.run, against, run, seen, *pair) for pair in pairs],
                    outside=_suspects(against, seen, life.steps[0]),
                )
        return None

    def _differing(self, against: Observed, seen: Observed, run: Run) -> list[tuple[Leaf | None, Leaf | None]]:
        """Pairs of what differs in the state, in PARTS' order."""
        left_out = {OUTSIDE}
        if seen.resumed or against.resumed:  # the script puts plain values back after that, if it wants them
            left_out |= {"rows", "batch", "cursor", "plain values"}
        keys = [key for key in dict.fromkeys((*against.leaves, *seen.leaves)) if key[0] not in left_out]
        pairs = [(against.leaves.get(key), seen.leaves.get(key)) for key in keys]
        found = [(a, b) for a, b in pairs if a is None or b is None or a.digest != b.digest]
        found = [(a, b) for a, b in found if not (self.run.draws_nothing(a) and run.draws_nothing(b))]
        return sorted(found, key=lambda pair: PARTS.index((pair[0] or pair[1]).part))  # type: ignore[union-attr]

    def different_end(self, run: Run) -> Difference | None:
        """Every step is alike, and so the dense state; of the rows only those were compared that steps touched, without
        their optimizer state."""
        ours, theirs = run.end, self.run.end
        leaves = [
            LeafDifference("cursor", name, f"{theirs[name]} in run 1, {ours[name]} in run {run.number}")
            for name in ("step", "cursor", "row_updates")
            if ours[name] != theirs[name]
        ]
        words = "another digest: optimizer state of rows, or rows that the last steps did not touch"
        leaves += [
            LeafDifference("rows", f"table '{table}'", words)
            for table, digest in ours["tables"].items()
            if theirs["tables"].get(table) != digest
        ]
        if not leaves:
            return None
        return Difference(
            run=run.number, step=run.last_step, resumed_at=_went_on(run.lives[-1]), loaded=False, leaves=leaves
        )


def went_back_below(run: Run) -> tuple[int, int] | None:
    """(durable, resumed): where a resume went below a step that the process before had called durable."""
    for before, after in itertools.pairwise(run.lives):
        if after.resumed is not None and after.resumed < before.durable:
            return before.durable, after.resumed
    return None


def _went_on(life: LifeRecord) -> int | None:
    return life.resumed if life.life > 1 else None


def _suspects(against: Observed, seen: Observed, before_loop: Observed) -> list[tuple[str, str]]:
    """Variables outside of the Checkpoint that differ; the kinds that most often are a cause come first. What a step
    makes anew is a consequence: it is left out where one differs that was there before the loop."""
    ranks = ("generator", "optimizer", "scheduler", "tensor", "number", "array")
    found = []
    for key, leaf in seen.leaves.items():
        before = against.leaves.get(key)
        if key[0] == OUTSIDE and (before is None or before.digest != leaf.digest):
            kind = leaf.words
            rank = next((i for i, word in enumerate(ranks) if word in kind.lower()), len(ranks))
            found.append((rank, leaf.name, kind))
    lasting = [item for item in found if (OUTSIDE, item[1]) in before_loop.leaves]
    return [(name, kind) for _, name, kind in sorted(lasting or found, key=lambda item: item[0])]


def _describe(
    reference: Run, against: Observed, run: Run, seen: Observed, a: Leaf | None, b: Leaf | None
) -> LeafDifference:
    leaf = a or b
    assert leaf is not None
    if a is None or b is None:
        words = "only in run 1" if b is None else f"not in run 1, only in run {run.number}"
    elif a.words != b.words or a.num_bytes == 0:
        words = f"{a.words} in run 1, {b.words} in run {run.number}" if a.words != b.words else "differs"
    else:
        words = _distance(_values(reference, against, a), _values(run, seen, b))
    return LeafDifference(leaf.part, leaf.name, words)


def _values(run: Run, seen: Observed, leaf: Leaf) -> NDArray[np.generic] | None:
    name = leaf.words.partition(" ")[0]
    if leaf.offset < 0 or name not in (*_DTYPES, "bfloat16"):
        return None
    with values_file(run.folder, seen.life).open("rb") as file:
        file.seek(leaf.offset)
        data = file.read(leaf.num_bytes)
    if len(data) != leaf.num_bytes:
        return None
    if name == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _DTYPES[name])


def _distance(a: NDArray[np.generic] | None, b: NDArray[np.generic] | None) -> str:
    if a is None or b is None:
        return "differs; too large for its values to be kept (--values-mb)"
    differs = a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")
    count = f"{int(differs.sum()):,} of {a.size:,} elements differ"
    if a.dtype.kind != "f":
        return count
    with np.errstate(all="ignore"):
        most = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    return f"{count}, by up to {most:.3g}"
