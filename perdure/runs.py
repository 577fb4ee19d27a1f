"""Runs by their name, their stores, and the terminal: what several commands need."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from perdure import server
from storage.address import Credentials, open_store
from storage.objects import ObjectStore
from training.files import home_folder
from training.job import Job, load_job
from training.supervisor.job_registry import job_path, known_job
from training.supervisor.run import Run

PIPED_WIDTH = 180


def known_run(run_id: str) -> tuple[Job, ObjectStore]:
    """The job of a run that was started on this machine, and its store.

    Raises:
        InputError: there is no such run.
    """
    job = known_job(home_folder(), run_id)
    return job, store_of(job)


def named_run(run: str) -> tuple[Job, ObjectStore]:
    """The run of a run_id that is known on this machine, or of a job file.

    Raises:
        InputError: there is no such run or file, or the file is no job.
    """
    path = Path(run)
    is_name = "/" not in run and "." not in run
    if is_name and (job_path(home_folder(), run).exists() or not path.is_file()):
        return known_run(run)
    job = load_job(path)
    return job, store_of(job)


def store_of(job: Job) -> ObjectStore:
    """The job's store, with the keys of its Prefect block if it names one."""
    return open_store(job.storage, credentials_of(job))


def run_to_look_at(run_id: str) -> Run:
    """A run that is known on this machine, or of a job file; not taken by this process.

    Raises:
        InputError: there is no such run or file, or the file is no job.
    """
    job, _ = named_run(run_id)
    return Run(job, home=home_folder(), credentials=credentials_of(job))


def credentials_of(job: Job) -> Credentials | None:
    """The keys of the job's store in the Prefect block that it names; None: it names none.

    Raises:
        InputError: there is no such block.
    """
    if job.storage.credentials_block is None:
        return None
    server.use_server()
    from tasks.credentials import credentials_of as of_block  # noqa: PLC0415 imports Prefect

    return of_block(job.storage)


def make_console() -> Console:
    """The terminal; piped output is not folded to the width of one that is not there."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)
