"""Ticks of a schedule that are started together: of a backlog, only the newest has work to do.

A worker that comes back starts all that came due without it. Each of them decides alike from the
server's record of the others, without waiting for an event: a tick ends for a newer one that was
due before it began, and for an older one that began before it was due.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.states import Cancelled

BEGINNING = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]
BEGINS_WITHIN = timedelta(minutes=10)  # a tick that runs for longer has begun its work
MOST = 200  # flow runs in one answer of the server


@dataclass(frozen=True, slots=True)
class Tick:
    """A flow run of a schedule that has not ended.

    Attributes:
        due: when it was to start.
        began: when a worker took it; None: none did yet. Its process may run much later: on a
            busy machine the next tick is due before it does.
        changed: when it entered its state.
    """

    name: str
    due: datetime
    began: datetime | None
    changed: datetime


def rival_of(tick: Tick, siblings: Iterable[Tick], *, now: datetime) -> Tick | None:
    """The tick that this one leaves the work to; None: it does the work itself.

    Two ticks never leave it to each other: of two, the newer one gives way exactly where the older
    one has begun before the newer one was due.

    Args:
        tick: begins now.
        siblings: of the same schedule.
        now: time of the server's answer.
    """
    began = tick.began or now
    for other in sorted(siblings, key=lambda other: other.due, reverse=True):
        if other.due > tick.due:
            is_stuck = other.began is None and now - max(other.due, other.changed) > BEGINS_WITHIN
            if other.due <= began and not is_stuck and not _is_at_work(other, now):
                return other
        elif other.began is not None and other.began < tick.due and not _is_at_work(other, now):
            return other
    return None


def _is_at_work(tick: Tick, now: datetime) -> bool:
    return tick.began is not None and now - tick.began > BEGINS_WITHIN


def newer_tick() -> str | None:
    """Say why the tick that this process is ends at once; None: it is none, or has to work.

    Unlike a training, the work of these may be done twice: an older one may hang.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or not flow_run.auto_scheduled:
        return None
    return rival_text(flow_run, only_newer=True)


def rival_text(tick: FlowRun, *, only_newer: bool = False) -> str | None:
    """Name the tick that this one leaves the work to; None when there is none."""
    made_by, deployment = tick.created_by, tick.deployment_id
    if made_by is None or deployment is None or tick.expected_start_time is None:
        return None
    now = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        flow_runs = [
            flow_run
            for flow_run in _due_flow_runs(client, tick, now)
            if flow_run.created_by == made_by
        ]
        _skip_overtaken(client, flow_runs)
        ticks = {flow_run.id: _tick_of(client, flow_run) for flow_run in flow_runs}
        itself = ticks.pop(tick.id, None) or _tick_of(client, tick)
    if itself is None:
        return None
    siblings = [other for other in ticks.values() if other is not None]
    if only_newer:
        siblings = [other for other in siblings if other.due > itself.due]
    rival = rival_of(itself, siblings, now=now)
    if rival is None:
        return None
    when = "after it" if rival.due > itself.due else "before it and begins as well"
    return f"flow run {rival.name}, which was due {when}, does the work of this tick"


def _skip_overtaken(client: SyncPrefectClient, flow_runs: Sequence[FlowRun]) -> None:
    """End ticks that no process has begun, up to the newest: each costs an interpreter's start.

    Args:
        client: client of the Prefect server.
        flow_runs: ticks that are due, newest first.
    """
    for flow_run in flow_runs[1:]:
        is_begun = flow_run.start_time is not None or flow_run.run_count > 0
        if flow_run.state is not None and flow_run.state.is_scheduled() and not is_begun:
            message = f"flow run {flow_runs[0].name}, which was due after it, does its work"
            skipped: State[object] = Cancelled(message=message)
            client.set_flow_run_state(flow_run.id, skipped)


def _due_flow_runs(client: SyncPrefectClient, tick: FlowRun, now: datetime) -> list[FlowRun]:
    """List the newest flow runs of a deployment that are due and have not ended."""
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[tick.deployment_id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=BEGINNING)),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=now),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=MOST,
    )


def _tick_of(client: SyncPrefectClient, flow_run: FlowRun) -> Tick | None:
    state, due = flow_run.state, flow_run.expected_start_time
    if state is None or due is None:
        return None
    states = [] if state.is_scheduled() else client.read_flow_run_states(flow_run.id)
    begin_times = [past.timestamp for past in states if past.is_pending() or past.is_running()]
    return Tick(flow_run.name, due, min(begin_times, default=None), state.timestamp)
