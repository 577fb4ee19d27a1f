"""The `perdure` command.

Exit codes: 0 fine, 1 the run failed, 2 the input is wrong. Prefect reads its settings when it
is imported, so whatever imports it does so inside the command, after the server is known.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from perdure import checkpoints, server
from perdure.demo import demo_faults, demo_job
from perdure.diagnosis import as_object, cases_of, show_case
from perdure.drills import run_drills
from perdure.logs import logs
from perdure.pausing import Pausing
from perdure.preflight import check_inputs, preflight, warn_of_departures
from perdure.runs import known_run, make_console, run_to_look_at, store_of
from perdure.status import Looker
from storage.errors import StorageError
from training.environment import check_environment, worker_variables
from training.errors import InputError, PerdureError
from training.files import home_folder
from training.injection.outside import KillInjector
from training.job import Job, load_job
from training.journal.accounting import account
from training.journal.ledger import Ledger
from training.journal.steps import StepReader, kept_of
from training.journal.wall_time import Account
from training.log import start_logging
from training.recovery.ladder import ladder_markdown
from training.supervisor.accounts import ettr_text, timeline_picture
from training.supervisor.job_checks import check_job
from training.supervisor.report import AttemptRow, loss_picture, story_rows
from training.wire.requests import is_pause_wanted

EXIT_FAILED = 1
EXIT_INPUT = 2

app = typer.Typer(
    help="Pretraining that outlasts its faults.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
server_app = typer.Typer(help="The Prefect server of this machine.", no_args_is_help=True)
app.add_typer(server_app, name="server")
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(logs)
app.command()(preflight)

JobFile = Annotated[Path, typer.Argument(help="job file (YAML or JSON)", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field")
]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]
WaitS = Annotated[
    float, typer.Option("--wait-s", min=0, help="seconds to wait until the ranks have heeded it")
]
RunId = Annotated[str, typer.Argument(help="run_id of the job", show_default=False)]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="run_id of a run that is known on this machine, or a job file",
        show_default=False,
    ),
]


@app.command()
def run(job_file: JobFile, overrides: Overrides = None) -> None:
    """Run the pretrain flow in this process; start it again to adopt a living run.

    A run that was paused stays paused until `perdure resume`.
    """
    job = load_job(job_file, overrides or ())
    check_inputs(job)
    warn_of_departures(job)
    raise typer.Exit(_supervise(job))


@app.command()
def demo() -> None:
    """Run the main job on this machine, kill a worker and a node, and watch it go on."""
    home = home_folder()
    job = demo_job(home)
    check_inputs(job)
    injector = demo_faults(home, job.run_id)
    code = _supervise(job, injector)
    console = make_console()
    for number in injector.fired_s:
        console.print(f"injected: {injector.kills[number]}", highlight=False)
    program = shutil.which("perdure") or Path(sys.executable).with_name("perdure")
    again = f"PERDURE_HOME={home} {program} status {job.run_id}"
    console.print(f"look at it again with: {again}", highlight=False, soft_wrap=True)
    missing = [str(kill) for n, kill in enumerate(injector.kills) if n not in injector.fired_s]
    if missing:
        raise PerdureError(f"did not fire: {', '.join(missing)}")
    raise typer.Exit(code)


@app.command()
def drill(
    name: Annotated[str, typer.Argument(help="a drill, or all of them", show_default=False)],
    *,
    as_json: AsJson = False,
    job_file: Annotated[
        Path | None,
        typer.Option(
            "--job", help="on the engine and with the store of this job file, not on this machine"
        ),
    ] = None,
    overrides: Overrides = None,
    parallelism: Annotated[
        str | None, typer.Option(help="ddp, hsdp or fsdp2; default: the job's, else ddp")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="keep the drills' folder below this one")
    ] = None,
) -> None:
    """Break a small run on purpose, and compare it with an undisturbed one.

    The run is Perdure's own, on this machine or on the nodes of a job; the job itself is not run.
    """
    if job_file is None and overrides:
        raise InputError("--set", "overrides fields of a job: give --job, too")
    job = load_job(job_file, overrides or ()) if job_file is not None else None
    is_fine = run_drills(name, job=job, parallelism=parallelism, home=home, as_json=as_json)
    raise typer.Exit(0 if is_fine else EXIT_FAILED)


@app.command()
def env(job_file: JobFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the HCCL and torch environment of a job's workers, with the reasons."""
    job = load_job(job_file, overrides or ())
    check_environment(job)
    variables = worker_variables(job)
    if as_json:
        print(json.dumps([asdict(variable) for variable in variables], indent=1))
        return
    table = Table(header_style="bold")
    for name in ("variable", "value", "why"):
        table.add_column(name, overflow="fold")
    for variable in variables:
        table.add_row(variable.name, variable.value, variable.why)
    make_console().print(table)


