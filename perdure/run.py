"""`perdure run` and `perdure demo`: supervise a run in this process, under a live view.

Prefect reads its settings when it is imported, so it is imported after the server is known.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from perdure import server
from perdure.console import (
    EXIT_FAILED,
    JobFile,
    Overrides,
    account_table,
    attempts_view,
    make_console,
    warn,
)
from perdure.preflight import warn_of_departures
from perdure.runs import credentials_of, store_of
from perdure.server_process import stop_started
from perdure.storage.address import StorageSpec, has_store
from perdure.storage.errors import StorageError
from perdure.tasks.termination import EXIT_BY_PLATFORM, ended_in_time, limit_of
from perdure.training.config.drill import DrillSpec, Kill, Victim
from perdure.training.config.engine import LocalEngineSpec
from perdure.training.config.job import Job, JobTemplate
from perdure.training.config.job_file import load_job
from perdure.training.config.model import BatchSpec, DataSpec, ModelSpec, OptimizerSpec
from perdure.training.config.recovery import CheckpointSpec, RestartSpec
from perdure.training.drill.termination import raise_on_termination
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.records import RunReopened
from perdure.training.journal.steps import StepReader, drop_lost_steps
from perdure.training.journal.time_account import Account, account_time
from perdure.training.preflight.job import CheckedJob, check_job
from perdure.training.reporting.ettr import ettr_text, timeline_picture
from perdure.training.reporting.markdown import plain
from perdure.training.reporting.rows import loss_picture, num_kept, story_rows
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_identity import REOPEN
from perdure.training.wire.requests import is_pause_wanted

if TYPE_CHECKING:
    from prefect import State
from perdure.training.wire.store_wait import Waiter, write_wait

DEMO_KILLS = (
    Kill(victim=Victim.RANK, index=1, step=34),
    Kill(victim=Victim.NODE, index=1, step=77),
)


def run(
    job_file: JobFile,
    overrides: Overrides = None,
    *,
    reopen: Annotated[bool, typer.Option("--reopen", help="continue a completed run")] = False,
) -> None:
    """Run the pretrain flow in this process; start it again to adopt a living run.

    A paused run stays paused until `perdure resume`. A completed run continues with a larger
    `steps`, or with --reopen, which is for a command that had not reached its end.
    """
    job = load_job(job_file, overrides or ())
    checked = _check(job)
    warn_of_departures(job)
    settings = [word for value in overrides or () for word in ("--set", value)]
    resume_hint = shlex.join(["perdure", "run", str(job_file), *settings, "--reopen"])
    raise typer.Exit(_supervise(checked, reopen=reopen, resume_hint=resume_hint))


def demo() -> None:
    """Run the main job on this machine, kill a worker and a node, and watch it recover."""
    home = home_folder()
    job = demo_job(home)
    checked = _check(job)
    injector = KillInjector(DEMO_KILLS)
    code = _supervise(checked, injector)
    for number in injector.fired_s:
        print(f"injected: {DEMO_KILLS[number]}")
    program = shutil.which("perdure") or Path(sys.executable).with_name("perdure")
    print(f"to show its status again: PERDURE_HOME={home} {program} status {job.run_id}")
    missing = [str(kill) for n, kill in enumerate(DEMO_KILLS) if n not in injector.fired_s]
    if missing:
        raise PerdureError(f"these faults were never injected: {', '.join(missing)}")
    raise typer.Exit(code)


def demo_job(home: Path) -> Job:
    """The main job on the local engine: a small decoder on the standard library's sources.

    Four ranks on two nodes and a spare; a run id of its own each time.
    """
    return Job(
        run_id=f"demo-{time.strftime('%m%d-%H%M%S')}",
        storage=StorageSpec(address=f"file://{home / 'store'}"),
        steps=120,
        seed=7,
        data=DataSpec(sources=(sysconfig.get_path("stdlib") + "/*.py",), shard_size_bytes=1 << 20),
        model=ModelSpec(num_layers=4, hidden_size=128, num_heads=4, seq_len=128),
        batch=BatchSpec(global_batch_size=16, micro_batch_size=2),
        optimizer=OptimizerSpec(lr=2e-3, warmup_steps=10),
        checkpoint=CheckpointSpec(every_steps=10),
        restart=RestartSpec(max_restarts=3, pod_retries=1),
        engine=LocalEngineSpec(nodes=2, slots_per_node=2, spares=1, grace_s=10),
        drill=DrillSpec(kills=True),
    )


def _check(job: Job) -> CheckedJob:
    """Check a job, the only time in this process; a mistyped one ends before Prefect is imported.

    Raises:
        InputError: the first problem.
    """
    # Lines of Prefect's own logger would tear the live view; a user may ask for them.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    return check_job(job, read_credentials=credentials_of)


def _supervise(
    checked: CheckedJob,
    injector: KillInjector | None = None,
    *,
    reopen: bool = False,
    resume_hint: str = REOPEN,
) -> int:
    """Run the flow under a live view, then print the table; return the exit code.

    Args:
        checked: the job to run.
        injector: kills processes at certain steps.
        reopen: whether a completed run continues.
        resume_hint: the command that continues a completed run.
    """
    try:
        limit_s = limit_of(checked.job.engine.grace_s)
        with raise_on_termination(signal.SIGTERM), ended_in_time(limit_s):
            code = _supervise_here(checked, injector, reopen=reopen, resume_hint=resume_hint)
    except SystemExit as end:  # before Prefect took the signal over
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
    if code == EXIT_BY_PLATFORM:
        _leave(checked.job)
    return code


def _leave(job: Job) -> NoReturn:
    """End this process now: at the interpreter's exit Prefect waits for a server that is gone."""
    with suppress(StorageError):
        if not _history(job).attempts:
            stop_started()  # there is nothing to see in its UI
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(EXIT_BY_PLATFORM)


