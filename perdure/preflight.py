"""`perdure preflight`: checks a job, this machine as one of its nodes, re-entry and devices."""

from __future__ import annotations

import os
import shutil
import tempfile
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
from perdure.drills import run_drills
from perdure.training.config.job import Job, departures, load_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.device_report import (
    DeviceReport,
    count_devices,
    try_devices,
)
from perdure.training.drill.driver import Secrets
from perdure.training.drill.reentry import check_reentry
from perdure.training.drill.runner import DrillRunner, find_obstacle
from perdure.training.drill.table import DRILLS
from perdure.training.engines.registry import platform_checks
from perdure.training.errors import InputError
from perdure.training.node_checks.runner import check_this_machine
from perdure.training.preflight.job import (
    Note,
    check_job,
    check_without_store,
    checklist,
    recovery_notes,
    start_warnings,
)
from perdure.training.reporting.markdown import counted
from perdure.training.trainer.size import num_parameters, state_bytes
from perdure.training.wire.node import Check, CheckOutcome

REPORT_FILE = "perdure-device-report.json"
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
            help="instead of a job: test every NPU or GPU of this machine, run drills on them, and "
            "write a report",
        ),
    ] = False,
    report: Annotated[Path, typer.Option(help="file for the report of --device")] = Path(
        REPORT_FILE
    ),
    reentry: Annotated[
        bool, typer.Option("--reentry", help="also start the program twice, for a few steps each")
    ] = False,
    reentry_s: Annotated[
        float, typer.Option(min=1, help="seconds for which a command runs each time")
    ] = 10.0,
) -> None:
    """Check a job, and this machine or the cluster on which it will run, without starting it.

    In a cluster, the checks start no pod. `--set preflight.nodes=false` skips the checks of this
    machine.
    """
    if device:
        if job_file is not None or reentry:
            raise InputError("--device", "tests the devices of this machine, and takes no job")
        _check_devices(report, as_json=as_json)
        return
    if job_file is None:
        raise InputError("JOB_FILE", "give a job file, or --device")
    job = load_job(job_file, overrides or ())
    if reentry and not job.engine.on_this_machine:
        raise InputError(
            "--reentry", "starts the program on this machine, but the job's nodes are elsewhere"
        )
    _check_inputs(job)
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


def _check_inputs(job: Job) -> None:
    """Check all that needs no node.

    Raises:
        InputError: the first problem.
    """
    if job.storage.credentials_block is None:
        check_job(job)
    else:  # its block is in the Prefect server, which preflight does not start
        check_without_store(job)


def _secrets_of(job: Job) -> Secrets:
    """A reader of the job's env_from values that the Prefect server holds."""
    if all(source.block is None for source in job.env_from.values()):
        return dict
    server.use_server()
    from perdure.tasks.env_secrets import BlockSecrets  # noqa: PLC0415 imports Prefect

    return BlockSecrets(job)


def warn_of_departures(job: Job) -> None:
    """Print the departures of the job from recommended settings, and other warnings."""
    for line in _departures(job):
        warn(f"not as recommended: {line}")
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
    """The number of ranks; a launcher starts its own."""
    if not job.worker.is_launcher:
        return f"world size {job.world_size}"
    nodes, slots = job.engine.nodes, job.engine.slots_per_node
    return f"the command once on each of {counted(nodes, 'node')} with {counted(slots, 'slot')}"


def _show(console: Console, job: Job, notes: Sequence[Note], checks: Sequence[Check]) -> None:
    console.print(f"{job.run_id}: {size_text(job)}; all inputs found")
    for note in notes:
        if note.is_warning:
            warn(note.line)
        else:
            console.print(note.line)
    table = make_table("check", "outcome", "observed", "allowed", "s", right=("s",))
    for check in checks:
        style = STYLES.get(check.outcome, "dim")
        took = f"{check.seconds:.1f}" if check.seconds else ""
        outcome = Text(check.outcome, style=style)
        table.add_row(check.name, outcome, Text(check.seen), Text(check.allowed), took)
    console.print(table)


def _check_devices(report_file: Path, *, as_json: bool) -> None:
    """Test every device, run drills where there are enough devices, and write the report.

    Raises:
        InputError: there is no device.
        Exit: something failed.
    """
    count = count_devices()
    if count == 0:
        raise InputError("--device", "torch finds no NPU and no GPU on this machine")
    warn(f"testing {count} devices, each in a process of its own")
    report = _drilled(try_devices(count), count)
    report.write(report_file)
    if as_json:
        print_json(report.model_dump(mode="json"), indent=None)
    else:
        _show_devices(report)
    warn(f"report written to {report_file}")
    if not report.is_fine:
        raise typer.Exit(EXIT_FAILED)


def _drilled(report: DeviceReport, count: int) -> DeviceReport:
    reasons = {drill.name: find_obstacle(drill, None, num_devices=count) for drill in DRILLS}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    drills = [drill for drill in DRILLS if drill.name not in left_out]
    if not drills or not report.is_fine:
        return report.with_drills((), left_out)
    home = Path(tempfile.mkdtemp(prefix="perdure-device-")).resolve()
    report = report.with_drills(run_drills(DrillRunner(home, ParallelKind.DDP), drills), left_out)
    if report.is_fine:
        shutil.rmtree(home, ignore_errors=True)
    else:
        warn(f"logs and ledgers of the drills: {home}")
    return report


def _show_devices(report: DeviceReport) -> None:
    console = make_console()
    table = make_table("device", "check", "outcome", "observed")
    for device, check in report.checks:
        if check.outcome is not CheckOutcome.SKIPPED:
            lines = check.seen.strip().splitlines()
            table.add_row(device, check.name, check.outcome, lines[-1] if lines else "")
    console.print(table)
    for name, reason in report.left_out.items():
        console.print(f"{name} is skipped: {reason}")
    if report.drills:
        wrong = [drill["name"] for drill in report.drills if not drill["as_expected"]]
        verdict = f"not as expected: {', '.join(wrong)}" if wrong else "all as expected"
        console.print(f"{len(report.drills)} drills: {verdict}")
