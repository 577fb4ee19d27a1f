"""`perdure drill`: faults made on purpose, and what became of them.

Times are seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perdure.runs import credentials_of, make_console
from storage.errors import StorageError
from training.drill.runner import DrillRunner, chosen, drills_on, parallel_kind
from training.drill.table import Drill
from training.drill.verdict import DrillOutcome
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
    credentials = credentials_of(job) if job is not None else None
    folder = _make_folder(home)
    runner = drills_on(job, drills, kind, home=folder, credentials=credentials)
    is_fine = False
    try:
        outcomes = _played(runner, drills)
        is_fine = all(outcome.as_expected for outcome in outcomes)
        if as_json:
            print(json.dumps([_document(outcome) for outcome in outcomes], indent=1))
        else:
            _show(make_console(), outcomes)
    finally:
        if not is_fine or home is not None or not _cleared(runner):
            for place in runner.places:
                _say(f"logs and ledgers of the drills: {place}")
    return is_fine


def _played(runner: DrillRunner, drills: Sequence[Drill]) -> list[DrillOutcome]:
    outcomes = []
    console = Console(stderr=True)
    with console.status("") as status:

        def tell(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                _say(text)

        tell("the same job without a fault")
        runner.undisturbed()
        for number, drill in enumerate(drills, start=1):
            tell(f"{drill.name} ({number} of {len(drills)})")
            outcomes.append(runner.run(drill))
    return outcomes


def _cleared(runner: DrillRunner) -> bool:
    """Whether nothing is left of drills that were as expected."""
    try:
        runner.clear()
    except StorageError as error:
        _say(f"could not be deleted: {error}")
        return False
    return True


def _say(text: str) -> None:
    print(f"perdure: {text}", file=sys.stderr)


def _make_folder(home: Path | None) -> Path:
    """A folder of its own, so that no run of an earlier drill has the name of one of these."""
    try:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="perdure-drill-", dir=home)).resolve()
    except OSError as error:
        raise InputError("--home", f"{str(home)!r}: {error.strerror}") from error


def _document(outcome: DrillOutcome) -> dict[str, Any]:
    return {**asdict(outcome), "as_expected": outcome.as_expected}


def _show(console: Console, outcomes: Sequence[DrillOutcome]) -> None:
    rows = [outcome.row for outcome in outcomes]
    table = Table(header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    for one in outcomes:
        for problem in one.problems:
            console.print(f"{one.name}: {problem}", markup=False, highlight=False, soft_wrap=True)
