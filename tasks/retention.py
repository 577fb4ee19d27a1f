"""The tasks of the retention of checkpoints: three for one run, or one for each of many runs.

Of many runs only those have a task where something goes or is wrong: every hour a task run and its
lines for each run that ever was would be most of what the server keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.collect import Removal, abort_uploads, carry_out, totals
from perdure.storage.errors import StorageError
from perdure.tasks.credentials import credentials_of
from perdure.tasks.states import completed, failed
from perdure.training.config.job import Job
from perdure.training.errors import PerdureError
from perdure.training.files import home_folder
from perdure.training.supervisor.checkpoints import removals
from perdure.training.supervisor.job_registry import known_job

TAG = "retention"


@task(name="choose", task_run_name="choose", cache_policy=NO_CACHE)
def choose(job: Job, older_than_s: float) -> list[Removal]:
    """What the job's retention policy gives up, and what broken saves left."""
    found = _chosen(job, older_than_s)
    logger = get_run_logger()
    for removal in found:
        place = "" if removal.step is None else f" of step {removal.step}"
        logger.info("%s%s: %s", removal.kind, place, removal.reason)
    return completed(found, totals(found))


@task(name="delete", task_run_name="delete", cache_policy=NO_CACHE)
def delete(job: Job, chosen: Sequence[Removal], older_than_s: float) -> list[Removal]:
    """Delete what was chosen, as far as it has not changed since."""
    gone, uploads = _delete(job, chosen, older_than_s)
    return completed(gone, f"{totals(gone)}; unfinished uploads aborted: {uploads}")


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def publish_table(job: Job, gone: Sequence[Removal], *, dry_run: bool) -> None:
    """The table of what was deleted, as an artifact of the run."""
    _publish(job, gone, dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class ToDo:
    """What the retention has to do for a run of this machine.

    Attributes:
        run_id: of the run.
        chosen: what is to go.
        error: why that is not known; None: it is.
    """

    run_id: str
    chosen: tuple[Removal, ...] = ()
    error: str | None = None


def look_at(run_id: str, older_than_s: float, *, dry_run: bool) -> ToDo | None:
    """What is to be done for a run; None: nothing that anybody has to see."""
    try:
        job = known_job(home_folder(), run_id)
        chosen = _chosen(job, older_than_s)
        if not chosen and not dry_run:
            abort_uploads(_checkpoints_of(job), older_than_s)
    except (PerdureError, StorageError) as error:
        return ToDo(run_id, error=str(error))
    return ToDo(run_id, tuple(chosen)) if chosen else None


@task(name="retain-run", task_run_name="{todo.run_id}", tags=[TAG], cache_policy=NO_CACHE)
def retain_run(todo: ToDo, older_than_s: float, *, dry_run: bool) -> bool:
    """Do it: a line in the state, and a table of what went.

    Returns:
        Whether it could be done.
    """
    if todo.error is not None:
        return failed(False, todo.error, name="Failed")
    try:
        job = known_job(home_folder(), todo.run_id)
        gone, uploads = list(todo.chosen), 0
        if not dry_run:
            gone, uploads = _delete(job, todo.chosen, older_than_s)
    except (PerdureError, StorageError) as error:
        return failed(False, str(error), name="Failed")
    if gone:
        _publish(job, gone, dry_run=dry_run)
    message = f"{_verb(dry_run=dry_run)}: {totals(gone)}; unfinished uploads aborted: {uploads}"
    return completed(True, message)


def _chosen(job: Job, older_than_s: float) -> list[Removal]:
    checkpoints = _checkpoints_of(job)
    return removals(job, checkpoints, garbage_after_s=older_than_s, with_retention=True)


def _delete(job: Job, chosen: Sequence[Removal], older_than_s: float) -> tuple[list[Removal], int]:
    """What is gone, and how many uploads that nobody finished were aborted."""
    checkpoints = _checkpoints_of(job)
    gone = carry_out(checkpoints, chosen)
    return gone, abort_uploads(checkpoints, older_than_s)


def _publish(job: Job, gone: Sequence[Removal], *, dry_run: bool) -> None:
    create_table_artifact(
        [
            {
                "what": removal.kind.value,
                "step": removal.step,
                "objects": len(removal.objects),
                "size_bytes": removal.size_bytes,
                "why": removal.reason,
            }
            for removal in gone
        ],
        key=f"{job.run_id}-retention",
        description=f"{_verb(dry_run=dry_run)}: {totals(gone)}",
    )


def _verb(*, dry_run: bool) -> str:
    return "Would be removed" if dry_run else "Removed"


def _checkpoints_of(job: Job) -> CheckpointStore:
    return CheckpointStore(open_store(job.storage, credentials_of(job.storage)), job.run_id)
