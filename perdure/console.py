"""The terminal of every command: what it prints, how it fails, and the options that several share.

Results go to stdout, everything else to stderr with `perdure:` before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

EXIT_FAILED = 1  # the run, a check or a store failed
EXIT_INPUT = 2  # as typer's own, for a wrong option
PIPED_WIDTH = 180  # room for the table of attempts (TABLE_WIDTH in tables.py)

OptionalJobFile = Annotated[
    Path | None, typer.Argument(help="job file (YAML or JSON)", show_default=False)
]
JobFile = Annotated[Path, typer.Argument(help="job file (YAML or JSON)", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field")
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="run_id of a run that is known on this machine, or a job file",
        show_default=False,
    ),
]
RunId = Annotated[str, typer.Argument(help="run_id of the job", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]


def make_console() -> Console:
    """The terminal; piped output is not folded to the width of one that is not there."""
    # Texts of faults and names of files hold brackets, which are no markup.
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=PIPED_WIDTH)
    return console


def print_json(document: Any, *, indent: int | None = 1) -> None:
    """Print a result for scripts."""
    print(json.dumps(document, indent=indent, ensure_ascii=False))


def warn(text: str) -> None:
    """Print a line that does not belong to the result."""
    print(f"perdure: {text}", file=sys.stderr)


def make_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without rows; the columns named in `right` hold numbers."""
    table = Table(header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in right else "left")
    return table