@app.command()
def ladder(*, markdown: Annotated[bool, typer.Option("--markdown")] = False) -> None:
    """Print the recovery ladder from the tables that drive it."""
    text = ladder_markdown()
    if markdown or not sys.stdout.isatty():
        print(text)
        return
    from rich.markdown import Markdown  # noqa: PLC0415 only for a person

    make_console().print(Markdown(text))


@app.command()
def schema() -> None:
    """Print the JSON schema of a job file."""
    print(json.dumps(Job.model_json_schema(), indent=1))


@app.command()
def show(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print a job as JSON, for `prefect deployment run 'pretrain/local' -p job=...`."""
    print(load_job(job_file, overrides or ()).model_dump_json())


@app.command()
def status(
    run: RunName = "",
    *,
    once: Annotated[bool, typer.Option("--once", help="print it once, also on a terminal")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands, also when nothing supervises it.

    From its ledger and its store, and from its node agents when they run on this machine. On a
    terminal it goes on until the run ends or Ctrl-C is pressed.
    """
    looker = Looker(run_to_look_at(run))
    if as_json:
        print(json.dumps(looker.look().document, indent=1))
        return
    from perdure.status_view import plain_status, status_panel, watch  # noqa: PLC0415

    console = make_console()
    if not console.is_terminal:
        console.print(plain_status(looker.look(), console.width), highlight=False, markup=False)
    elif once:
        console.print(status_panel(looker.look(), console.width))
    else:
        watch(console, looker)


@app.command()
def pause(run_id: RunId, *, wait_s: WaitS = 60.0) -> None:
    """Have every rank of a run stand at one step boundary until it is resumed.

    The state stays in memory, nothing is saved for it. The run stays paused whatever happens to
    its processes: a new attempt stands at its first step boundary, and `perdure run` adopts a
    paused run without resuming it. Only `perdure resume`, the Resume button of Prefect, or the
    end of the run, as by `perdure cancel`, ends the pause.
    """
    Pausing(run_to_look_at(run_id), wait_s=wait_s, say=print).pause()


@app.command()
def resume(run_id: RunId, *, wait_s: WaitS = 60.0) -> None:
    """Have a paused run go on from where it stands."""
    Pausing(run_to_look_at(run_id), wait_s=wait_s, say=print).resume()


@app.command()
def cancel(run_id: RunId) -> None:
    """Stop a run: its workers save and end, its containers go away."""
    job, _ = known_run(run_id)
    server.use_server()
    from tasks.hooks import cancel_run  # noqa: PLC0415 imports Prefect

    print(cancel_run(job))


@app.command()
def diagnose(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help='log, folder of logs, or "-"')
    ],
    *,
    as_json: AsJson = False,
    each: Annotated[
        bool, typer.Option("--each", help="every file of a folder is a case of its own")
    ] = False,
) -> None:
    """Say what broke, from any logs: a folder is one attempt with the logs of its ranks."""
    told, is_whole = [], True
    console = make_console()
    for case in cases_of(paths, each=each):
        is_whole = is_whole and bool(case.readings)
        for line in case.unreadable:
            print(f"perdure: not read: {line}", file=sys.stderr)
        if as_json:
            told.append(as_object(case))
        else:
            show_case(console, case)
    if as_json:
        print(json.dumps(told, indent=1, ensure_ascii=False))
    if not is_whole:
        raise typer.Exit(EXIT_INPUT)


