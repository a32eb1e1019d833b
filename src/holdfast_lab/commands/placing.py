"""``holdfast profile``, ``plan`` and ``tiers probe``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import ConfigArgument, JsonOption, OverwriteOption, SetOption, add_command, read_run
from holdfast.cli.tables import plain_console

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast_lab.placement.plan import Plan, TierUse
    from holdfast_lab.placement.probe import Probe
    from holdfast_lab.placement.settings import PoolSettings
    from holdfast_lab.placement.step_plan import Passes
    from holdfast_lab.placement.step_time import StepTime

tiers_app = typer.Typer(no_args_is_help=True, help="The memory tiers of this machine.")


def profile(
    config_paths: ConfigArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="PROFILE.json", help="The file to write.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Batches to count. Default: one epoch.")] = None,
    memory_bytes: Annotated[
        int, typer.Option(min=1 << 20, help="For counters; tables that are too large for exact ones get a sketch.")
    ] = 1 << 30,
    overrides: SetOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Count how often training asks for which rows: one pass over the ids (two where they are keys), no pool, no model.

    Gives for every table the accesses, the different rows a batch touches, and both for the hottest rows, from which
    `holdfast plan` decides what lives where.
    """
    from holdfast.data.output import check_output
    from holdfast.run.sources import open_source
    from holdfast.train.observe import counting
    from holdfast_lab.placement.access_profile import (
        batches_per_epoch,
        num_passes,
        profile_accesses,
        write_profile,
    )

    config = read_run(config_paths, overrides)
    check_output(out, overwrite=overwrite, inputs=config_paths)
    source = open_source(config.data)
    num_batches = steps if steps is not None else batches_per_epoch(source, config.train)
    with counting("profiling", num_batches * num_passes(source)) as on_batch:
        found = profile_accesses(
            source, config.train, num_batches=num_batches, memory_bytes=memory_bytes, on_batch=on_batch
        )
    write_profile(found, out, overwrite=overwrite)
    accesses = sum(table.accesses for table in found.tables)
    print(f"{out}: {accesses:,} accesses in {found.batches:,} batches of {found.batch_size:,}")  # noqa: T201
    for table in found.tables:
        if table.method == "sketch":
            print(  # noqa: T201
                f"  {table.name}: counted by a sketch, each row at most {table.max_undercount_per_row:,} of "
                f"{table.accesses:,} accesses too low"
            )


