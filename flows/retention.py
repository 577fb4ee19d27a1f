"""The checkpoint-retention flows: what the checkpoints of runs may lose, on a schedule.

A run trims its own checkpoints after each save; `retain` also knows the losses that `keep_best`
asks for, and removes what broken saves left. It may run beside the training. `retain_all`
does it for the runs of this machine, so that its schedule needs no parameter.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from storage.collect import GARBAGE_AFTER_S, totals
from tasks.retention import choose, delete, publish_table
from tasks.states import data_of
from training.errors import InputError
from training.files import home_folder
from training.job import Job
from training.supervisor.job_registry import known_job, known_runs


@flow(name="checkpoint-retention", flow_run_name="{job.run_id}", persist_result=False)
def retain(
    job: Job,
    older_than_s: Annotated[float, Field(ge=0)] = GARBAGE_AFTER_S,
    dry_run: bool = False,  # noqa: FBT001, FBT002 a flow's parameters are given by name
) -> State[Any]:
    """Apply the retention policy of a job to its run, and remove what broken saves left.

    Args:
        job: as the pretrain deployment has it.
        older_than_s: age in seconds from which what a broken save left is garbage.
        dry_run: only list what would be removed.
    """
    chosen = data_of(choose(job, older_than_s, return_state=True))
    if dry_run:
        publish_table(job, chosen, dry_run=True)
        return Completed(message=f"would remove {totals(chosen)}")
    gone = data_of(delete(job, chosen, older_than_s, return_state=True))
    publish_table(job, gone, dry_run=False)
    return Completed(message=f"removed {totals(gone)}")


@flow(name="checkpoint-retention-of-all", persist_result=False)
def retain_all(
    older_than_s: Annotated[float, Field(ge=0)] = GARBAGE_AFTER_S,
    dry_run: bool = False,  # noqa: FBT001, FBT002 a flow's parameters are given by name
) -> State[Any]:
    """Do the same for every run that was started on this machine, one after the other.

    Args:
        older_than_s: age in seconds from which what a broken save left is garbage.
        dry_run: only list what would be removed.
    """
    home = home_folder()
    runs, failed = known_runs(home), []
    for run_id in runs:
        try:
            job = known_job(home, run_id)
        except InputError as error:
            get_run_logger().error("%s: %s", run_id, error)
            failed.append(run_id)
            continue
        state: State[Any] = retain(job, older_than_s, dry_run, return_state=True)
        if not state.is_completed():
            failed.append(run_id)
    if failed:
        return Failed(message=f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return Completed(message=f"runs looked after: {', '.join(runs) or 'none on this machine'}")