@server_app.command("start")
def server_start() -> None:
    """Start the server unless one runs."""
    record = server.find_server() or server.start_server()
    print(f"Prefect UI: {record.ui_url}\nexport PREFECT_API_URL={record.api_url}")


@server_app.command("stop")
def server_stop() -> None:
    """Stop it."""
    print("stopped" if server.stop_server() else "no server was running")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: one line on stderr and the right exit code for every expected error."""
    start_logging(is_command=True)
    try:
        app(arguments)
    except InputError as error:
        _fail(str(error), EXIT_INPUT)
    except (PerdureError, StorageError) as error:
        _fail(str(error), EXIT_FAILED)


def _fail(message: str, code: int) -> None:
    print(f"perdure: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _supervise(job: Job, injector: KillInjector | None = None) -> int:
    """Run the flow under a live view, then print the table. Returns the exit code."""
    console = make_console()
    with console.status("starting the Prefect server"):
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        ui_url = server.use_server()
        from flows.pretrain import pretrain  # noqa: PLC0415 see the module's first lines
        from perdure.live import LiveView  # noqa: PLC0415 imports Prefect
        from tasks.credentials import credentials_of  # noqa: PLC0415 imports Prefect
        from tasks.observe import Observation, observed_by  # noqa: PLC0415 imports Prefect

        if job.storage.credentials_block is not None:
            check_job(job, credentials=credentials_of(job.storage))

    def inject(observation: Observation) -> None:
        if injector is not None and observation.steps:
            injector.inject(observation.history, observation.steps[-1].step)

    if is_pause_wanted(store_of(job), job.run_id):
        on = f"`perdure resume {job.run_id}` has it go on"
        print(f"perdure: {job.run_id} is asked to pause; {on}", file=sys.stderr)
    view = LiveView(console, ui_url=ui_url)
    with view, observed_by(view.observe), observed_by(inject):
        state = _run_flow(lambda: pretrain(job, return_state=True))
    _print_outcome(console, job, ui_url)
    message = (state.message or state.name).removeprefix("Flow run encountered an exception: ")
    text = f"{state.type.value.lower()}: {message}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0 if state.is_completed() else EXIT_FAILED


def _run_flow(flow: Callable[[], Any]) -> Any:
    try:
        return flow()
    except KeyboardInterrupt:
        raise PerdureError("cancelled: the processes of the run are stopped") from None


def _print_outcome(console: Console, job: Job, ui_url: str) -> None:
    store = store_of(job)
    history = Ledger(store, job.run_id).read()
    _print_attempts(console, story_rows(history))
    last = history.attempts[-1].ended if history.attempts else None
    if last is not None and last.fault is not None:
        console.print(f"fault: {last.fault.evidence}", markup=False, highlight=False)
        console.print(f"       {last.fault.explanation}", markup=False, highlight=False)
    records = StepReader(store, job.run_id).read()
    kept = kept_of(records)
    if kept:
        picture = home_folder() / "runs" / job.run_id / "loss.png"
        picture.write_bytes(loss_picture(history, kept))
        console.print(f"steps kept: {len(kept)}", highlight=False)
        console.print(f"loss picture: {picture}", highlight=False, soft_wrap=True)
    _print_account(console, account(history, records, now_s=time.time()), job)
    console.print(f"Prefect UI: {ui_url}", highlight=False, soft_wrap=True)


def _print_account(console: Console, told: Account, job: Job) -> None:
    """Where the time went."""
    from perdure.status_view import account_table  # noqa: PLC0415 imports Prefect

    if not told.stretches:
        return
    picture = home_folder() / "runs" / job.run_id / "timeline.png"
    picture.write_bytes(timeline_picture(told))
    if job.worker.command is None:  # whose steps nobody has seen
        console.print(ettr_text(told), highlight=False)
    console.print(account_table(told))
    console.print(f"timeline picture: {picture}", highlight=False, soft_wrap=True)


def _print_attempts(console: Console, rows: Sequence[AttemptRow]) -> None:
    from perdure.live import attempts_view  # noqa: PLC0415 imports Prefect

    if rows:
        console.print(attempts_view(rows, console.width))
