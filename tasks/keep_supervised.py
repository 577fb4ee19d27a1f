"""Finding runs that nobody supervises, and doing about them what `unsupervised` says.

Known are the runs that were started on this machine, those on a cluster whose jobs the server
keeps, and flow runs that have crashed or that no worker has started. Nothing here depends on
events, which a server may lose, or hold back after a restart (3.8.8). Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Failed, Scheduled

from perdure.storage.errors import StorageError
from perdure.tasks.entry import NOT_TRAINED, job_of
from perdure.tasks.following import is_follower
from perdure.tasks.hooks import take_down_run
from perdure.tasks.limits import limits_of_pretrain
from perdure.tasks.orphaned_task_runs import ADOPTED
from perdure.tasks.relaunch import AUTO_RESUME, PRETRAIN, is_started_for, start, started_for
from perdure.tasks.remote_jobs import learn
from perdure.tasks.runs import run_of, supervisor_of
from perdure.tasks.states import completed
from perdure.tasks.unsupervised import (
    MAX_FAILED_STARTS,
    FlowRunFacts,
    Remedy,
    failed_starts,
    pause_after,
    remedy_for,
)
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.job_registry import (
    known_job,
    mark_ended,
    unended_runs,
    unmark_ended,
)
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.runbook import cancel

QUIET = "NothingToDo"
QUIET_IS_KEPT = timedelta(minutes=10)
TICK_LASTS = timedelta(minutes=10)  # at most, unless its process was killed
CRASH_IS_NEWS_S = 86_400.0  # an older one is not started again out of the blue
MOST = 200  # flow runs in one answer of the server
# Cancelled by type, but no user wants the run to end: another flow run has it.
NOT_OF_USER = NOT_TRAINED | {ADOPTED}


@dataclass(frozen=True, slots=True)
class RunCase:
    """A run, or a flow run that came to none, and what is to be done about it.

    Attributes:
        name: name of the run, or of the flow run when it has no job.
        run: None when the flow run has no job.
        flow_run: id of the one that last supervised it; None when the server has none.
        state: name of the flow run's state.
        message: text of that state.
        remedy: action to take.
        starts: number of starts that failed in a row.
    """

    name: str
    run: RunHandle | None
    flow_run: UUID | None
    state: str
    message: str
    remedy: Remedy
    starts: int = 0


@dataclass(frozen=True, slots=True)
class Unseen:
    """A run that could not be read, and the reason."""

    name: str
    why: str


def look() -> Iterator[RunCase | Unseen]:
    """Everything that this machine can see without a supervisor, whether it is to have one or not.

    Each is yielded when it is seen: what comes later may take its time.

    Raises:
        Exception: the Prefect server did not answer.
    """
    with get_client(sync_client=True) as client:
        handled = set()
        learn(client, home_folder())
        for run_id in unended_runs(home_folder()):
            case = _contained(run_id, partial(_of_known, client, run_id))
            if isinstance(case, RunCase):
                handled.add(case.flow_run)
            if case is not None:
                yield case
        for flow_run in _stranded(client):
            if flow_run.id in handled:
                continue
            case = _contained(flow_run.name, partial(_of_stranded, client, flow_run))
            if case is not None:
                yield case


def _contained(name: str, look_at: Callable[[], RunCase | None]) -> RunCase | Unseen | None:
    try:
        return look_at()
    except httpx.TransportError:
        raise  # no server: there is nothing to do about any of them
    except Exception as error:  # noqa: BLE001 one that is damaged keeps no other from its supervisor
        return Unseen(name, f"cannot be looked at: {type(error).__name__}: {error}")


@task(name="keep", task_run_name="{case.remedy}: {case.name}", cache_policy=NO_CACHE)
def apply(case: RunCase) -> str:
    """Do what a case needs. Returns what was done."""
    done = _apply(case)
    get_run_logger().warning(done)
    return completed(done, done)


def forget_quiet(now: datetime) -> None:
    """Delete the flow runs of this flow that found nothing to do: one a minute says nothing."""
    with get_client(sync_client=True) as client:
        quiet_runs = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["keep-supervised"])),
            flow_run_filter=FlowRunFilter(
                # Cancelled are those that came due together, while no worker was there.
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[QUIET, "Cancelled"])),
                end_time=FlowRunFilterEndTime(before_=now - QUIET_IS_KEPT),
            ),
            sort=FlowRunSort.START_TIME_ASC,
            limit=MOST,
        )
        for flow_run in quiet_runs:
            with suppress(ObjectNotFound):  # another tick was faster
                client.delete_flow_run(flow_run.id)


def end_stuck(now: datetime) -> None:
    """End ticks of this flow that have no process any more: they hold places of its queue."""
    with get_client(sync_client=True) as client:
        begun = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["keep-supervised"])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(
                    type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
                ),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
            limit=MOST,
        )
        for flow_run in begun:
            if flow_run.state is not None and now - flow_run.state.timestamp > TICK_LASTS:
                ended: State[Any] = Cancelled(message="its process is gone")
                client.set_flow_run_state(flow_run.id, ended, force=True)


def limits() -> list[str]:
    """List the concurrency limits that a flow run may be waiting for, a line for each."""
    with get_client(sync_client=True) as client:
        return limits_of_pretrain(client)


def _of_known(client: SyncPrefectClient, run_id: str) -> RunCase | None:
    """The run of that name, when it has begun, goes on, and nobody supervises it."""
    try:
        run = run_of(known_job(home_folder(), run_id))
        if run.ledger.is_supervised():
            return None
        history = run.refresh()
        if history.ended is not None and not history.ended.leftovers:
            note_end(run)
            return None
    except (InputError, StorageError) as error:
        get_run_logger().warning("%s cannot be looked at: %s", run_id, error)
        return None
    return _case(client, run, history, _flow_run_of(client, run_id, history))


def note_end(run: RunHandle) -> None:
    """Mark a run that has ended, so that it is not looked at each minute for ever.

    A supervisor that takes it again first puts that on record, then removes the mark.
    """
    epoch = run.history.epoch
    mark_ended(run.home, run.job.run_id)
    if run.refresh().epoch != epoch:
        unmark_ended(run.home, run.job.run_id)


def _of_stranded(client: SyncPrefectClient, flow_run: FlowRun) -> RunCase | None:
    """A stranded flow run whose run this machine does not know, or that came to none."""
    if is_follower(flow_run.id):
        return None  # it was not to supervise
    try:
        job = job_of(flow_run)
        run = run_of(job) if job is not None else None
        history = run.refresh() if run is not None else RunHistory()
    except (PerdureError, StorageError):
        run, history = None, RunHistory()  # its next start says what is wrong
    taker, flow_run_id = history.supervisor, str(flow_run.id)
    has_passed = (
        taker is not None and taker.flow_run != flow_run_id and flow_run_id in history.flow_runs
    )
    if has_passed or history.ended is not None:
        return None  # another one has supervised the run since then, or it is over
    return _case(client, run, history, flow_run)


def _case(
    client: SyncPrefectClient, run: RunHandle | None, history: RunHistory, flow_run: FlowRun | None
) -> RunCase:
    lease = run.ledger.lease() if run is not None else None
    facts = _facts(client, flow_run, history) if flow_run is not None else None
    remedy = remedy_for(
        history,
        supervised=run is not None and run.ledger.is_supervised(),
        renewed_s=lease.renewed_s if lease is not None else 0.0,
        flow_run=facts,
        now_s=time.time(),
    )
    name = run.job.run_id if run is not None else (flow_run.name if flow_run else "")
    # Prefect takes a flow run in a task's argument for something to wait for (3.8.8).
    return RunCase(
        name=name,
        run=run,
        flow_run=flow_run.id if flow_run is not None else None,
        state=(flow_run.state_name if flow_run is not None else None) or "none",
        message=(flow_run.state.message if flow_run and flow_run.state else None) or "no message",
        remedy=remedy,
        starts=facts.failed_starts if facts is not None else 0,
    )


def _facts(client: SyncPrefectClient, flow_run: FlowRun, history: RunHistory) -> FlowRunFacts:
    states = client.read_flow_run_states(flow_run.id)
    taker = history.supervisor
    is_taker = taker is not None and taker.flow_run == str(flow_run.id)
    is_next = is_started_for(flow_run, flow_run.name, history)
    state = flow_run.state or states[-1]
    walked = [(state.type.value, state.timestamp.timestamp()) for state in states]
    return FlowRunFacts(
        state=state.type.value,
        since_s=state.timestamp.timestamp(),
        is_deployed=flow_run.deployment_id is not None,
        failed_starts=failed_starts(walked, advanced_s=history.advanced_s),
        speaks_for_run=(is_taker or is_next) and flow_run.state_name not in NOT_OF_USER,
    )


def _flow_run_of(client: SyncPrefectClient, run_id: str, history: RunHistory) -> FlowRun | None:
    """The flow run that last supervised a run, or that was started in its place.

    None when the server has it no more. By name only where the ledger names none: an older one says
    nothing of what goes on now.
    """
    started = started_for(client, run_id, history)
    if started is not None:
        return started
    taker = history.supervisor
    if taker is not None and taker.flow_run is not None:
        try:
            return client.read_flow_run(UUID(taker.flow_run))
        except ObjectNotFound:
            return None
    flow_runs = client.read_flow_runs(
        flow_filter=PRETRAIN,
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run_id])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=MOST,
    )
    return next(
        (flow_run for flow_run in flow_runs if flow_run.state_name not in NOT_OF_USER), None
    )


def _stranded(client: SyncPrefectClient) -> list[FlowRun]:
    """Flow runs that lately crashed or were never started, and that are to be brought back.

    A worker that dies when it has just taken a flow run leaves it Pending for ever (3.8.8), with no
    process, or with one that died with it.
    """
    flow_runs = client.read_flow_runs(
        flow_filter=PRETRAIN,
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[StateType.CRASHED, StateType.PENDING])
            ),
            tags=FlowRunFilterTags(all_=[AUTO_RESUME]),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=MOST,
    )
    since = datetime.fromtimestamp(time.time() - CRASH_IS_NEWS_S, UTC)
    return [
        flow_run
        for flow_run in flow_runs
        if flow_run.state is not None
        and flow_run.state.timestamp > since
        and (not flow_run.state.is_pending() or not may_begin(flow_run))
    ]


def may_begin(flow_run: FlowRun) -> bool:
    """Whether a Pending flow run has a process that is to run it, or a container.

    A process that ended with its worker is of this machine: keep-supervised is the worker's own.
    """
    started = flow_run.infrastructure_pid
    if started is None:
        return False
    pid = started.rpartition(":")[2]
    return not pid.isdigit() or psutil.pid_exists(int(pid))


def _apply(case: RunCase) -> str:
    with get_client(sync_client=True) as client:
        match case.remedy, case.flow_run, case.run:
            case Remedy.RESCHEDULE, UUID() as flow_run, _:
                message = "nobody supervised the run: started again"
                rescheduled: State[Any] = Scheduled(name="AwaitingRetry", message=message)
                client.set_flow_run_state(flow_run, rescheduled, force=True)
                return f"{case.name}: its flow run was {case.state}, {message}"
            case Remedy.GIVE_UP, UUID() as flow_run, _:
                reason = _why_given_up(case)
                client.set_flow_run_state(flow_run, Failed(message=reason), force=True)
                return f"{case.name}: {reason}"
            case Remedy.TAKE_DOWN, UUID() as flow_run, RunHandle() as run:
                if not take_down_run(supervisor_of(run.job), flow_run, get_run_logger()):
                    return f"{case.name}: not taken down: by now it is supervised, or over"
                done = "cancelled while nobody supervised it: its processes are stopped"
                client.set_flow_run_state(flow_run, Cancelled(message=done), force=True)
                return f"{case.name}: {done}"
            case (Remedy.START | Remedy.CLEAR) as remedy, _, RunHandle() as run:
                is_over = remedy is Remedy.CLEAR
                return (
                    cancel(supervisor_of(run.job))
                    if is_over
                    else f"{case.name}: {start(client, run)}"
                )
            case _:
                return f"{case.name}: nothing to do"


def _why_given_up(case: RunCase) -> str:
    text = (
        f"given up: {case.starts} starts in a row (allowed: {MAX_FAILED_STARTS}) put nothing new "
        f"on record; the last one: {case.message}"
    )
    view = case.run.history.open_attempt if case.run is not None else None
    if view is None:
        return text
    placement, attempt = view.key
    pause_min = pause_after(case.starts) / 60
    return (
        f"{text}; attempt {placement}.{attempt} trains on without a supervisor, which is tried "
        f"again in {pause_min:.0f} min"
    )
