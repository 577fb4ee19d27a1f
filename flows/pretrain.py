"""The pretrain flow: the order of work, as a runbook would have it.

One flow run per run; started again, it takes the run up where the ledger says it stands, and
adopts the attempt that still lives.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from tasks.hooks import leave_adoptable, take_down
from tasks.pretraining import place, preflight, prepare_data, report, train
from tasks.states import data_of
from tasks.supervision import Supervision
from training.errors import EngineError
from training.job import Job
from training.policy.ladder import Rung
from training.supervisor.watch import EndKind


@flow(
    name="pretrain",
    flow_run_name="{job.run_id}",
    on_cancellation=[take_down],
    on_crashed=[leave_adoptable],
)
def pretrain(job: Job) -> State[Any]:
    """Pretrain until the target step is reached, whatever breaks on the way."""
    preflight(job)
    with Supervision(job, get_run_logger()) as supervision:
        if supervision.run.history.ended_well:
            return Completed(message=f"run {job.run_id} was completed before")
        manifest_key = _data_of(job, supervision)
        while True:
            named_place = place.with_options(task_run_name=_place_name(supervision))
            try:
                placement = data_of(named_place(supervision, return_state=True))
            except EngineError as error:
                return _end(supervision, "failed", f"no placement: {error}")
            state = train.with_options(
                task_run_name=f"placement {placement.number} on {','.join(placement.nodes)}",
                retry_delay_seconds=job.restart.delay_s,
            )(supervision, placement, manifest_key, return_state=True)
            verdict = data_of(state)
            if verdict.kind is EndKind.COMPLETED:
                return _end(supervision, "completed", f"step {verdict.step} reached")
            if verdict.kind is EndKind.STOPPED:
                return _end(supervision, "cancelled", "stopped on request")
            if verdict.decision is not None and verdict.decision.rung is Rung.STOP:
                return _end(supervision, "failed", verdict.decision.reason)


@flow(name="prepare-data", flow_run_name="{job.run_id}")
def prepare(job: Job) -> None:
    """Prepare the corpus of a job, so that its run finds everything there."""
    preflight(job)
    prepare_data(job, return_state=True).result()


def _data_of(job: Job, supervision: Supervision) -> str | None:
    if job.worker.is_command:
        return None
    supervision.says("preparing data")
    result = data_of(prepare_data(job, return_state=True))
    supervision.run.record_data(result)
    return result.manifest_key


def _place_name(supervision: Supervision) -> str:
    placed = supervision.run.history.placement
    return f"place after {placed.placement}" if placed is not None else "place"


def _end(supervision: Supervision, outcome: str, message: str) -> State[Any]:
    """Put the end on record, report, and name the flow's final state."""
    run = supervision.run
    run.end(outcome, message)
    supervision.says(outcome)
    report(supervision)
    attempts = len(run.history.attempts)
    text = f"{message}; {attempts} attempts on {len(run.history.placements)} placements"
    match outcome:
        case "completed":
            return Completed(message=text)
        case "cancelled":
            return Cancelled(message=text)
        case _:
            return Failed(message=text)
