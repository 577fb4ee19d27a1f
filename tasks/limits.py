"""Concurrency limits of the Prefect server that can keep a supervisor from starting.

Somebody sets one to keep two trainings off a machine. Training never stops for it, but a supervisor
that has ended may have to wait for its own slot, so the limit is named where a person looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from perdure.tasks.relaunch import PRETRAIN


def limits_of_pretrain(client: SyncPrefectClient) -> list[str]:
    """List the limits on every deployment of the pretrain flow, a line for each.

    Raises:
        Exception: the server did not answer.
    """
    return limits_of(client, client.read_deployments(flow_filter=PRETRAIN))


def limits_of(client: SyncPrefectClient, deployments: Sequence[DeploymentResponse]) -> list[str]:
    """List the limits on deployments, their work pools and queues, a line for each.

    Raises:
        Exception: the server did not answer.
    """
    lines = (line for deployment in deployments for line in _lines(client, deployment))
    return list(dict.fromkeys(lines))


def _lines(client: SyncPrefectClient, deployment: DeploymentResponse) -> Iterator[str]:
    limit = deployment.global_concurrency_limit
    if limit is not None:
        yield (
            f"deployment {deployment.name!r} of pretrain has a concurrency limit of {limit.limit}; "
            f"`prefect gcl delete {limit.name}` removes it"
        )
    pool, queue = deployment.work_pool_name, deployment.work_queue_name
    if pool is None:
        return
    with suppress(ObjectNotFound):
        number = client.read_work_pool(pool).concurrency_limit
        if number is not None:
            yield (
                f"work pool {pool!r} has a concurrency limit of {number}; "
                f"`prefect work-pool clear-concurrency-limit {pool}` removes it"
            )
    if queue is None:
        return
    with suppress(ObjectNotFound):
        number = client.read_work_queue_by_name(queue, work_pool_name=pool).concurrency_limit
        if number is not None:
            yield (
                f"work queue {queue!r} of pool {pool!r} has a concurrency limit of {number}; "
                f"`prefect work-queue clear-concurrency-limit {queue} --pool {pool}` removes it"
            )
