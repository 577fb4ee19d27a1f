"""The tasks of the retention of a run's checkpoints: choosing, deleting, reporting."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage.address import open_store
from storage.checkpoint import CheckpointStore
from storage.collect import Removal, abort_uploads, carry_out, totals
from tasks.credentials import credentials_of
from tasks.states import completed
from training.job import Job
from training.supervisor.checkpoints import removals


@task(name="choose", task_run_name="choose", cache_policy=NO_CACHE)
def choose(job: Job, older_than_s: float) -> list[Removal]:
    """What the job's retention policy gives up, and what broken saves left."""
    found = removals(job, _checkpoints_of(job), garbage_after_s=older_than_s, with_retention=True)
    logger = get_run_logger()
    for removal in found:
        place = "" if removal.step is None else f" of step {removal.step}"
        logger.info("%s%s: %s", removal.kind, place, removal.reason)
    return completed(found, totals(found))


@task(name="delete", task_run_name="delete", cache_policy=NO_CACHE)
def delete(job: Job, chosen: Sequence[Removal], older_than_s: float) -> list[Removal]:
    """Delete what was chosen, as far as it has not changed since."""
    checkpoints = _checkpoints_of(job)
    gone = carry_out(checkpoints, chosen)
    uploads = abort_uploads(checkpoints, older_than_s)
    return completed(gone, f"{totals(gone)}; unfinished uploads aborted: {uploads}")


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def publish_table(job: Job, gone: Sequence[Removal], *, dry_run: bool) -> None:
    """The table of what was deleted, as an artifact of the run."""
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
        description=f"{'Would be removed' if dry_run else 'Removed'}: {totals(gone)}",
    )


def _checkpoints_of(job: Job) -> CheckpointStore:
    return CheckpointStore(open_store(job.storage, credentials_of(job.storage)), job.run_id)
