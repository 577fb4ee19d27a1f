"""Entry of a flow run of `pretrain`: the run that it is for, and whether it trains it.

A flow run that does not train says so by the name of its state. `AlreadySupervised` and `Skipped`
(started by a schedule) are of the type Cancelled: no failure, so nobody is called; no completion,
so nobody takes it for a trained model. A flow run that waits for the end of the run, see
`following`, is AlreadySupervised of the type Running until then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NoReturn
from uuid import UUID
from zoneinfo import ZoneInfo

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException
from prefect.states import Cancelled, Failed
from prefect.utilities.urls import url_for

from perdure.storage.address import has_store
from perdure.storage.errors import StorageError
from perdure.tasks.job_parameter import template_of
from perdure.tasks.prefect_client import client_without_retries
from perdure.tasks.remote_jobs import is_in_pod, is_kept, learn
from perdure.tasks.runs import run_of
from perdure.tasks.ticks import rival_text
from perdure.training.config.job import Job, JobTemplate
from perdure.training.config.run_name import is_of, is_template, name_of
from perdure.training.errors import InputError
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.job_registry import known_job, known_runs
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_identity import completed_before

ALREADY_SUPERVISED = "AlreadySupervised"
SKIPPED = "Skipped"
IMAGE_ENV = "PERDURE_IMAGE"  # of this process's pod
NOT_TRAINED = frozenset({ALREADY_SUPERVISED, SKIPPED})


def name_of_flow_run() -> str:
    """The name of the run, as the name of the flow run that begins."""
    context = FlowRunContext.get()
    assert context is not None  # noqa: S101 Prefect asks inside a flow run
    assert context.flow_run is not None  # noqa: S101 Prefect names a flow run in its context
    flow_run = context.flow_run
    try:
        if taken_job(flow_run) is not None:
            return flow_run.name
        template = template_of(context.parameters or {})
    except InputError:
        return flow_run.name  # the flow says what is wrong
    if not is_template(template.run_id):
        return template.run_id
    run_ids = _known_like(template)
    return name_of(template.run_id, due=_due(flow_run), run_names=run_ids, now_named=flow_run.name)


def job_of(flow_run: FlowRun) -> Job | None:
    """The job that a flow run has begun to train; None when it was given none.

    Raises:
        InputError: the parameters hold no valid job.
    """
    if (flow_run.parameters or {}).get("job") is None:
        return None
    return taken_job(flow_run) or _named(template_of(flow_run.parameters), flow_run)


def taken_job(flow_run: FlowRun) -> Job | None:
    """The job of the run that a flow run has taken, when it is given by name; else None.

    By then the Variable may hold another job, and the flow run is still for this one. It has the
    name of its run, and the ledger says whether that run is its own.

    Raises:
        InputError: what this machine has noted of the run is no job.
    """
    if not isinstance((flow_run.parameters or {}).get("job"), str):
        return None
    if is_in_pod() and flow_run.name not in known_runs(home_folder()):
        with get_client(sync_client=True) as client:
            learn(client, home_folder(), run_id=flow_run.name)
    if flow_run.name not in known_runs(home_folder()):
        return None
    job = known_job(home_folder(), flow_run.name)
    return job if str(flow_run.id) in run_of(job).refresh().flow_runs else None


def enter(parameters: Mapping[str, Any]) -> Job | State[Any]:
    """The job to train now, or the state that says why there is none.

    Args:
        parameters: unchecked parameters of the flow.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    try:
        earlier_job = taken_job(flow_run) if flow_run is not None else None
        run_id, job = _wanted(parameters, flow_run, earlier_job)
    except InputError as error:
        return Failed(message=str(error))
    if flow_run is not None and flow_run.auto_scheduled:
        reason = _why_skipped(run_id, job, flow_run)
        if reason is not None:
            return Cancelled(name=SKIPPED, message=reason)
    if flow_run is not None:
        _keep_image(flow_run)
    return job


def _keep_image(flow_run: FlowRun) -> None:
    """Have later processes of a flow run start from this image: they speak to the run's agents.

    The work pool's image changes with an upgrade, and the pods of a run keep theirs.
    """
    image, variables = os.environ.get(IMAGE_ENV), flow_run.job_variables or {}
    if not image or "image" in variables:
        return
    with suppress(httpx.HTTPError, PrefectException, OSError), client_without_retries() as client:
        client.update_flow_run(flow_run.id, job_variables={**variables, "image": image})


def _wanted(
    parameters: Mapping[str, Any], flow_run: FlowRun | None, earlier_job: Job | None
) -> tuple[str, Job]:
    """Read the run_id and the job; the earlier job when the parameters now name another run.

    Raises:
        InputError: there is none.
    """
    try:
        template = template_of(parameters)
        job = _named(template, flow_run)
        if earlier_job is None or is_same_run(job, earlier_job):
            return template.run_id, job
        why = f"now holds the job of run {job.run_id} in {job.storage.address}"
    except InputError as error:
        if earlier_job is None:
            raise
        why = f"cannot be used now: {error}"
    get_run_logger().warning(
        "the Variable of the job %s; this flow run goes on with run %s", why, earlier_job.run_id
    )
    return earlier_job.run_id, earlier_job


