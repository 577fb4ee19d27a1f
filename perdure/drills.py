"""`perdure drill`: injects faults on purpose and reports whether the run recovered from them.

Times are seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from perdure.console import (
    EXIT_FAILED,
    AsJson,
    Overrides,
    make_console,
    make_table,
    print_json,
    warn,
)
from perdure.runs import credentials_of
from perdure.storage.errors import StorageError
from perdure.training.config.job import Job, load_job
from perdure.training.drill.device_report import count_devices
from perdure.training.drill.evaluation import DrillOutcome
from perdure.training.drill.runner import (
    DrillRunner,
    find_obstacle,
    make_runner,
    parallel_kind,
    select_drills,
    select_runnable,
)
from perdure.training.drill.table import DRILLS, Drill
from perdure.training.errors import InputError

LIST = "list"


def drill(
    name: Annotated[
        str,
        typer.Argument(
            help="name of a drill, all, or list to show the drills and whether they can run",
            show_default=False,
        ),
    ],
    *,
    as_json: AsJson = False,
    job_file: Annotated[
        Path | None,
        typer.Option(
            "--job", help="use the engine and the store of this job file, not this machine"
        ),
    ] = None,
    overrides: Overrides = None,
    parallelism: Annotated[
        str | None, typer.Option(help="ddp, hsdp or fsdp2; default: the job's, else ddp")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="keep the drills' folder inside this one")
    ] = None,
) -> None:
    """Break a small run on purpose, and compare it with an undisturbed one.

    The run is Perdure's own, on this machine or on the nodes of a job; the job itself is not run.
    """
    if job_file is None and overrides:
        raise InputError("--set", "overrides fields of a job, so it needs --job")
    job = load_job(job_file, overrides or ()) if job_file is not None else None
    if name == LIST:
        _list(job, as_json=as_json)
        return
    asked, kind = select_drills(name), parallel_kind(parallelism, job)
    num_devices = count_devices() if job is None else 0
    drills = select_runnable(asked, job, num_devices=num_devices)
    for candidate in asked:
        if candidate not in drills:
            obstacle = find_obstacle(candidate, job, num_devices=num_devices)
            warn(f"{candidate.name} is skipped: {obstacle}")
    credentials = credentials_of(job) if job is not None else None
    folder = _make_folder(home)
    runner = make_runner(job, drills, kind, home=folder, credentials=credentials)
    is_fine = False
    try:
        outcomes = run_drills(runner, drills)
        is_fine = all(outcome.as_expected for outcome in outcomes)
        if as_json:
            print_json(
                [{**asdict(outcome), "as_expected": outcome.as_expected} for outcome in outcomes]
            )
        else:
            _show(make_console(), outcomes)
    finally:
        # Logs stay after a failure or an interruption, and where the user named a folder.
        if not is_fine or home is not None or not _clear(runner):
            for place in runner.places:
                warn(f"logs and ledgers of the drills: {place}")
    raise typer.Exit(0 if is_fine else EXIT_FAILED)


def _list(job: Job | None, *, as_json: bool) -> None:
    """Print the drills, and whether each can run on the nodes of a job."""
    rows = [
        {
            "drill": candidate.name,
            "injected": candidate.injected,
            "expected": " ".join(candidate.expected.rungs) or "-",
            "can run": find_obstacle(candidate, job) or "yes",
        }
        for candidate in DRILLS
    ]
    if as_json:
        print_json(rows)
        return
    table = make_table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    make_console().print(table)


def run_drills(runner: DrillRunner, drills: Sequence[Drill]) -> list[DrillOutcome]:
    """Run drills one after the other, and name each on stderr."""
    outcomes = []
    console = Console(stderr=True)  # stdout is for the table, or for a script's JSON
    with console.status("") as status:

        def show(text: str) -> None:
            status.update(text)
            if not console.is_terminal:  # where rich shows no status
                warn(text)

        show("running the same job without a fault")
        runner.undisturbed()
        for number, drill in enumerate(drills, start=1):
            show(f"{drill.name} ({number} of {len(drills)})")
            outcomes.append(runner.run(drill))
            if not console.is_terminal:  # the table comes with the last one
                warn(f"{drill.name}: {outcomes[-1].line}")
    return outcomes


def _clear(runner: DrillRunner) -> bool:
    """Delete the drills' remains; return whether that was possible."""
    try:
        runner.clear()
    except StorageError as error:
        warn(f"cannot delete the drills' remains: {error}")
        return False
    return True


def _make_folder(home: Path | None) -> Path:
    """Make a new folder, so that no run of an earlier drill has the same name."""
    try:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="perdure-drill-", dir=home)).resolve()
    except OSError as error:
        raise InputError("--home", f"{str(home)!r}: {error.strerror}") from error


def _show(console: Console, outcomes: Sequence[DrillOutcome]) -> None:
    table = make_table(*outcomes[0].row)
    for outcome in outcomes:
        table.add_row(*outcome.row.values())
    console.print(table)
    for outcome in outcomes:
        for problem in outcome.problems:
            console.print(f"{outcome.name}: {problem}", soft_wrap=True)