def plan(
    config_paths: ConfigArgument,
    tiers_path: Annotated[Path, typer.Option("--tiers", metavar="TIERS.toml", help="The memory tiers of a node.")],
    profile_path: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE.json", help="What `holdfast profile` has counted.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=1e-6, help="What a step was measured to take; sets log bandwidth and drive writes per day."),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="POOL.toml",
            help="Write the pool's settings that the plan comes to: holdfast train CONFIG.toml POOL.toml --pool DIR.",
        ),
    ] = None,
    overrides: SetOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Does it fit? Which rows live in which tier, what that makes of a batch, and what it costs. Allocates no table.

    Solves a small integer program over tables and their hot and cold rows. Its time is what memory alone sets. Where
    TIERS.toml has a section host, as `holdfast tiers probe` writes it, the network is timed here for a few seconds,
    and a training step of a pool on the probed medium is predicted with all that limits it.

    On a disk it also comes to how large scratchpad and log should be, for the DRAM and the log's tier that there are,
    and --apply writes that down. The log has a tier of its own where one in TIERS.toml names a directory, as `holdfast
    tiers probe DIR --log LOG_DIR` has it.
    """
    from holdfast.data.output import check_output, whole_file
    from holdfast.errors import ConfigError
    from holdfast.files.config import to_plain
    from holdfast.run.sources import open_source
    from holdfast.state.reproducibility import keep_freed_memory
    from holdfast_lab.placement.access_profile import read_profile
    from holdfast_lab.placement.demand import demand_of
    from holdfast_lab.placement.plan import plan_placement
    from holdfast_lab.placement.settings import best_settings, settings_toml
    from holdfast_lab.placement.step_plan import passes_of, step_inputs
    from holdfast_lab.placement.step_time import predict_step
    from holdfast_lab.placement.tiers import read_tiers

    keep_freed_memory()  # as `holdfast train` does
    if apply is not None:
        read = [*config_paths, tiers_path, *([] if profile_path is None else [profile_path])]
        check_output(apply, overwrite=overwrite, inputs=read)
    config = read_run(config_paths, overrides)
    tiers = read_tiers(tiers_path)
    counted = None if profile_path is None else read_profile(profile_path)
    source = open_source(config.data)
    demand, basis = demand_of(config, source, counted)
    inputs = None if tiers.host is None else step_inputs(config, source, tiers, counted)
    step = None if inputs is None else predict_step(inputs)
    passes = None if inputs is None else passes_of(inputs, source.num_samples / config.train.batch_size)
    pace = step.ms if step_ms is None and step is not None else step_ms
    found = plan_placement(demand, tiers.tiers, batch_ms=pace)
    settings = None if inputs is None else best_settings(inputs, tiers.tiers)
    if apply is not None:
        if settings is None:
            raise ConfigError(
                f"{tiers_path}: --apply needs a tier of kind dram with room for some steps, and the costs of a log "
                "store: a [host] that `holdfast tiers probe` wrote of a directory on a disk"
            )
        with whole_file(apply, overwrite=overwrite) as partial:
            partial.write_text(settings_toml(settings, f"By `holdfast plan --tiers {tiers_path.name}`."), "utf-8")
    if as_json:
        plain = {"basis": basis, **to_plain(found), "step": None if step is None else to_plain(step)}
        plain["passes"] = None if passes is None else to_plain(passes)
        plain["pool"] = None if settings is None else to_plain(settings)
        print(json.dumps(plain, indent=2))  # noqa: T201
    else:
        _show(found, basis, "measured" if step_ms is not None else "that" if step is None else "the predicted step's")
        if step is not None:
            _show_step(step)
        if passes is not None:
            _show_passes(passes)
        if settings is not None:
            _show_settings(settings)


def probe(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory on the medium to measure.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="TIERS.toml", help="The file to write. Default: print it.")
    ] = None,
    dial: Annotated[
        str | None,
        typer.Option(
            metavar="MEDIUM",
            help="Measure the directory's medium under a dial, as pool.dial has it: pmem, cxl-dram, cxl-pmem, ssd, or "
            "a TOML file of its keys.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="LOG_DIR", help="A directory on another medium, which is to have the pool's log alone."),
    ] = None,
    log_dial: Annotated[
        str | None, typer.Option(metavar="MEDIUM", help="Measure that medium under a dial, as with --dial.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Measure this machine's DRAM, the medium of a directory, and what rows of a pool there cost, in half a minute.

    Writes at most 1 GiB and a quarter of the free space; nothing is left behind. On a machine that does other work
    meanwhile costs are overstated.
    """
    from holdfast.data.output import check_output, whole_file
    from holdfast.train.observe import counting
    from holdfast_lab.placement.probe import NUM_STEPS
    from holdfast_lab.placement.probe import probe as measure
    from holdfast_lab.placement.tiers import tiers_toml

    if out is not None:
        check_output(out, overwrite=overwrite)
    if dial is None:
        with counting("probing", NUM_STEPS) as on_step:
            found = measure(directory, on_step=on_step)
    else:
        found = _measure_dialled(directory, dial)
    if log is not None:
        found = _with_log_tier(found, log, log_dial)
    text = tiers_toml(found.tiers, found.notes, found.host)
    if out is None:
        sys.stdout.write(text)
        return
    with whole_file(out, overwrite=overwrite) as partial:
        partial.write_text(text, encoding="utf-8")
    for note in found.notes[1:]:
        print(note)  # noqa: T201
    for tier in found.tiers:
        rates = (
            f"{tier.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s read, {tier.write_bandwidth_bytes_per_s / 1e9:.1f} write"
        )
        print(  # noqa: T201
            f"{tier.name}: {rates}; {tier.random_reads_per_s or 0:,.0f} random reads/s; {tier.read_latency_ns:,.0f} ns"
        )
    print(f"{out}: {len(found.tiers)} tiers")  # noqa: T201


