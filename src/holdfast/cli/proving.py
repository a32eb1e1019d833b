"""``holdfast prove``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from holdfast.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.progress import Progress

_NOT_PROVEN, _NO_VERDICT = 1, 2


def prove(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="What starts the training, as you type it. {run} in it stands for a folder of the run's own, for what "
            "the script writes beside its pool.",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run; a script may end before that.")] = 50,
    runs: Annotated[int, typer.Option(min=1, help="Runs that nobody disturbs.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs altogether, in further runs.")] = 20,
    kills_per_run: Annotated[int, typer.Option(min=1, help="How often one run is killed and started again.")] = 4,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Runs at once. Default: cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of the kills: when and how.")] = 0,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds without a new step that count as hanging.")] = 300.0,
    pools: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the runs' pools go. Default: beside the directory that the script names, on the same medium.",
        ),
    ] = None,
    values_mb: Annotated[
        int, typer.Option(min=0, help="Of tensors that a run keeps on disk, to say how far two are apart.")
    ] = 256,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.json", help="Write the verdict there, too.")
    ] = None,
    as_json: JsonOption = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs' records and outputs, and say where.")] = False,
) -> None:
    """Check on your own script that a killed and resumed run ends with the same bits.

    holdfast prove -- python my_training.py --lr 0.1

    The script needs no change, only what training on holdfast needs anyway: it opens a holdfast.Pool, makes a
    Checkpoint, calls resume() before its loop and commit() at the end of every step. It runs in fresh processes, some
    to the end, some killed with SIGKILL at random moments (inside a step, a commit, an opening) and started again.
    After every step the state is compared: rows, parameters, optimizers, schedulers, random numbers, position in the
    data.

    Where runs differ, the verdict names the first step, what of the state differs there, by name and by how much, and
    variables of the script that a Checkpoint should have had. "NOT DETERMINISTIC" is a difference between runs that
    nobody killed.

    Your pools are not touched: every run gets an empty one, which is removed afterwards. Other files that the
    script writes, every run writes: put them into {run}.

    Exit status: 0 same bits, 1 they differ or a resume failed, 2 no verdict (the script does not run, or cannot be
    compared).
    """
    from holdfast.proving.campaign import Plan
    from holdfast.proving.campaign import prove as prove_all
    from holdfast.proving.life import CannotProve
    from holdfast.proving.verdict import report, verdict

    if pools is not None:
        pools.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        command=command,
        # As it was before this command prepared it: what a script needs in its environment is for its user to set.
        environment=context.obj if isinstance(context.obj, dict) else os.environ,
        steps=steps,
        runs=runs,
        kills=kills,
        kills_per_run=kills_per_run,
        jobs=jobs or len(os.sched_getaffinity(0)),
        seed=seed,
        timeout=timeout,
        pools=pools,
        values_bytes=values_mb << 20,
    )
    scratch = Path(tempfile.mkdtemp(prefix=f"holdfast-prove-{os.getpid()}-"))
    try:
        with _terminable(), _shown(kills) as progress:
            proof = prove_all(plan, scratch, progress)
    except CannotProve as error:
        print(f"holdfast: no verdict on {shlex.join(command)}: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(_NO_VERDICT) from None
    finally:
        if keep:
            print(f"records and outputs of the runs are in {scratch}", file=sys.stderr)  # noqa: T201
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    plain = json.dumps(report(proof), indent=2)
    if out is not None:
        out.write_text(plain + "\n")
    print(plain if as_json else "\n".join(verdict(proof)))  # noqa: T201
    if not proof.holds:
        raise typer.Exit(_NOT_PROVEN)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the proof as Ctrl-C does, with everything cleaned up."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown(kills: int) -> Iterator[_Shown]:
    """A progress bar on standard error, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("proving"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _Shown(bar, kills)


class _Shown:
    """See campaign.Progress."""

    def __init__(self, bar: Progress, kills: int) -> None:
        self._bar = bar
        self._lock = threading.Lock()
        self._kills = kills
        self._total_steps = self._runs = self._done_runs = self._done_kills = 0
        self._task = bar.add_task("", total=None, shown="starting")

    def started(self, runs: int, steps: int) -> None:
        with self._lock:
            self._runs += runs
            self._total_steps += steps
            self._show()

    def advanced(self, steps: int) -> None:
        with self._lock:
            self._show(steps)

    def killed(self) -> None:
        with self._lock:
            self._done_kills += 1
            self._show()

    def finished(self, run: int) -> None:
        with self._lock:
            self._done_runs += 1
            self._show()

    def _show(self, steps: int = 0) -> None:
        shown = f"{self._done_runs}/{self._runs} runs · {self._done_kills}/{self._kills} kills"
        self._bar.update(self._task, advance=steps, total=self._total_steps, shown=shown)