def _history(job: Job) -> RunHistory:
    return Ledger(store_of(job), job.run_id).read() if has_store(job.storage) else RunHistory()


def _supervise_here(
    checked: CheckedJob, injector: KillInjector | None, *, reopen: bool, resume_hint: str
) -> int:
    """Run the flow under a live view, then print the table; return the exit code."""
    job = checked.job
    console = make_console()
    note = partial(write_wait, home_folder() / "runs" / job.run_id, by=Waiter.STARTER)
    with console.status("starting the Prefect server"):
        ui_url = server.use_server(on_wait=note)
        from prefect.exceptions import TerminationSignal  # noqa: PLC0415 imports Prefect

        from perdure.flows.pretrain import pretrain  # noqa: PLC0415 imports Prefect
        from perdure.panel import LiveView  # noqa: PLC0415 imports Prefect
        from perdure.tasks.entry import Left  # noqa: PLC0415 imports Prefect
        from perdure.tasks.env_secrets import check_blocks  # noqa: PLC0415 imports Prefect
        from perdure.tasks.observe import Observation, observed_by  # noqa: PLC0415 imports Prefect
        from perdure.tasks.prefect_client import without_retries  # noqa: PLC0415 imports Prefect
        from perdure.tasks.pretrain import checked_already  # noqa: PLC0415 imports Prefect
        from perdure.tasks.supervision import has_open_attempt  # noqa: PLC0415 imports Prefect

        # A living attempt is adopted, whatever has become of the blocks with its secrets.
        if not has_open_attempt(job):
            with without_retries():
                check_blocks(job)
        if reopen:
            _reopen(job)

    def inject(observation: Observation) -> None:
        if injector is not None and observation.steps:
            injector.inject(partial(_hit, job), observation.steps[-1].step)

    _warn_of_pause(job)
    view, left_text = LiveView(console, ui_url=ui_url), ""
    with view, checked_already(checked), observed_by(view.observe), observed_by(inject):
        try:
            state = pretrain(JobTemplate.of(job), return_state=True)
        except KeyboardInterrupt:
            raise PerdureError("cancelled: the processes of the run are stopped") from None
        except Left as left:
            left_text = str(left)
        except TerminationSignal:
            left_text = _left_text(job)
    if left_text:
        console.print(f"{job.run_id}: {left_text}", soft_wrap=True)
        return EXIT_BY_PLATFORM
    return _conclude(console, job, state, ui_url=ui_url, resume_hint=resume_hint)


