"""What several commands have: arguments, options, and how their docstrings become help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args, get_type_hints

import typer

from holdfast.files.names import trouble_with

if TYPE_CHECKING:
    from holdfast.run.sections import RunConfig

OneConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="The run: data, model, optimizers, pool.")
]
ConfigArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG.toml...",
        help="The run: data, model, optimizers, pool. Of several files, what a later one says counts.",
    ),
]
PoolArgument = Annotated[Path, typer.Argument(metavar="POOL", help="The pool's directory.")]
PoolOption = Annotated[Path, typer.Option("--pool", metavar="DIR", help="The pool's directory.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field of the configuration, as in --set train.batch_size=4096. May be repeated.",
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it is there already.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def read_run(paths: list[Path], overrides: list[str] | None) -> RunConfig:
    """The configuration of a run, each file on top of the one before, and --set on top of all. Raises ConfigError."""
    for override in overrides or []:
        if "=" not in override:
            raise typer.BadParameter(f"{override!r} is no KEY=VALUE", param_hint="--set")
    from holdfast.files.config import read_layers
    from holdfast.run.sections import RunConfig

    return read_layers(RunConfig, paths, overrides or [])


def path(given: str) -> Path:
    """An empty one would be the working directory's; one that is not UTF-8 the core does not take."""
    if not given:
        raise typer.BadParameter("the path is empty (a variable that is not set?)")
    if trouble := trouble_with(given):
        raise typer.BadParameter(trouble)
    return Path(given)


def add_command(
    app: typer.Typer, name: str, function: Callable[..., None], settings: dict[str, object] | None = None
) -> None:
    """Makes `function` a command of `app`; its docstring is the help, each paragraph wrapped anew. settings: Click's
    for it. None of its paths may be empty."""
    function.__annotations__ = get_type_hints(function, include_extras=True)
    for hint in function.__annotations__.values():
        wanted, *notes = get_args(hint) or (hint,)
        for note in notes:
            if Path in (wanted, *get_args(wanted)) and hasattr(note, "parser"):
                note.parser = path
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    words = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(name, help=words, context_settings=settings)(function)
