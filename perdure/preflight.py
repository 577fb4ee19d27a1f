"""`perdure preflight`: the checks of a job, of this machine as one of its nodes, of re-entry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from perdure import server
from perdure.console import (
    EXIT_FAILED,
    AsJson,
    OptionalJobFile,
    Overrides,
    make_console,
    make_table,
    print_json,
    warn,
)
from perdure.devices import REPORT_FILE, check_devices
from perdure.training.config.job import Job, departures, load_job
from perdure.training.drill.driver import Secrets
from perdure.training.drill.reentry import check_reentry
from perdure.training.engines.registry import platform_checks
from perdure.training.errors import InputError
from perdure.training.node_checks.runner import check_this_machine
from perdure.training.preflight.job import (
    Note,
    check_job,
    checklist,
    recovery_notes,
    start_warnings,
)
from perdure.training.reporting.markdown import counted
from perdure.training.trainer.size import num_parameters, state_bytes
from perdure.training.wire.node import Check, CheckOutcome

STYLES = {CheckOutcome.OK: "green", CheckOutcome.WARNING: "yellow", CheckOutcome.FAILED: "red"}


def preflight(
    job_file: OptionalJobFile = None,
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
    device: Annotated[
        bool,
        typer.Option(
            "--device",
            help="instead of a job: try every NPU or GPU of this machine, drill them, and write a "
            "report",
        ),
    ] = False,
    report: Annotated[Path, typer.Option(help="file for the report of --device")] = Path(
        REPORT_FILE
    ),
    reentry: Annotated[
        bool, typer.Option("--reentry", help="also start the program twice for a few steps")
    ] = False,
    reentry_s: Annotated[
        float, typer.Option(min=1, help="seconds that a command runs each time")
    ] = 10.0,
) -> None:
    """Check a job, and where it is to run, without starting the run.

    Where it runs is this machine, or a cluster, in which no pod is started for it.
    `--set preflight.nodes=false` leaves the checks of the machine out.
    """
    if device:
        if job_file is not None or reentry:
            raise InputError("--device", "tries this machine's devices, and takes no job")
        check_devices(report, as_json=as_json)
        return
    if job_file is None:
        raise InputError("JOB_FILE", "give a job file, or --device")
    job = load_job(job_file, overrides or ())
    if reentry and not job.engine.on_this_machine:
        raise InputError("--reentry", "starts the program here, the job's nodes are elsewhere")
    check_inputs(job)
    notes = recovery_notes(job)
    checks = [*checklist(job)]
    checks += platform_checks(job)
    if job.preflight.nodes and job.engine.on_this_machine:
        checks += check_this_machine(job, state_bytes=state_bytes(job), environment=os.environ)
    if reentry:
        checks.append(check_reentry(job, lasting_s=reentry_s, secrets=_secrets_of(job)))
    is_fine = all(check.outcome is not CheckOutcome.FAILED for check in checks)
    if as_json:
        print_json(_document(job, notes, checks, is_fine=is_fine), indent=None)
    else:
        warn_of_departures(job)
        _show(make_console(), job, notes, checks)
    if not is_fine:
        raise typer.Exit(EXIT_FAILED)


def check_inputs(job: Job) -> None:
    """Check what needs no node.

    Raises:
        InputError: the first problem.
    """
    # A credentials block lives in the Prefect server; the storage is checked once that runs.
    check_job(job, with_storage=job.storage.credentials_block is None)


def _secrets_of(job: Job) -> Secrets:
    """What reads the values of a job's env_from that the Prefect server has."""
    if all(source.block is None for source in job.env_from.values()):
        return dict
    server.use_server()
    from perdure.tasks.env_secrets import BlockSecrets  # noqa: PLC0415 imports Prefect

    return BlockSecrets(job)


def warn_of_departures(job: Job) -> None:
    """Print where the job departs from the recommended settings, and what else is odd about it."""
    for line in _departures(job):
        warn(f"recommended otherwise: {line}")
    for line in start_warnings(job):
        warn(line)


def _departures(job: Job) -> list[str]:
    return list(departures(job, num_parameters(job)))


def _document(
    job: Job, notes: Sequence[Note], checks: Sequence[Check], *, is_fine: bool
) -> dict[str, object]:
    return {
        "ok": is_fine,
        "warnings": [
            *_departures(job),
            *start_warnings(job),
            *(note.line for note in notes if note.is_warning),
        ],
        "recovery": [note.line for note in notes if not note.is_warning],
        "checks": [check.model_dump(mode="json") for check in checks],
    }


def size_text(job: Job) -> str:
    """How many ranks there are; a launcher starts its own."""
    if not job.worker.is_launcher:
        return f"world size {job.world_size}"
    nodes, slots = job.engine.nodes, job.engine.slots_per_node
    return f"the command once on each of {counted(nodes, 'node')} with {counted(slots, 'slot')}"


def _show(console: Console, job: Job, notes: Sequence[Note], checks: Sequence[Check]) -> None:
    console.print(f"{job.run_id}: {size_text(job)}, everything found")
    for note in notes:
        if note.is_warning:
            warn(note.line)
        else:
            console.print(note.line)
    table = make_table("check", "outcome", "seen", "allowed", "s", right=("s",))
    for check in checks:
        style = STYLES.get(check.outcome, "dim")
        took = f"{check.seconds:.1f}" if check.seconds else ""
        outcome = Text(check.outcome, style=style)
        table.add_row(check.name, outcome, Text(check.seen), Text(check.allowed), took)
    console.print(table)
