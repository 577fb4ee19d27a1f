"""The tasks of the retention of checkpoints: three for one run, or one for each of many runs."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage.address import open_store
from storage.checkpoint import CheckpointStore
from storage.collect import Removal, abort_uploads, carry_out, totals
from storage.errors import StorageError
from tasks.credentials import credentials_of
from tasks.states import completed, failed
from training.errors import PerdureError
from training.files import home_folder
from training.job import Job
from training.supervisor.checkpoints import removals
from training.supervisor.job_registry import known_job

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


@task(name="retain-run", task_run_name="{run_id}", tags=[TAG], cache_policy=NO_CACHE)
def retain_run(run_id: str, older_than_s: float, *, dry_run: bool) -> bool:
    """All of it for a run of this machine; a line in its state, and a table if something goes.

    Returns:
        Whether it could be done.
    """
    try:
        job = known_job(home_folder(), run_id)
        chosen = _chosen(job, older_than_s)
        gone, uploads = (chosen, 0) if dry_run else _delete(job, chosen, older_than_s)
    except (PerdureError, StorageError) as error:
        return failed(False, str(error), name="Failed")
    if gone:
        _publish(job, gone, dry_run=dry_run)
    elif not uploads:
        return completed(True, "nothing to remove")
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
