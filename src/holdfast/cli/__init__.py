"""The command line. What it does lives elsewhere; here are names, options, and how results and errors are said.

Nothing here imports torch before a command runs: `holdfast --help` answers at once, and the environment that PyTorch
needs for the same bits in every process is set before it is there.

Exit status: 0 done · 1 an error that was foreseen · 2 the command line is wrong · 130, 143 stopped by SIGINT, SIGTERM.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.cli import data, groups, keeping, moving, pools, proving, training
from holdfast.cli.options import add_command
from holdfast.errors import ConfigError, HoldfastError
from holdfast.files.descriptors import fill_standard_descriptors
from holdfast.files.names import advice_on
from holdfast.state.reproducibility import prepare_environment

_DEBUG = "--debug"

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train recommendation models from a persistent pool: every batch durable, every resume exact to the bit.\n\n"
    "Kill a run whenever you like, and start the same command again: it goes on as if nothing had happened.",
    epilog="A run is a TOML file; see examples/. Start with:  "
    "holdfast train examples/criteo_synthetic.toml --pool runs/first",
)
add_command(app, "train", training.train)
add_command(app, "eval", training.evaluate)
add_command(app, "serve", groups.serve)
add_command(app, "inspect", pools.inspect)
add_command(app, "verify", pools.verify)
add_command(app, "digest", pools.digest)
add_command(app, "prove", proving.prove, {"allow_interspersed_args": False})
add_command(app, "snapshot", keeping.snapshot)
add_command(app, "restore", keeping.restore)
add_command(app, "export", moving.export)
add_command(app, "import", moving.import_)
app.add_typer(data.app, name="data")
for commands in entry_points(group="holdfast.commands"):  # of the predictors, of which nothing here knows
    commands.load()(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {version('holdfast')}, with torch {version('torch')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    *,
    shows_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of an error. Goes anywhere.")] = False,
) -> None:
    """Read by `main` before the rest, so that it may stand after the command too."""


def main() -> None:
    """The entry point of `holdfast` and `python -m holdfast`."""
    environment = dict(os.environ)
    fill_standard_descriptors()
    prepare_environment()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # which a closed one is not
            # What the terminal's encoding lacks, a dot of the progress or a letter of a path, must not end a run.
            stream.reconfigure(errors="backslashreplace")
    atexit.register(_leave_garbage)
    ours = sys.argv[1:]
    foreign = ours[ours.index("--") :] if "--" in ours else []  # a script's own
    ours = ours[: len(ours) - len(foreign)]
    arguments = [argument for argument in ours if argument != _DEBUG]
    is_debug = len(arguments) < len(ours)
    try:
        _check_working_directory()
        app(arguments + foreign, obj=environment)
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except SystemExit as leaving:
        refused = _refused_output()
        if refused is None or leaving.code:
            raise
        _end(refused)
    except Exception as error:
        if is_debug or not _is_foreseen(error):
            raise
        is_named = isinstance(error, HoldfastError) or not isinstance(error, OSError) or error.filename
        _end(error if is_named else _refused_output(tries=True) or error)


def _end(error: Exception) -> NoReturn:
    if not isinstance(error, BrokenPipeError):
        print(f"holdfast: {_words(error)}", file=sys.stderr)  # noqa: T201
    sys.exit(1)


def _refused_output(*, tries: bool = False) -> OSError | None:
    """Writes what was said and waits; the error that names standard output where that takes no more, which the
    interpreter would find as it ends, and end with 120.

    tries: another line, without which nothing shows where nothing waits (PYTHONUNBUFFERED).
    """
    output = sys.stdout
    try:
        print(end="\n" if tries else "", flush=True)  # noqa: T201
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # what waits still goes there
        return OSError(error.errno, error.strerror, "standard output")
    return None


def _check_working_directory() -> None:
    """Raises ConfigError where it was removed: MKL, when it is first needed, ends the process with words about a
    library that it cannot load."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was removed: change to one that is there") from None


def _leave_garbage() -> None:
    """As it ends, the interpreter searches for garbage in all that torch made. Where Triton is
    loaded, as by torch's optimizers, it has to: nanobind tells users of what is left of that."""
    if "triton" not in sys.modules:
        gc.freeze()


def _is_foreseen(error: Exception) -> bool:
    return isinstance(error, HoldfastError | OSError | MemoryError) or _is_want_of_threads(error)


def _is_want_of_threads(error: Exception) -> bool:
    """Whether it is what `threading` says, to which it gives no class of its own."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def _words(error: Exception) -> str:
    if _is_want_of_threads(error):
        return f"{error}: allow more of them (ulimit -u, a container's limit of processes) or memory"
    if isinstance(error, MemoryError):
        wanted = f" ({error})" if str(error) else ""
        return (
            f"out of memory{wanted}: the machine, a container's limit or `ulimit -v` has no more for this process; "
            "nothing durable is lost"
        )
    if isinstance(error, OSError) and not isinstance(error, HoldfastError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}{advice_on(error)}"
    return str(error)
