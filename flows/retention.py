"""The checkpoint-retention flow: what a run's checkpoints may lose, on a schedule.

A run trims its own checkpoints after each save; this flow also knows the losses that `keep_best`
asks for, and removes what broken saves left. It may run beside the training.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from storage.collect import GARBAGE_AFTER_S, totals
from tasks.retention import choose, delete, tell
from tasks.states import data_of
from training.job import Job


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
        dry_run: only tell what would be removed.
    """
    chosen = data_of(choose(job, older_than_s, return_state=True))
    if dry_run:
        tell(job, chosen, dry_run=True)
        return Completed(message=f"would remove {totals(chosen)}")
    gone = data_of(delete(job, chosen, older_than_s, return_state=True))
    tell(job, gone, dry_run=False)
    return Completed(message=f"removed {totals(gone)}")
