"""Automations: those that bring a lost supervisor back, and one's own that answer faults.

Prefect's open-source server notices nothing by itself when a flow's process and its worker die
together, and does not retry what has crashed. Heartbeat lost -> Crashed, Crashed -> scheduled
again: the same flow run is picked up by a worker and adopts the attempt, which never stopped.
Both see events, which a server that was restarted may hold back for a quarter of an hour; what
they miss is found by the flow `keep-supervised`.

`ensure` is a build step of prefect.yaml: `prefect deploy` creates or updates them.
`on_fault` makes one that sends a message, or starts something, when a certain fault happens:

    put([on_fault(FaultClass.NODE_LOST, [RunDeployment(source="selected", deployment_id=...)])])

Facts about triggers and states: Prefect 3.8.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists

from perdure.tasks.relaunch import AUTO_RESUME
from perdure.tasks.states import BY_PLATFORM
from perdure.training.recovery.faults import FaultClass

SKIP_LATE_TAG = "skip-late"
TICKS = "ticks"  # work queue of what a schedule starts again and again
MAX_TICKS = 3
REQUEST_TIMEOUT_S = 20.0
# Two and a half heartbeats of 30 s, the shortest that Prefect allows.
HEARTBEAT_LOST_AFTER = timedelta(seconds=75)
# A worker reports the end of a process a second time, 12 to 20 s after the first, about whatever
# the flow run is by then: started again before that, its new start would be reported as crashed.
CRASHED_FOR = timedelta(seconds=30)
TERMINAL_EVENTS = frozenset(
    f"prefect.flow-run.{name}"
    for name in ("Completed", "Failed", "Cancelled", "Crashed", BY_PLATFORM)
)
# Events that show that a crashed flow run has been taken care of.
GOES_ON_EVENTS = frozenset(
    f"prefect.flow-run.{name}"
    for name in (
        "Scheduled", "AwaitingRetry", "Pending", "Submitting", "Running", "Retrying",
        "Completed", "Failed", "Cancelling", "Cancelled",
    )
)  # fmt: skip


def automations() -> list[Automation]:
    """Build the automations that the deployments rely on."""
    lost = _on_flow_runs(
        AUTO_RESUME,
        name="perdure: heartbeat lost -> Crashed",
        description="A supervisor that sends no heartbeat any more is taken for dead.",
        trigger_events=frozenset({"prefect.flow-run.heartbeat"}),
        expect=TERMINAL_EVENTS | {"prefect.flow-run.heartbeat"},
        within=HEARTBEAT_LOST_AFTER,
        # Without force: a false alarm about a finished run bounces off its final state.
        action=ChangeFlowRunState(state=StateType.CRASHED, message="heartbeat lost"),
    )
    restart = _on_flow_runs(
        AUTO_RESUME,
        name="perdure: Crashed -> run again",
        description="A crashed supervisor is started again and adopts the living attempt.",
        trigger_events=frozenset({"prefect.flow-run.Crashed", f"prefect.flow-run.{BY_PLATFORM}"}),
        expect=GOES_ON_EVENTS,
        within=CRASHED_FOR,
        action=ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", force=True),
    )
    late = _on_flow_runs(
        SKIP_LATE_TAG,
        name="perdure: late tick -> Cancelled",
        description="Ticks that no worker took would all be started at once by the next one.",
        expect=frozenset({"prefect.flow-run.Late"}),
        action=ChangeFlowRunState(state=StateType.CANCELLED, message="no worker took it in time"),
    )
    return [lost, restart, late]


def _on_flow_runs(
    tag: str,
    *,
    name: str,
    description: str,
    expect: frozenset[str],
    action: ActionTypes,
    trigger_events: frozenset[str] = frozenset(),
    within: timedelta = timedelta(0),
) -> Automation:
    """An automation on flow runs with a tag.

    With `trigger_events`, it acts where none of the expected events follows one of them in time.
    """
    return Automation(
        name=name,
        description=description,
        trigger=EventTrigger(
            after=set(trigger_events),
            expect=set(expect),
            match=ResourceSpecification.model_validate(
                {"prefect.resource.id": ["prefect.flow-run.*"]}
            ),
            match_related=ResourceSpecification.model_validate(
                {"prefect.resource.id": [f"prefect.tag.{tag}"], "prefect.resource.role": "tag"}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive if trigger_events else Posture.Reactive,
            threshold=1,
            within=within,
        ),
        actions=[action],
    )


def on_fault(
    fault_class: FaultClass, actions: Sequence[ActionTypes], *, run_id: str | None = None
) -> Automation:
    """An automation that acts each time a fault of a class happens.

    Actions that are about a flow run, such as SuspendFlowRun, find the one of the run.

    Args:
        fault_class: class of the faults that are answered.
        actions: actions of the server.
        run_id: the only run whose faults are answered; None: any run.
    """
    of_run = f" in {run_id}" if run_id is not None else ""
    return Automation(
        name=f"perdure: {fault_class}{of_run}",
        description=f"Answers faults of class {fault_class}{of_run or ' in any run'}.",
        trigger=at_each(
            "perdure.fault",
            {
                "prefect.resource.id": [f"perdure.run.{run_id or '*'}"],
                # Triggers see labels of the resource, not the payload.
                "perdure.fault_class": [fault_class.value],
            },
        ),
        actions=list(actions),
    )


def at_each(
    event: str, match: Mapping[str, Any], related: Mapping[str, Any] | None = None
) -> EventTrigger:
    """Fires at once, at every event of that name.

    Args:
        event: name of the event.
        match: labels of the event's resource.
        related: labels of a related resource.
    """
    return EventTrigger(
        expect={event},
        match=ResourceSpecification.model_validate(match),
        match_related=ResourceSpecification.model_validate(related or {}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def ensure(pool: str | None = None) -> dict[str, Any]:
    """Create or update the automations that bring a supervisor back; as often as one likes.

    Args:
        pool: work pool whose queue of ticks gets its limit; None: no ticks go through a pool.

    Returns:
        Names, for the log of the deployment step.
    """
    if pool is not None:
        _limit_ticks(pool)
    return put(automations())


def _limit_ticks(pool: str) -> None:
    """Have the worker of a pool start a few ticks at once: a backlog would fill its memory.

    A tick that is killed holds its place until the next one of `keep-supervised` ends it.
    """
    with get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_S}) as client:
        try:
            queue = client.create_work_queue(TICKS, work_pool_name=pool)
        except ObjectAlreadyExists:
            queue = client.read_work_queue_by_name(TICKS, work_pool_name=pool)
        if queue.concurrency_limit != MAX_TICKS:
            client.update_work_queue(queue.id, concurrency_limit=MAX_TICKS)


def put(wanted: Sequence[Automation]) -> dict[str, Any]:
    """Create these automations on the server, or update those of the same name.

    Returns:
        Their names.
    """
    # A limit of its own: a deployment must not hang on a server that does not answer.
    with get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_S}) as client:
        for automation in wanted:
            existing = client.read_automations_by_name(automation.name)
            core = AutomationCore.model_validate(
                automation.model_dump(exclude={"id", "owner_resource"})
            )
            if not existing:
                client.create_automation(core)
            elif not _is_same(existing[0], core):
                client.update_automation(existing[0].id, core)
    return {"automations": ", ".join(automation.name for automation in wanted)}


def _is_same(existing: AutomationCore, wanted: AutomationCore) -> bool:
    """Whether an update would change nothing; the server would count anew what it has seen."""
    return _plain(existing) == _plain(wanted)


def _plain(automation: AutomationCore) -> dict[str, Any]:
    document = automation.model_dump(mode="json", include=set(AutomationCore.model_fields))
    document["trigger"].pop("id", None)
    for name in ("expect", "after", "for_each"):
        document["trigger"][name] = sorted(document["trigger"][name])
    return document
