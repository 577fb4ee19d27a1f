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
from tasks.pretraining import check, place, preflight, prepare_data, report, train
from tasks.states import data_of
from tasks.supervision import Supervision, has_open_attempt
from training.engines.base import Placement
from training.errors import EngineError
from training.job import Job
from training.recovery.faults import FaultClass
from training.recovery.ladder import Rung
from training.supervisor.run import Verdict
from training.supervisor.watch import EndKind


@flow(
    name="pretrain",
    flow_run_name="{job.run_id}",
    on_cancellation=[take_down],
    on_crashed=[leave_adoptable],
    persist_result=False,
)
def pretrain(job: Job) -> State[Any]:
    """Pretrain until the target step is reached, whatever breaks on the way."""
    if not has_open_attempt(job):
        preflight(job)
    with Supervision(job, get_run_logger()) as supervision:
        if supervision.run.is_complete:
            return Completed(message=f"run {job.run_id} was completed before")
        pending = supervision.run.pending_end()
        if pending is not None:
            return _end_with(supervision, pending)
        manifest_key = _data_of(job, supervision)
        while True:
            try:
                placement = _place(supervision)
            except EngineError as error:
                outcome = "cancelled" if supervision.stop_wanted() else "failed"
                return _end(supervision, outcome, f"no placement: {error}")
            state = train.with_options(
                task_run_name=f"placement {placement.number} on {','.join(placement.nodes)}"
            )(supervision, placement, manifest_key, return_state=True)
            verdict = data_of(state)
            stops = verdict.decision is not None and verdict.decision.rung is Rung.STOP
            if verdict.kind is not EndKind.FAILED or stops:
                return _end_with(supervision, verdict)
            if verdict.fault is not None and verdict.fault.fault_class is FaultClass.STORAGE_ERROR:
                manifest_key = _data_of(job, supervision)  # a shard may be damaged: redo it


@flow(name="prepare-data", flow_run_name="{job.run_id}")
def prepare(job: Job) -> None:
    """Prepare the corpus of a job, so that its run finds everything there."""
    preflight(job)
    prepare_data(job, return_state=True).result()


def _end_with(supervision: Supervision, verdict: Verdict) -> State[Any]:
    match verdict.kind:
        case EndKind.COMPLETED:
            step = verdict.step
            told = f"step {step} reached" if step is not None else "the command has ended well"
            return _end(supervision, "completed", told)
        case EndKind.STOPPED:
            return _end(supervision, "cancelled", "stopped on request")
        case EndKind.FAILED:
            reason = verdict.decision.reason if verdict.decision is not None else "failed"
            return _end(supervision, "failed", reason)


def _data_of(job: Job, supervision: Supervision) -> str | None:
    if job.worker.is_command or job.data is None:
        return None
    supervision.says("preparing data")
    state = prepare_data(job, return_state=True)
    history = supervision.run.history
    if state.is_failed() and history.open_attempt is not None and history.data:
        # The corpus is not needed to go on watching an attempt that has read its shards.
        supervision.logger.warning("data not checked: %s", state.message)
        return history.data[-1].manifest_key
    result = data_of(state)
    supervision.run.record_data(result)
    return result.manifest_key


def _place(supervision: Supervision) -> Placement:
    """The placement of the next attempt; nodes that fail their checks are left for others.

    Raises:
        EngineError: there is none.
    """
    while True:
        named = place.with_options(task_run_name=_place_name(supervision))
        placement = data_of(named(supervision, return_state=True))
        if not supervision.run.wants_checks(placement):
            return placement
        checked = check.with_options(task_run_name=f"check placement {placement.number}")
        if data_of(checked(supervision, placement, return_state=True)):
            return placement


def _place_name(supervision: Supervision) -> str:
    placed = supervision.run.history.placement
    return f"place after {placed.placement}" if placed is not None else "place"


def _end(supervision: Supervision, outcome: str, message: str) -> State[Any]:
    """Put the end on record, report, and name the flow's final state."""
    run = supervision.run
    run.end(outcome, message)
    supervision.says(outcome)
    report(supervision, return_state=True)  # a picture that fails changes no outcome
    attempts = len(run.history.attempts)
    text = f"{message}; {attempts} attempts on {len(run.history.placements)} placements"
    match outcome:
        case "completed":
            return Completed(message=text)
        case "cancelled":
            return Cancelled(message=text)
        case _:
            return Failed(message=text)