def _measure_dialled(directory: Path, dial: str) -> Probe:
    from holdfast.train.observe import counting
    from holdfast_lab.placement.dial_probe import NUM_STEPS, dial_of, probe_dialled
    from holdfast_lab.placement.probe import Probe

    declared = dial_of(dial)
    with counting("probing", NUM_STEPS) as on_step:
        found = probe_dialled(directory, declared, on_step=on_step)
    notes = [f"Measured by `holdfast tiers probe --dial {dial}`: a real medium, made as slow as {declared}."]
    notes += [str(figure) for figure in found.figures]
    return Probe((found.tier,), tuple(notes), None)


def _with_log_tier(found: Probe, log: Path, dial: str | None) -> Probe:
    from dataclasses import replace

    from holdfast.train.observe import counting
    from holdfast_lab.placement.probe import NUM_LOG_STEPS, Probe, probe_log_tier

    if dial is not None:
        of_log = _measure_dialled(log, dial)
        tier = replace(of_log.tiers[0], name=f"log-{of_log.tiers[0].name}", directory=log.absolute())
        return Probe((*found.tiers, tier), (*found.notes, *of_log.notes), found.host)
    with counting("probing the log's medium", NUM_LOG_STEPS) as on_step:
        of_log = probe_log_tier(log, on_step=on_step)
    return Probe((*found.tiers, *of_log.tiers), (*found.notes, *of_log.notes), found.host)


def _show_step(step: StepTime) -> None:
    parts = (
        f"network {step.network_ms:.1f}, rows {step.rows_ms:.1f}, displaced by other threads {step.displaced_ms:.1f}"
    )
    print(  # noqa: T201
        f"A step takes {step.ms:.1f} ms, limited by {step.limited_by}: compute {step.compute_ms:.1f} ms ({parts}), "
        f"loader {step.loader_ms:.1f}, disk {step.disk_ms:.1f}, victims {step.victims_ms:.1f}, log {step.log_ms:.1f}."
    )
    if (work := step.store_work) is not None:
        print(  # noqa: T201
            f"Of a step's rows {work.hit_rate:.1%} are in the scratchpad, {work.victim_rows:,.0f} are victims, "
            f"{work.missed_rows:,.0f} are fetched in {work.fetch_requests:,.0f} reads; {work.moved_rows:,.0f} are "
            f"merged in {work.merge_requests:,.0f}."
        )


def _show_settings(settings: PoolSettings) -> None:
    from holdfast.admin.inspection import size_words

    where = "" if settings.log_directory is None else f" in {settings.log_directory}"
    victims = ""
    if settings.victim_bytes:
        where_else = "" if settings.victim_directory is None else f" in {settings.victim_directory}"
        victims = f", a victim cache of {size_words(settings.victim_bytes)} on {settings.victim_tier}{where_else}"
    work = settings.step.store_work
    assert work is not None
    missed = work.victim_rows + work.missed_rows
    at_home = work.missed_rows - work.log_rows
    print(  # noqa: T201
        f"The pool to make: a scratchpad of {size_words(settings.scratchpad_bytes)}{victims} and a log of "
        f"{size_words(settings.log_bytes)} on {settings.log_tier}{where}: {settings.step.ms:.1f} ms a step, limited by "
        f"{settings.step.limited_by}. The scratchpad misses {missed:,.0f} rows a step: {work.victim_rows:,.0f} are "
        f"victims, {work.log_rows:,.0f} from the log, {at_home:,.0f} from home."
    )


