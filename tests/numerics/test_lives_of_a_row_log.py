"""Whatever happens to a pool with a row log, it ends with the bits of rows in place that were never interrupted.

hypothesis draws lives: steps, forwards that are thrown away, evaluations, flushes, crashes between and within steps,
and clean ends; each new life with another scratchpad, window, dense interval and number of threads. The model is the
same steps in place, in one go.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from left_behind import left_behind

from small_runs import Run, Step, Training, Way, digest, train

# What step n of every life does.
SCRIPT = tuple(
    Step(micro_batches=1 + (n % 5 == 4), thrown_away=n % 7 == 3, evaluates=n % 6 == 1, updates=n % 8 != 6)
    for n in range(120)
)
LIVES = st.lists(
    st.tuples(
        st.builds(
            Way,
            scratchpad_bytes=st.sampled_from([60_000, 90_000, 1 << 20]),
            window=st.sampled_from([0, 1, 2, 5, 20]),
            num_threads=st.integers(1, 2),
            dense_interval=st.integers(1, 6),
        ),
        st.lists(
            st.sampled_from([*["step"] * 7, "throw away", "evaluate", "flush"]),
            max_size=25,
        ),
        st.sampled_from(["crash", "crash in a step", "close"]),
    ),
    min_size=1,
    max_size=4,
)


def live(directory: Path, way: Way, events: list[str], end: str, after: Path) -> Path:
    """One life of the pool in `directory`; returns where the next one goes on."""
    with Training(directory, RUN, way) as training:
        for number, event in enumerate(events):
            match event:
                case "step":
                    training.step(SCRIPT[training.pool.step])
                case "throw away":
                    training.throw_away(30_000 + number)
                case "evaluate":
                    training.evaluate(30_000 + number)
                case "flush":
                    training.pool.flush()
        if end == "close":
            training.checkpoint.flush()
            return directory
        training.pool.flush()
        if end == "crash in a step":
            training.begin_step(SCRIPT[training.pool.step])
        return left_behind(directory, after)


RUN = Run(steps=SCRIPT)


@given(lives=LIVES)
@settings(derandomize=True, database=None, max_examples=25)
def test_every_life_goes_on_from_the_one_before(new_root: Callable[[], Path], lives: list[tuple[Way, list[str], str]]):
    root = new_root()
    pool = root / "0"
    for number, (way, events, end) in enumerate(lives, 1):
        pool = live(pool, way, events, end, root / str(number))
    with Training(pool, RUN, Way()) as training:
        training.step(SCRIPT[training.pool.step])
        steps = training.pool.step
        training.checkpoint.flush()
    whole = train(root / "whole", Run(steps=SCRIPT[:steps]), Way(medium="memory"))
    assert digest(pool) == whole.digest
    shutil.rmtree(root)
