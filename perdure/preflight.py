"""`perdure preflight`: the checks of a job, of this machine as one of its nodes, and of re-entry.

Exit codes: 0 fine, 1 a check failed, 2 the input is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perdure.runs import make_console
from training.drill.reentry import check_reentry
from training.health.node_check import check_this_machine
from training.job import Job, departures, load_job
from training.supervisor.job_checks import Note, check_job, checklist, recovery_notes
from training.trainer.size import num_parameters, state_bytes
from training.wire.check import Check, CheckOutcome

EXIT_FAILED = 1
STYLES = {CheckOutcome.OK: "green", CheckOutcome.WARNING: "yellow", CheckOutcome.FAILED: "red"}


def preflight(
    job_file: Annotated[Path, typer.Argument(help="job file (YAML or JSON)", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
    reentry: Annotated[
        bool, typer.Option("--reentry", help="also start the program twice for a few steps")
    ] = False,
    reentry_s: Annotated[
        float, typer.Option(min=1, help="seconds that a command runs each time")
    ] = 10.0,
) -> None:
    """Check a job, and this machine as a node of it, without starting the run.

    `--set preflight.nodes=false` leaves the checks of the machine out.
    """
    job = load_job(job_file, overrides or ())
    check_inputs(job)
    notes = recovery_notes(job)
    checks = [*checklist(job)]
    if job.preflight.nodes:
        checks += check_this_machine(job, state_bytes=state_bytes(job), environment=os.environ)
    if reentry:
        checks.append(check_reentry(job, lasting_s=reentry_s))
    is_fine = all(check.outcome is not CheckOutcome.FAILED for check in checks)
    if as_json:
        print(json.dumps(_document(job, notes, checks, is_fine=is_fine)))
    else:
        warn_of_departures(job)
        _show(make_console(), job, notes, checks)
    if not is_fine:
        raise typer.Exit(EXIT_FAILED)


def check_inputs(job: Job) -> None:
    """What can be known wrong without a node.

    Raises:
        InputError: the first problem.
    """
    # A credentials block lives in the Prefect server; the storage is checked once that runs.
    check_job(job, with_storage=job.storage.credentials_block is None)


def warn_of_departures(job: Job) -> None:
    """Tell where the job departs from the recommended settings."""
    for line in _departures(job):
        print(f"perdure: recommended otherwise: {line}", file=sys.stderr)


def _departures(job: Job) -> list[str]:
    if job.worker.is_command:
        return []
    return list(departures(job, num_parameters(job)))


def _document(
    job: Job, notes: Sequence[Note], checks: Sequence[Check], *, is_fine: bool
) -> dict[str, object]:
    return {
        "ok": is_fine,
        "warnings": [*_departures(job), *(note.line for note in notes if note.is_warning)],
        "recovery": [note.line for note in notes if not note.is_warning],
        "checks": [check.model_dump(mode="json") for check in checks],
    }


def _show(console: Console, job: Job, notes: Sequence[Note], checks: Sequence[Check]) -> None:
    console.print(f"{job.run_id}: world size {job.world_size}, everything found", highlight=False)
    for note in notes:
        if note.is_warning:
            print(f"perdure: {note.line}", file=sys.stderr)
        else:
            console.print(note.line, markup=False, highlight=False)
    table = Table(header_style="bold")
    for name in ("check", "outcome", "seen", "allowed", "s"):
        table.add_column(name, overflow="fold", justify="right" if name == "s" else "left")
    for check in checks:
        style = STYLES.get(check.outcome, "dim")
        took = f"{check.seconds:.1f}" if check.seconds else ""
        outcome = Text(check.outcome, style=style)
        table.add_row(check.name, outcome, Text(check.seen), Text(check.allowed), took)
    console.print(table)