def _show_passes(passes: Passes) -> None:
    from holdfast.admin.inspection import size_words

    first, later = (
        f"{seconds / 3600:,.2f} hours ({step.ms:.1f} ms a step, limited by {step.limited_by})"
        for seconds, step in ((passes.first_s, passes.first), (passes.later_s, passes.later))
    )
    print(  # noqa: T201
        f"With new tables a first pass over the data takes {first}, a later one {later}. Then the pool takes "
        f"{size_words(passes.disk_bytes)} on the disk, and {size_words(passes.written_bytes_per_day)} go there a day."
    )


def _show(plan: Plan, basis: str, pace: str) -> None:

    from holdfast.admin.inspection import size_words

    console = plain_console(markup=True)
    console.print(f"Rates of access: {basis}.")
    console.print(_placement_table(plan))
    console.print(_tier_table(plan))
    gap = f", within {plan.gap:.2%} of the best" if plan.gap > 0 else ""
    console.print(
        f"[bold]It fits.[/] {plan.ms_per_batch:.3f} ms per batch, limited by {plan.limiting_stage}{gap}; "
        "compute not counted."
    )
    console.print(
        f"Log on {plan.log_tier}: {size_words(plan.log_bytes_per_batch)} of rows and "
        f"{size_words(plan.dense_bytes_per_batch)} of dense state a batch, "
        f"{size_words(plan.log_bytes_per_s)}/s at {pace} pace."
    )
    for use in plan.tiers:
        if use.drive_writes_per_day is not None:
            console.print(_wear(use))
    priced = [use.cost_usd for use in plan.tiers if use.cost_usd is not None]
    if priced:
        partly = "" if len(priced) == len(plan.tiers) else " (tiers without a price not counted)"
        console.print(f"Memory in use costs {sum(priced):,.2f} USD{partly}.")
    for needed in plan.nodes:
        nodes = "1 node" if needed.nodes == 1 else f"{needed.nodes:,} nodes"
        console.print(f"With tiers down to {needed.slowest_tier}: {nodes}.")


def _wear(use: TierUse) -> str:
    text = f"{use.name} is written {use.drive_writes_per_day:,.2f} times a day at most"
    if use.endurance_drive_writes_per_day is None:
        return f"{text}; the tier declares no endurance."
    text += f", it is made for {use.endurance_drive_writes_per_day:g}"
    return f"{text}." if use.lifetime_years is None else f"{text}: used up in {use.lifetime_years:,.1f} years."


def _placement_table(plan: Plan) -> Table:
    from rich.table import Table

    from holdfast.admin.inspection import size_words

    table = Table("table", "tier", box=None, pad_edge=False)
    for name in ("hottest rows", "size", "of accesses", "rows/batch"):
        table.add_column(name, justify="right")
    for part in plan.allotments:
        table.add_row(
            part.table,
            part.tier,
            f"{part.first_row + 1:,} – {part.first_row + part.rows:,}",
            size_words(part.bytes),
            f"{part.access_share:.2%}",
            f"{part.unique_rows_per_batch:,.1f}",
        )
    return table


def _tier_table(plan: Plan) -> Table:
    from rich.table import Table

    from holdfast.admin.inspection import size_words

    table = Table("tier", "kind", box=None, pad_edge=False)
    for name in ("rows", "log", "of", "hit rate", "read/batch", "written/batch", "bandwidth ms", "reads ms"):
        table.add_column(name, justify="right")
    for use in plan.tiers:
        table.add_row(
            use.name,
            use.kind,
            size_words(use.bytes),
            size_words(use.reserved_bytes),
            size_words(use.capacity_bytes),
            f"{use.access_share:.2%}",
            size_words(use.read_bytes_per_batch),
            size_words(use.written_bytes_per_batch),
            f"{use.bandwidth_ms:.3f}",
            "–" if use.random_reads_ms is None else f"{use.random_reads_ms:.3f}",
        )
    return table


add_command(tiers_app, "probe", probe)
