"""Access to runs by name: their jobs, stores, credentials and open attempts."""

from __future__ import annotations

from pathlib import Path

from perdure import server
from perdure.storage.address import Credentials, open_store
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.config.job_file import load_job
from perdure.training.errors import InputError
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.job_registry import job_path, known_job
from perdure.training.supervisor.observing import AttemptObserver
from perdure.training.supervisor.run_handle import RunHandle


def named_job(run: str) -> Job:
    """The job of a run that was started on this machine, or of a job file.

    Args:
        run: run_id or path.

    Raises:
        InputError: there is no such run or file, or the file holds no job.
    """
    path = Path(run)
    # A file that happens to have the name of a known run does not hide it.
    is_name = "/" not in run and "." not in run
    if is_name and (job_path(home_folder(), run).exists() or not path.is_file()):
        return known_job(home_folder(), run)
    return load_job(path)


def store_of(job: Job) -> ObjectStore:
    """The job's store, with the keys of its Prefect block if it names one."""
    return open_store(job.storage, credentials_of(job))


def run_to_observe(run: str, *, is_brief: bool = False) -> RunHandle:
    """The run that `named_job` finds, to read; another process may supervise it.

    Args:
        run: run_id or path.
        is_brief: whether a silent store is given up soon.

    Raises:
        InputError: there is none.
    """
    job = named_job(run)
    credentials = credentials_of(job)
    return RunHandle(job, home=home_folder(), credentials=credentials, is_brief=is_brief)


def credentials_of(job: Job) -> Credentials | None:
    """The keys of the job's store, from its Prefect block; None: the job names no block.

    Raises:
        InputError: there is no such block, or no server to read it from.
    """
    if job.storage.credentials_block is None:
        return None  # saves a server, and Prefect's second and 82 MB of imports (3.8.8)
    try:
        server.use_server()
    except InputError as error:
        field = "storage.credentials_block"
        raise InputError(field, f"is kept on the Prefect server; {error}") from error
    from perdure.tasks.credentials import credentials_of as of_block  # noqa: PLC0415 imports Prefect
    from perdure.tasks.prefect_client import without_retries  # noqa: PLC0415 imports Prefect

    with without_retries():
        return of_block(job.storage)


class OpenAttempt:
    """Keeps the observer of a run's open attempt for as long as the attempt lives.

    Args:
        run: a run that another process may supervise.
    """

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._key: tuple[int, int] | None = None
        self._observer: AttemptObserver | None = None

    def observer(self, history: RunHistory) -> AttemptObserver | None:
        """The observer of the open attempt of a history; None: no attempt is open."""
        view = history.open_attempt
        if view is None or history.ended is not None:
            return None
        # A new observer would read the attempt's log from its beginning at every poll.
        if self._observer is None or self._key != view.key:
            self._key, self._observer = view.key, self._run.observer()
        return self._observer
