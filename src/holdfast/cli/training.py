"""``holdfast train`` and ``holdfast eval``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import ConfigArgument, PoolOption, SetOption, read_run
from holdfast.cli.stop_signals import StopSignals
from holdfast.errors import PoolError

if TYPE_CHECKING:
    from holdfast import _core
    from holdfast.data import Source
    from holdfast.pools.pool import Pool
    from holdfast.run.sections import RunConfig
    from holdfast.train.metrics import Evaluation
    from holdfast.train.trainer import Trainer


class Recovery(StrEnum):
    """How a pool that was not closed cleanly is recovered."""

    exact = "exact"
    relaxed = "relaxed"


class OnBadRow(StrEnum):
    """What becomes of a malformed line."""

    error = "error"
    skip = "skip"


def train(
    config_paths: ConfigArgument,
    pool: PoolOption,
    overrides: SetOption = None,
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="Train up to this step, counted from the pool's first. Default: train.steps."),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Append one JSON object a step; the last holds AUC and log-loss."),
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Write scalars for TensorBoard.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write when each verb of each step ran, for ui.perfetto.dev or chrome://tracing. As with --metrics, a "
            "run that goes on appends to the file, and a new pool keeps an older file as FILE.json.1.",
        ),
    ] = None,
    recovery: Annotated[
        Recovery,
        typer.Option(
            help="After a crash: exact goes back to the newest complete state; relaxed keeps the newest rows beside an "
            "older dense part (of pool.dense_interval steps at most)."
        ),
    ] = Recovery.exact,
    on_bad_row: Annotated[
        OnBadRow | None, typer.Option(help="A malformed line of a Criteo file: stop, or count and skip it.")
    ] = None,
    trust_after_reboot: Annotated[
        bool,
        typer.Option(
            "--trust-after-reboot",
            help="Open a pool that was in use when the machine went down, although its medium does not survive that.",
        ),
    ] = False,
    memory_ranks: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="K",
            help="Under torchrun: the last K ranks own all rows, look them up and update them, and train nothing; the "
            "others hold none. 0: every rank trains and owns a share of the rows.",
        ),
    ] = 0,
    memory_ranks_at: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Where memory ranks run by themselves (holdfast serve), in their order: all ranks of torchrun train, "
            "or this process alone does.",
        ),
    ] = None,
) -> None:
    """Train; makes the pool, or goes on where it is.

    Several processes train one pool with PyTorch's launcher: torchrun --nproc-per-node 4 -m holdfast train CONFIG.toml
    --pool DIR. Such a pool is cut into shards, and can be opened with another number of ranks later, or with one.

    Stop it with Ctrl-C or SIGTERM (the step is finished and made durable), or kill it: the same command goes on, and
    ends with the same bits as a run that was never stopped.

    What may change from one start to the next: learning rates and other hyperparameters of the optimizers (applied
    from the next step on), steps and epochs, workers, evaluation, validation data. Anything else is refused by name.
    """
    from holdfast.cli.groups import end_steps, is_of_group, open_in_group
    from holdfast.run.assembly import open_trainer
    from holdfast.run.sources import open_validation
    from holdfast.state.reproducibility import keep_freed_memory

    keep_freed_memory()
    config = read_run(config_paths, overrides)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    if on_bad_row is not None:
        config = _with_bad_rows(config, on_bad_row)
    validation = open_validation(config)
    addresses = memory_ranks_at.split(",") if memory_ranks_at else []
    if addresses and memory_ranks:
        raise typer.BadParameter("it starts them with the trainers: leave it out", param_hint="--memory-ranks")
    opened: Trainer
    with StopSignals() as stop:
        if is_of_group(pool, addresses):
            opened = open_in_group(
                config,
                pool,
                stop,
                memory_ranks,
                addresses,
                recovery=recovery.value,
                trust_after_reboot=trust_after_reboot,
            )
        elif memory_ranks:
            raise typer.BadParameter("it takes several ranks: start them with torchrun", param_hint="--memory-ranks")
        else:
            opened = open_trainer(
                config, pool, recovery=recovery.value, trust_after_reboot=trust_after_reboot, stopping=stop.is_wanted
            )
        with opened as trainer, stop.calling(lambda: end_steps(trainer.pool)):
            if trainer.speaks:
                print("\n".join(_words_at_start(trainer)), flush=True)  # noqa: T201
            result = _train(trainer, validation, metrics=metrics, tensorboard=tensorboard, trace=trace)
            step = trainer.pool.step
    if trainer.stopped:
        number = stop.number or signal.SIGTERM  # where another rank was asked
        if trainer.speaks:
            stopped = f"{signal.Signals(number).name}: step {step} is finished and durable"
            with suppress(BrokenPipeError):  # Ctrl-C ends a `tee`, too
                print(f"{stopped}; run the same command to go on", flush=True)  # noqa: T201
        raise typer.Exit(128 + number)
    if not trainer.speaks:
        return
    if result is None:
        print(f"trained to step {step}; no [validation] data to evaluate on")  # noqa: T201
    else:
        print(f"trained to step {step}: AUC {result.auc:.5f}, log-loss {result.log_loss:.5f}")  # noqa: T201


def evaluate(config_paths: ConfigArgument, pool: PoolOption, overrides: SetOption = None) -> None:
    """AUC and log-loss of a pool's model on the validation data.

    Changes nothing, and needs no lock: while a run is at work, or was killed and nobody opened its pool since, rows are
    as they are at that instant, some of them of the step in flight. Of exactly one step is a copy: holdfast snapshot,
    and restore.
    """
    from holdfast.errors import ConfigError
    from holdfast.run.assembly import evaluate_pool
    from holdfast.run.sources import open_validation
    from holdfast.train.observe import counting

    config = read_run(config_paths, overrides)
    validation = open_validation(config)
    if validation is None:
        raise ConfigError(f"{config_paths[0]}: there is no [validation] to evaluate on")
    with counting("evaluating", validation.num_samples) as on_batch:
        step, result = evaluate_pool(config, pool, validation, on_batch)
    print(f"step {step}: AUC {result.auc:.5f}, log-loss {result.log_loss:.5f}")  # noqa: T201


def _words_at_start(trainer: Trainer) -> Iterator[str]:
    yield describe_start(trainer)
    for advise in (_advise_on_batch, advise_on_lanes):
        if (advice := advise(trainer)) is not None:
            yield f"{trainer.pool.directory}: {advice}"
    bad_rows = getattr(trainer.loader.source, "bad_rows", None)
    if bad_rows is not None and bad_rows.count:
        yield f"{trainer.pool.directory}: {bad_rows.summary()}"


def _on_which_data(trainer: Trainer) -> str:
    origin = trainer.loader.origin
    return f", on data that begin after sample {origin}" if origin else ""


def describe_start(trainer: Trainer) -> str:
    """What opening the pool found and did, in one line."""
    pool = trainer.pool
    where = f", {trainer.description}" if trainer.description else ""
    if pool.is_new:
        return (
            f"{pool.directory}: new pool on {pool.description}; training starts at step 1 of {trainer.last_step}{where}"
        )
    goes_on = (
        f"training goes on at step {pool.step + 1} of {trainer.last_step}{_on_which_data(trainer)}{where}"
        if pool.step < trainer.last_step
        else f"nothing is left to train up to step {trainer.last_step}"
    )
    return f"{pool.directory}: {describe_opening(pool)}; {goes_on}"


def _advise_on_batch(trainer: Trainer) -> str | None:
    """That each step goes over all of the data more than once, and what would change it; None where it does not."""
    batch, samples = trainer.config.batch_size, trainer.loader.source.num_samples
    if batch <= samples or trainer.pool.step >= trainer.last_step:
        return None
    return (
        f"each batch of {batch:,} goes over the {samples:,} samples that there are {batch / samples:.3g} times: all "
        "batches are of one size, whatever train.epochs is; make train.batch_size smaller"
    )


_FEWEST_LANES = 8  # that are worth naming: the next numbers of trainers divide it, too
_FEW_BLOCKS = 5  # for each lane, in one or two of which it ends: of fewer, these are many


def advise_on_lanes(trainer: Trainer) -> str | None:
    """What the trainers of a group decode more than they need of files, and what would change it; None: nothing."""
    from holdfast.data import SyntheticSource

    source, lanes, trainers = trainer.loader.source, trainer.config.lanes, trainer.pool.part[1]
    if trainers == 1 or not trainer.config.shuffle or isinstance(source, SyntheticSource):
        return None
    good = trainers * -(-_FEWEST_LANES // trainers)
    if lanes == 1:
        where = "with new data, or in a new pool,"
        return f"every trainer decodes the whole stream; [train] lanes = {good} {where} divides it among them"
    if lanes % trainers:
        return (
            f"[train] lanes = {lanes} is no multiple of the {trainers} trainers, so each decodes more than its share; "
            f"{good} with new data, or in a new pool, would be one"
        )
    if len(source.block_sizes) < _FEW_BLOCKS * lanes:
        return (
            f"the data are only {len(source.block_sizes)} blocks (row groups), for {lanes} lanes: trainers decode more "
            f"than their share, because lanes end within blocks; {_FEW_BLOCKS * lanes} smaller ones would divide well"
        )
    return None


def describe_opening(pool: Pool) -> str:
    if isinstance(pool.recovered, str):
        return pool.recovered
    return describe_recovery(pool.recovered)


def describe_recovery(report: _core.RecoveryReport) -> str:
    took = f"in {report.seconds * 1e3:.1f} ms"
    if report.clean:
        return f"closed cleanly at step {report.step}, opened {took}"
    durable = report.step if report.dense_step is None else report.dense_step
    steps_back = report.rows_step - report.step
    what = "1 step" if steps_back == 1 else f"{steps_back} steps"
    in_flight = "" if report.records_undone <= steps_back else " and what was in flight"
    if durable < report.step:
        what += f", kept the rows of step {report.step} beside the dense state of step {durable} (relaxed)"
    return (
        f"not closed cleanly: last durable step {durable}, rolled back {what}{in_flight} "
        f"({report.rows_restored:,} rows) {took}"
    )


def _train(
    trainer: Trainer,
    validation: Source | None,
    *,
    metrics: Path | None,
    tensorboard: Path | None,
    trace: Path | None,
) -> Evaluation | None:
    """Steps until the last or a signal; then everything is durable, and evaluated unless it was a signal."""
    from holdfast.data.source import check_columns
    from holdfast.state.generators import rng_state, set_rng_state
    from holdfast.train.evaluation import EvaluationStopped

    check_columns(validation, trainer.loader.source)  # not only when training is over
    first_step = trainer.pool.step
    random_numbers = rng_state()
    # Rich draws from Python's generator when it is imported, and who knows what TensorBoard does.
    from holdfast.train.observe import Display, MetricsFile, Observer, Observers, TensorBoard
    from holdfast.train.trace import TraceFile

    observers: list[Observer] = []
    display = None
    if trainer.speaks:
        if metrics is not None:
            observers.append(MetricsFile(metrics, resumed_step=first_step, is_new=trainer.pool.is_new))
        if tensorboard is not None:
            observers.append(TensorBoard(tensorboard, resumed_step=first_step))
        if trace is not None:
            observers.append(TraceFile(trace, resumed_step=first_step, is_new=trainer.pool.is_new))
        display = Display(first_step=first_step, last_step=trainer.last_step)
        observers.append(display)
    set_rng_state(random_numbers)
    result = None

    def evaluate(source: Source, *, is_end: bool) -> Evaluation | None:
        began = time.perf_counter()
        evaluation = trainer.evaluate(source)
        if evaluation is not None:
            watch.evaluation(trainer.pool.step, evaluation, began=began, is_end=is_end)
        return evaluation

    with Observers(observers) as watch:
        every = trainer.config.eval_every
        try:
            for report in trainer.steps():
                with _between_steps(trainer):
                    watch.step(report)
                    is_between = report.step < trainer.last_step and not trainer.stopped
                    if every and report.step % every == 0 and is_between and validation is not None:
                        evaluate(validation, is_end=False)
            trainer.flush()
            if not trainer.stopped and validation is not None:
                if display is not None:
                    display.pause("evaluating")
                result = evaluate(validation, is_end=True)
        except EvaluationStopped:
            trainer.stopped = True
            trainer.flush()
    return result


@contextmanager
def _between_steps(trainer: Trainer) -> Iterator[None]:
    """Whatever fails here, a full disk under the trace or bad validation data, costs no step: the dense state of the
    newest one is written first, whatever the dense interval. (But in a group, where the others do not know.)"""
    from holdfast.train.evaluation import EvaluationStopped

    try:
        yield
    except EvaluationStopped:
        raise
    except BaseException:
        with suppress(PoolError):
            if trainer.can_flush_alone:
                trainer.flush()
        raise


def _with_bad_rows(config: RunConfig, on_bad_row: OnBadRow) -> RunConfig:
    if config.data.criteo is None:
        raise typer.BadParameter("only [data.criteo] has lines that may be malformed", param_hint="--on-bad-row")
    criteo = replace(config.data.criteo, on_bad_row=on_bad_row.value)
    return replace(config, data=replace(config.data, criteo=criteo))
