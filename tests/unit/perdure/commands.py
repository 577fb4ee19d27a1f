"""The command line as tests use it: what it prints, how it refuses, and records of a run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from perdure.cli import app, main
from perdure.training.journal.records import RECORD


def perdure(*arguments: Any, code: int = 0, stdin: str | bytes = "") -> str:
    """What a command prints on stdout."""
    done = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
    assert done.exit_code == code, done.output
    return done.stdout


def error_line(
    capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 2, prints: bool = False
) -> str:
    """The one line on stderr with which a command ends; `prints`: also something on stdout."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    captured = capsys.readouterr()
    assert ended.value.code == code
    assert prints or captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def shown(view: RenderableType, width: int = 160) -> str:
    """A view as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def append(run: Any, *records: Any) -> None:
    """Put records into a run's ledger, as its supervisor would."""
    prefix = f"runs/{run.job.run_id}/ledger/"
    taken = len(list(run.store.list(prefix)))
    for number, record in enumerate(records, taken):
        run.store.put(f"{prefix}{number:08d}.json", RECORD.dump_json(record))
