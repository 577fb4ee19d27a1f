"""The checkpoint-retention flow: what the checkpoints of runs may lose, on a schedule.

A run trims its own checkpoints after each save; `retain` also knows the losses that `keep_best`
asks for, and removes what broken saves left. It may run beside the training.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Completed, Failed
from pydantic import Field

from perdure.storage.collect import GARBAGE_AFTER_S, totals
from perdure.tasks.job_parameter import JobParameter
from perdure.tasks.remote_jobs import learn
from perdure.tasks.retention import choose, delete, look_at, publish_table, retain_run
from perdure.tasks.states import data_of
from perdure.tasks.ticks import newer_tick
from perdure.training.config.job import Job
from perdure.training.files import home_folder
from perdure.training.reporting.markdown import counted
from perdure.training.supervisor.job_registry import known_runs


def _name_of_subject() -> str:
    context = FlowRunContext.get()
    job = (context.parameters or {}).get("job") if context is not None else None
    return job.run_id if isinstance(job, Job) else "all runs"


@flow(name="checkpoint-retention", flow_run_name=_name_of_subject, persist_result=False)
def retain(
    job: JobParameter | None = None,
    older_than_s: Annotated[float, Field(ge=0)] = GARBAGE_AFTER_S,
    dry_run: bool = False,  # noqa: FBT001, FBT002 a flow's parameters are given by name
) -> State[Any]:
    """Apply the retention policy of runs to them, and remove what broken saves left.

    Args:
        job: job of the pretrain deployment, or the name of a Prefect Variable; without a job, every
            run that was started on this machine, one after the other.
        older_than_s: age in seconds from which what a broken save left is garbage.
        dry_run: only list what would be removed.
    """
    if job is None:
        return _retain_all(older_than_s, dry_run=dry_run)
    chosen = data_of(choose(job, older_than_s, return_state=True))
    if dry_run:
        publish_table(job, chosen, dry_run=True)
        return Completed(message=f"would remove {totals(chosen)}")
    deleted = data_of(delete(job, chosen, older_than_s, return_state=True))
    publish_table(job, deleted, dry_run=False)
    return Completed(message=f"removed {totals(deleted)}")


def _retain_all(older_than_s: float, *, dry_run: bool) -> State[Any]:
    newer = newer_tick()
    if newer is not None:
        return Completed(message=newer)
    with get_client(sync_client=True) as client:
        learn(client, home_folder())
    runs = known_runs(home_folder())
    # A task and not a flow each: a flow takes a second, a task milliseconds (3.8.8).
    states = {}
    for run_id in runs:
        todo = look_at(run_id, older_than_s, dry_run=dry_run)
        if todo is not None:
            states[run_id] = retain_run(todo, older_than_s, dry_run=dry_run, return_state=True)
    bad = [run_id for run_id, state in states.items() if not state.is_completed()]
    if bad:
        return Failed(message=f"{len(bad)} of {len(runs)} runs failed: {', '.join(bad)}")
    summary = f"{counted(len(runs), 'run')} of this machine looked after"
    return Completed(message=f"{summary}; with something to remove: {', '.join(states) or 'none'}")
