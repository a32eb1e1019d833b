"""Commands of the predictors: `holdfast profile`, `plan`, `tiers` and `sim`."""

from __future__ import annotations

import typer

from holdfast.cli.options import add_command
from holdfast_lab.commands import declarations, placing, reproducing, scaling, simulating


def add_to(app: typer.Typer) -> None:
    """Adds them to holdfast's command line, which finds this function by its entry point."""
    add_command(app, "profile", placing.profile)
    add_command(app, "plan", placing.plan)
    app.add_typer(placing.tiers_app, name="tiers")
    add_command(simulating.app, "list", declarations.list_)
    add_command(simulating.app, "show", declarations.show)
    add_command(simulating.app, "copy", declarations.copy)
    add_command(simulating.app, "paper", reproducing.paper)
    add_command(simulating.app, "calibrate", reproducing.calibrate)
    add_command(simulating.app, "sensitivity", reproducing.sensitivity)
    add_command(simulating.app, "scale", scaling.scale)
    add_command(simulating.app, "nodes", scaling.nodes)
    add_command(simulating.app, "failures", scaling.failures)
    app.add_typer(simulating.app, name="sim")