def _conclude(
    console: Console, job: Job, state: State[Any], *, ui_url: str, resume_hint: str
) -> int:
    """Print the end of a flow run; return the exit code."""
    from perdure.tasks.entry import NOT_TRAINED  # noqa: PLC0415 imports Prefect

    if state.name in NOT_TRAINED:
        console.print(f"{state.name}: {state.message}", soft_wrap=True)
        console.print(f"'perdure status {job.run_id}' shows it", soft_wrap=True)
        return EXIT_FAILED
    _print_outcome(console, job, ui_url)
    text = _end_text(state.type.value, state.message or str(state.name))
    text = plain(text.replace(REOPEN, resume_hint))
    console.print(text, soft_wrap=True)
    return 0 if state.is_completed() else EXIT_FAILED


def _end_text(kind: str, message: str) -> str:
    # Prefect puts this before the text of every exception (3.8.8).
    return f"{kind.lower()}: {message.removeprefix('Flow run encountered an exception: ')}"


def _warn_of_pause(job: Job) -> None:
    if has_store(job.storage) and is_pause_wanted(store_of(job), job.run_id):
        warn(f"{job.run_id}: a pause is requested; 'perdure resume {job.run_id}' continues it")


def _left_text(job: Job) -> str:
    """Say what SIGTERM to this process alone leaves behind."""
    try:
        view = _history(job).open_attempt
    except StorageError:
        view = None
    if view is None:
        return "ended by the platform (SIGTERM); start it again to go on"
    attempt = "{}.{}".format(*view.key)
    return f"SIGTERM ended this supervisor; attempt {attempt} goes on; start it again to adopt it"


def _hit(job: Job, victim: Victim, index: int) -> bool:
    observer = RunHandle(job, home=home_folder()).observer()
    return observer is not None and observer.kill(victim, index)


def _reopen(job: Job) -> None:
    """Record that a completed run continues; any other run continues without a record.

    Raises:
        InputError: the run was never started.
    """
    ledger = Ledger(store_of(job), job.run_id)
    history = ledger.read()
    if history.job is None:
        raise InputError("--reopen", f"run {job.run_id!r} was never started")
    if history.ended_well:
        ledger.note(RunReopened)
        warn(f"{job.run_id}: reopened")


def _print_outcome(console: Console, job: Job, ui_url: str) -> None:
    if not has_store(job.storage):
        return
    store = store_of(job)
    folder = home_folder() / "runs" / job.run_id
    history = Ledger(store, job.run_id).read()
    rows = story_rows(history)
    if rows:
        console.print(attempts_view(rows, console.width))
    last = history.attempts[-1].ended if history.attempts else None
    if last is not None and last.fault is not None:
        console.print(f"fault: {last.fault.evidence}")
        console.print(plain(f"       {last.fault.explanation}"))
    records = StepReader(store, job.run_id).read()
    kept_steps = drop_lost_steps(records)
    if kept_steps:
        console.print(f"steps kept: {num_kept(history, kept_steps)}")
        _save_picture(console, "loss", folder / "loss.png", loss_picture(history, kept_steps))
    _print_account(console, account_time(history, records, now_s=time.time()), folder)
    console.print(f"Prefect UI: {ui_url}", soft_wrap=True)


def _print_account(console: Console, spent: Account, folder: Path) -> None:
    """Print the account of the wall time, and save its picture."""
    if not spent.intervals:
        return
    console.print(ettr_text(spent))
    console.print(account_table(spent))
    _save_picture(console, "timeline", folder / "timeline.png", timeline_picture(spent))


def _save_picture(console: Console, name: str, path: Path, picture: bytes) -> None:
    """Save a picture and print its place; a full disk costs the picture, not the outcome."""
    try:
        path.write_bytes(picture)
    except OSError as error:
        warn(f"no {name} picture: {error.strerror}: {path}")
        return
    console.print(f"{name} picture: {path}", soft_wrap=True)
