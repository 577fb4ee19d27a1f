"""`perdure drill`: faults made on purpose, and what became of them.

Times are seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perdure.runs import credentials_of, make_console
from training.drill.drilling import chosen, drilling_on, parallel_kind
from training.drill.telling import row_of
from training.drill.verdict import Outcome
from training.errors import InputError
from training.job import Job


def run_drills(
    name: str, *, job: Job | None, parallelism: str | None, home: Path | None, as_json: bool
) -> bool:
    """Run the drills of a name and print what came of them. Whether all was as expected.

    Args:
        name: of a drill, or of all.
        job: whose nodes they run on; None: this machine.
        parallelism: of the drills' own run; None: the job's.
        home: where to keep logs and ledgers; None: they are kept only of what went wrong.
        as_json: for scripts.

    Raises:
        InputError: no such drill or parallelism, or they cannot be run there.
    """
    drills, kind = chosen(name), parallel_kind(parallelism, job)
    folder = _make_folder(home)
    credentials = credentials_of(job) if job is not None else None
    try:
        drilling = drilling_on(job, drills, kind, home=folder, credentials=credentials)
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    outcomes = []
    progress = Console(stderr=True)
    with progress.status("the same job without a fault") as status:
        drilling.undisturbed()
        for number, drill in enumerate(drills, start=1):
            status.update(f"{drill.name} ({number} of {len(drills)})")
            outcomes.append(drilling.run(drill))
    is_fine = all(outcome.as_expected for outcome in outcomes)
    if as_json:
        print(json.dumps([_document(outcome) for outcome in outcomes], indent=1))  # noqa: T201 for scripts
    else:
        _show(make_console(), outcomes)
    if is_fine and home is None:
        drilling.clear()
        shutil.rmtree(folder, ignore_errors=True)
    else:
        for place in drilling.places:
            print(f"perdure: logs and ledgers of the drills: {place}", file=sys.stderr)  # noqa: T201 a command line prints
    return is_fine


def _make_folder(home: Path | None) -> Path:
    """A folder of its own, so that no run of an earlier drill has the name of one of these."""
    try:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="perdure-drill-", dir=home)).resolve()
    except OSError as error:
        raise InputError("--home", f"{str(home)!r}: {error.strerror}") from error


def _document(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "as_expected": outcome.as_expected}


def _show(console: Console, outcomes: Sequence[Outcome]) -> None:
    rows = [row_of(outcome) for outcome in outcomes]
    table = Table(header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    for one in outcomes:
        for problem in one.problems:
            console.print(f"{one.name}: {problem}", markup=False, highlight=False, soft_wrap=True)