def is_same_run(job: Job, earlier_job: Job) -> bool:
    """Whether a job, maybe with other settings, has the ledger of one that was taken before."""
    return (job.run_id, job.storage.address) == (earlier_job.run_id, earlier_job.storage.address)


def _named(template: JobTemplate, flow_run: FlowRun | None) -> Job:
    if flow_run is not None and is_template(template.run_id):
        return template.named(flow_run.name)
    return template.named(template.run_id)


def left_to_other(job: Job) -> State[Any]:
    """The state of a flow run whose run another one supervises."""
    run = run_of(job)
    text = f"{standing(run, run.refresh())}; this flow run trains nothing"
    return Cancelled(name=_name_of_conflict(), message=text)


class Left(Abort):
    """Ends this process when the flow run is in a last state already."""

    def __init__(self, state: State[Any]) -> None:
        super().__init__(state.message)
        self.state = state  # Prefect logs it as the last one


def finish_with(state: State[Any]) -> State[Any]:
    """End a flow run that trains nothing, in this state.

    A state that is returned and is no completion is logged with a traceback by the process of a
    deployed flow run (3.8.8), as if something had broken.

    Raises:
        Abort: the state is set; this ends the process, and nothing else.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or flow_run.deployment_id is None or state.is_completed():
        return state
    logger = get_run_logger()
    (logger.error if state.is_failed() else logger.warning)(state.message)
    with get_client(sync_client=True) as client:
        answer = client.set_flow_run_state(flow_run.id, state)
    raise Left(answer.state or state)


def leave_with(state: State[Any]) -> NoReturn:
    """End a flow run whose server may be about to end as well: it is told once, and not awaited.

    Raises:
        Abort: always; the engine of Prefect would ask a dead server for minutes (3.8.8).
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is not None:
        with (
            suppress(httpx.HTTPError, PrefectException, OSError),
            client_without_retries() as client,
        ):
            client.set_flow_run_state(flow_run.id, state)
    raise Left(state)


def standing(run: RunHandle, history: RunHistory) -> str:
    """Describe the progress and the supervisor of a run on one line."""
    view, job = history.open_attempt, run.job
    target = f" of {job.target_step}" if job.target_step is not None else ""
    attempt = f"attempt {view.key[0]}.{view.key[1]}, " if view is not None else ""
    text = (
        f"run {job.run_id} is still training: {attempt}step {history.committed_step}{target} saved"
    )
    return f"{text}, {supervised_by(history)}" if history.supervisor is not None else text


def supervised_by(history: RunHistory) -> str:
    """Name the last supervisor of a run, with a link to its flow run."""
    newest = history.supervisor
    if newest is None:
        return "supervised by nobody"
    by = f"process {newest.pid} on {newest.host}"
    if newest.flow_run is not None:
        where = url_for("flow-run", UUID(newest.flow_run)) or newest.flow_run
        by = f"flow run {where} ({by})"
    return f"supervised by {by}"


def _why_skipped(run_id: str, job: Job, tick: FlowRun) -> str | None:
    """Why a tick of a schedule trains nothing; None when it does."""
    if not has_store(job.storage):
        return rival_text(tick)  # the first of all, or preflight says what is wrong
    run = run_of(job)
    history = run.refresh()
    if history.supervisor is not None and history.supervisor.flow_run == str(tick.id):
        return None  # started again: it goes on with what it began
    if run.is_complete:
        return (
            f"{completed_before(job, history)}; "
            "give run_id a field such as {date}, so that each tick has a run of its own"
        )
    if run.ledger.is_supervised():
        return standing(run, history)
    siblings = [name for name in _known_like(job) if is_of(run_id, name)]
    training = (_training(name) for name in siblings if name != job.run_id)
    return next(filter(None, training), None) or rival_text(tick)


def _known_like(job: Job) -> list[str]:
    """The runs that may be of the same template: of this machine, or of the cluster."""
    if is_kept(job):
        with get_client(sync_client=True) as client:
            learn(client, home_folder())
    return known_runs(home_folder())


def _training(run_id: str) -> str | None:
    """Describe the progress of a run of this machine; None when it is not training."""
    try:
        run = run_of(known_job(home_folder(), run_id))
        history = run.refresh()
    except InputError:
        return None  # of another version: not this schedule's
    except StorageError as error:
        # This is an old run; no later tick would train for it.
        get_run_logger().warning("taken not to train: %s cannot be read: %s", run_id, error)
        return None
    alive = history.open_attempt is not None or run.ledger.is_supervised()
    return standing(run, history) if alive and history.ended is None else None


def _name_of_conflict() -> str:
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    by_schedule = flow_run is not None and flow_run.auto_scheduled
    return SKIPPED if by_schedule else ALREADY_SUPERVISED


def _due(flow_run: FlowRun) -> datetime:
    """Time at which a flow run was due, in the time zone of its schedule, else in UTC."""
    due = flow_run.expected_start_time or datetime.now(UTC)
    made_by, deployment = flow_run.created_by, flow_run.deployment_id
    if made_by is None or deployment is None or not flow_run.auto_scheduled:
        return due.astimezone(UTC)
    with get_client(sync_client=True) as client:
        schedules = client.read_deployment_schedules(deployment)
    zones = [
        getattr(schedule.schedule, "timezone", None)
        for schedule in schedules
        if schedule.id == made_by.id
    ]
    return due.astimezone(ZoneInfo(zones[0]) if zones and zones[0] else UTC)
