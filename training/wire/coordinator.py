"""What workers, node agents and the coordinator of an attempt send each other.

One JSON object per line over TCP; the first line of a connection carries the attempt's token.
Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, SecretStr, TypeAdapter

from training.recovery.protocol import (
    CoordinatorMessage,
    Ending,
    GenerationReport,
    LastSaved,
    Paused,
    Reconnected,
    ToMember,
    Trains,
    WorkerEnded,
    WorkerFault,
)


class CoordinatorAddress(CoordinatorMessage):
    """Where the coordinator of an attempt listens; files that hold one are private."""

    host: str
    port: int
    store_port: int = Field(description="of the rendezvous store of the process groups")
    token: str


class WorkerJoined(CoordinatorMessage):
    """First line of a worker."""

    op: Literal["worker_joined"] = "worker_joined"
    token: SecretStr
    rank: int
    pid: int


class AgentJoined(CoordinatorMessage):
    """First line of a node agent."""

    op: Literal["agent_joined"] = "agent_joined"
    token: SecretStr
    node: str
    ranks: tuple[int, ...]


class NodeSampled(CoordinatorMessage):
    """An agent has sampled its node.

    Attributes:
        sample: a `NodeSample` (training/wire/node.py) as JSON has it.
    """

    op: Literal["node_sampled"] = "node_sampled"
    node: str
    sample: dict[str, JsonValue]


FromMember = Annotated[
    WorkerJoined
    | WorkerFault
    | Reconnected
    | GenerationReport
    | Trains
    | Paused
    | LastSaved
    | Ending
    | AgentJoined
    | WorkerEnded
    | NodeSampled,
    Field(discriminator="op"),
]
FROM_MEMBER: TypeAdapter[FromMember] = TypeAdapter(FromMember)
TO_MEMBER: TypeAdapter[ToMember] = TypeAdapter(ToMember)
