"""The `perdure` command, each of whose larger subcommands is a module of its own.

Exit codes: 0 fine, 1 the run failed, 2 the input is wrong. Prefect reads its settings when it
is imported, so a command imports it only after the server is known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

import typer

from perdure import checkpoint_commands, policy, server
from perdure.console import (
    EXIT_FAILED,
    EXIT_INPUT,
    AsJson,
    JobFile,
    Overrides,
    RunName,
    make_console,
    make_table,
    print_json,
    warn,
)
from perdure.diagnosis import diagnose
from perdure.drills import drill
from perdure.launch import launch
from perdure.logs import logs
from perdure.nodes import nodes
from perdure.pausing import pause, resume
from perdure.policy import ladder
from perdure.preflight import preflight
from perdure.run import demo, run
from perdure.run_status import RunStatus
from perdure.runs import credentials_of, named_job
from perdure.schema_page import job_page
from perdure.status import status
from perdure.storage.errors import StorageError
from perdure.submit import submit
from perdure.support import support
from perdure.training.config.job import Job
from perdure.training.config.job_file import load_job, load_template
from perdure.training.environment import Variable, check_environment, worker_variables
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.log import start_logging
from perdure.training.processes import raise_open_files
from perdure.training.supervisor import runbook as cancelling
from perdure.training.supervisor.run_supervisor import RunSupervisor

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(server.app, name="server")
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.add_typer(policy.app, name="policy")
for command in (
    run, launch, submit, demo, drill, status, pause, resume, logs, nodes, diagnose, preflight,
    ladder, support,
):  # fmt: skip
    app.command()(command)


def _print_version(*, is_wanted: bool) -> None:
    if is_wanted:
        print(f"perdure {version('perdure')}")
        raise typer.Exit


@app.callback()
def perdure(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,  # before the missing command is noticed
            callback=lambda value: _print_version(is_wanted=value),
            help="print the version and exit",
        ),
    ] = False,
) -> None:
    """Pretraining that outlasts its faults."""


@app.command()
def env(job_file: JobFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the HCCL and torch environment of a job's workers, with the reasons."""
    job = load_job(job_file, overrides or ())
    check_environment(job)
    secrets = [Variable(name, "***", f"from {src.text}") for name, src in job.env_from.items()]
    variables = [*worker_variables(job), *secrets]
    if as_json:
        print_json([asdict(variable) for variable in variables])
        return
    table = make_table("variable", "value", "why")
    for variable in variables:
        table.add_row(variable.name, variable.value, variable.why)
    make_console().print(table)


@app.command()
def schema(
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the reference page docs/job.md instead")
    ] = False,
    of_status: Annotated[
        bool, typer.Option("--status", help="of what `perdure status RUN --json` prints")
    ] = False,
) -> None:
    """Print the JSON schema of a job file, or of a run's status."""
    if markdown:
        print(job_page())
        return
    # A field of the status that may be missing has a default, which only this mode shows.
    print_json((RunStatus if of_status else Job).model_json_schema(mode="validation"))


@app.command()
def show(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print a job as JSON, for `prefect deployment run 'pretrain/local' -p job=...`."""
    print(load_template(job_file, overrides or ()).model_dump_json())


@app.command()
def cancel(run: RunName) -> None:
    """Stop a run: its workers save and exit, and its containers are removed."""
    job = named_job(run)
    if not job.engine.on_this_machine and not os.environ.get("PREFECT_API_URL"):
        # Its Prefect server is elsewhere; a cancellation needs only store and cluster.
        credentials = credentials_of(job)
        print(cancelling.cancel(RunSupervisor(job, home=home_folder(), credentials=credentials)))
        return
    server.use_server(must_answer=False)
    from perdure.tasks.hooks import cancel_run  # noqa: PLC0415 imports Prefect

    print(cancel_run(job))


@app.command()
def notify(
    block: Annotated[
        str, typer.Argument(metavar="TYPE/NAME", help="a notification block of the Prefect server")
    ],
) -> None:
    """Have the server send a message when a run has failed or needs you.

    Creates two automations, or changes the block to which they send.
    """
    server.use_server()
    from perdure.flows.notifications import ensure  # noqa: PLC0415 imports Prefect

    print(ensure(block)["automations"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every expected error ends with one line on stderr and its exit code."""
    start_logging(is_command=True)
    raise_open_files()
    try:
        app(arguments)
    except InputError as error:
        _fail(str(error), EXIT_INPUT)
    except (PerdureError, StorageError) as error:
        _fail(str(error), EXIT_FAILED)


def _fail(message: str, code: int) -> None:
    # The error of another library may have several lines; a script expects a single one.
    warn(" ".join(message.split()))
    raise SystemExit(code)
