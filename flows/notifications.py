"""Automations that send a message when somebody has to act: a run has failed, or needs a person.

They go to a notification block of the server, such as Slack, mail or a webhook. `perdure notify
BLOCK` creates or updates them, and so does `ensure` as a build step of prefect.yaml. A fault that
the ladder mends sends no message. Facts about triggers and actions: Prefect 3.8.8.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import SendNotification
from prefect.exceptions import ObjectNotFound

from perdure.flows.automations import REQUEST_TIMEOUT_S, at_each, put
from perdure.training.errors import InputError

FLOWS = ["pretrain", "prepare-data"]


def ensure(block: str) -> dict[str, Any]:
    """Have notifications sent to a block, as often as one likes.

    Args:
        block: as `prefect block ls` shows it: TYPE/NAME.

    Returns:
        Names of the automations, for the log of the deployment step.

    Raises:
        InputError: there is no such block.
    """
    return put(notifications(_id_of(block)))


def notifications(block_id: UUID) -> list[Automation]:
    """The automations, as they should be on the server."""
    failed = Automation(
        name="perdure: notify when a run has failed",
        description="Sends a message when a flow run of pretrain or prepare-data has Failed.",
        trigger=at_each(
            "prefect.flow-run.Failed",
            {"prefect.resource.id": ["prefect.flow-run.*"]},
            {"prefect.resource.role": "flow", "prefect.resource.name": FLOWS},
        ),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="{{ flow_run.name }} has failed",
                body="{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
            )
        ],
    )
    needed = Automation(
        name="perdure: notify when a run needs you",
        description="Sends a message when a node is isolated, no spare is left, an alert is open.",
        trigger=at_each("perdure.action_required", {"prefect.resource.id": ["perdure.run.*"]}),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="{{ event.resource['prefect.resource.name'] }}: {{ event.payload.what }}",
                body="{{ event.payload.why }}\nWhat to do: {{ event.payload.action }}\n"
                "{{ flow_run|ui_url }}",
            )
        ],
    )
    return [failed, needed]


def _id_of(block: str) -> UUID:
    kind, _, name = block.partition("/")
    with get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_S}) as client:
        try:
            return client.read_block_document_by_name(name, kind).id
        except ObjectNotFound as error:
            raise InputError(
                "block", f"{block!r}: no such block; 'prefect block ls' lists them as TYPE/NAME"
            ) from error
