"""A new flow run for a run whose own one is gone, or cannot be started by a worker."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
)
from prefect.client.schemas.objects import DeploymentStatus, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment as own_deployment

from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.run_handle import RunHandle

PRETRAIN = FlowFilter(name=FlowFilterName(any_=["pretrain"]))
AUTO_RESUME = "auto-resume"
_KEEP = "keep-"


def start(client: SyncPrefectClient, run: RunHandle) -> str:
    """Give a run a flow run of a deployment; the same one when two ask at once."""
    deployments = client.read_deployments(flow_filter=PRETRAIN)
    last, caller = _last_deployment(client, run.history), _own_deployment(client)
    chosen = choose(deployments, last=last, caller=caller)
    if chosen is None:
        return (
            f"not adopted: no deployment of pretrain that is ready and has the tag {AUTO_RESUME} "
            "is the one of its last flow run, or is served with this flow"
        )
    flow_run = client.create_flow_run_from_deployment(
        chosen.id,
        parameters={"job": run.job.model_dump(mode="json")},
        name=run.job.run_id,
        idempotency_key=_key(run.job.run_id, run.history),
    )
    return f"nobody supervised it, and it had no flow run to start again: {flow_run.id} is new"


def started_for(client: SyncPrefectClient, run_id: str, history: RunHistory) -> FlowRun | None:
    """The flow run that was started in place of the last supervisor, and has not taken over yet."""
    flow_runs = client.read_flow_runs(
        flow_filter=PRETRAIN,
        flow_run_filter=FlowRunFilter(
            idempotency_key=FlowRunFilterIdempotencyKey(any_=[_key(run_id, history)])
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=1,
    )
    return flow_runs[0] if flow_runs else None


def is_of_keeper(flow_run: FlowRun) -> bool:
    """Whether a flow run was started by `start`, for whatever run."""
    return (flow_run.idempotency_key or "").startswith(_KEEP)


def is_started_for(flow_run: FlowRun, run_id: str, history: RunHistory) -> bool:
    """Whether a flow run is the one that `started_for` finds."""
    return flow_run.idempotency_key == _key(run_id, history)


def choose(
    deployments: Sequence[DeploymentResponse],
    *,
    last: UUID | None,
    caller: DeploymentResponse | None,
) -> DeploymentResponse | None:
    """Choose a deployment whose worker or serving process can reach the nodes of a run.

    Args:
        deployments: deployments of the pretrain flow.
        last: deployment of the run's newest flow run that had one.
        caller: deployment of the calling flow, whose worker or serving process knows the run.
    """
    ready = [
        deployment
        for deployment in deployments
        if AUTO_RESUME in deployment.tags and deployment.status is DeploymentStatus.READY
    ]
    neighbours = (
        deployment
        for deployment in ready
        if caller is not None and _are_served_together(deployment, caller)
    )
    return next((deployment for deployment in ready if deployment.id == last), None) or next(
        neighbours, None
    )


def _are_served_together(first: DeploymentResponse, second: DeploymentResponse) -> bool:
    """Whether workers of one pool serve both, or one process, whose deployments share a name."""
    if first.work_pool_name is not None or second.work_pool_name is not None:
        return first.work_pool_name == second.work_pool_name
    return first.name == second.name


def _last_deployment(client: SyncPrefectClient, history: RunHistory) -> UUID | None:
    for flow_run in reversed(history.flow_runs):
        try:
            deployment = client.read_flow_run(UUID(flow_run)).deployment_id
        except ObjectNotFound:
            continue  # deleted
        if deployment is not None:
            return deployment
    return None


def _own_deployment(client: SyncPrefectClient) -> DeploymentResponse | None:
    deployment_id: str | None = own_deployment.id
    return client.read_deployment(UUID(deployment_id)) if deployment_id is not None else None


def _key(run_id: str, history: RunHistory) -> str:
    # The epoch alone is used again by a run that begins anew under the same name.
    taker = history.supervisor
    return f"{_KEEP}{run_id}-{history.epoch}-{taker.supervisor if taker is not None else 'nobody'}"
