"""Tables of results, on terminals and in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_WIDTH = 140  # of what goes to a file or a pipe


def plain_table(*left: str, right: tuple[str, ...] = ()) -> Table:
    """Without lines; columns that are aligned on the left come first."""
    from rich.table import Table

    table = Table(*left, box=None, pad_edge=False)
    for name in right:
        table.add_column(name, justify="right")
    return table


def plain_console(*, markup: bool = False) -> Console:
    """Without markup, words are shown as they stand, brackets and all: they may come from files."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=markup, emoji=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console
