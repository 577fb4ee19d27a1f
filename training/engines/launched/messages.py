"""The messages of a supervisor and the `perdure launch` of each node.

One JSON object per line over TCP, request then reply, as with agents. A request has the node's
token, derived from the run's secret, and the supervisor's epoch; the reply is signed with the same
secret over the request's nonce. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, TypeAdapter

from perdure.storage.frozen_model import FrozenModel
from perdure.training.engines.containers import Container
from perdure.training.wire.agent import AgentAddress, AgentConfig


class Registration(FrozenModel):
    """What a node tells the others about itself, through the store.

    Attributes:
        instance: drawn anew by every `perdure launch`.
        job: fingerprint of the job file.
        signature: over all other fields.
    """

    node: str
    node_rank: int
    instance: str
    started_s: float
    host: str
    port: int
    pid: int
    version: str
    job: str
    allocation: str = ""
    signature: str = ""

    @property
    def signed_text(self) -> str:
        """The text that the signature is over."""
        return self.model_dump_json(exclude={"signature"})


class Claim(FrozenModel):
    """The word of a node, in the store, that it is starting a supervisor.

    It is a hint for the others, who would start one as well meanwhile; the lease decides.

    Attributes:
        instance: of the node's `perdure launch`.
        epoch: of the supervisor before.
    """

    instance: str
    epoch: int
    at_s: float


class HelloQuery(FrozenModel):
    """Ask whether the node is there."""

    op: Literal["hello"] = "hello"


class ContainersQuery(FrozenModel):
    """Ask for the containers of the node."""

    op: Literal["containers"] = "containers"


class StartContainerOrder(FrozenModel):
    """Start a container.

    Attributes:
        name: of its folder.
        config: the agent's; the node fills in its address and the folder of its disk.
        created_s: when the run was created.
    """

    op: Literal["start_container"] = "start_container"
    name: str
    config: AgentConfig
    created_s: float


class TakeContainerOrder(FrozenModel):
    """Note which member has taken a spare container."""

    op: Literal["take_container"] = "take_container"
    folder: str
    member: int
    schedule_cnt: int


class EndContainersOrder(FrozenModel):
    """End containers by force, and wait until they have ended.

    Attributes:
        folders: of the containers; None: all.
    """

    op: Literal["end_containers"] = "end_containers"
    folders: tuple[str, ...] | None = None


class LeaveOrder(FrozenModel):
    """Have everything of the node save and end: the allocation is about to end."""

    op: Literal["leave"] = "leave"


HostOrder = Annotated[
    HelloQuery
    | ContainersQuery
    | StartContainerOrder
    | TakeContainerOrder
    | EndContainersOrder
    | LeaveOrder,
    Field(discriminator="op"),
]


class HostRequest(FrozenModel):
    """One line to a node."""

    token: SecretStr
    epoch: int
    nonce: str
    order: HostOrder


class HostedContainer(FrozenModel):
    """A container as its node sees it.

    Attributes:
        address: of its agent; None: it is gone, or has not listened yet.
        is_running: whether the agent's process is there.
        was_up: whether the agent has ever listened.
        is_terminated: whether SIGTERM has ended the agent.
    """

    container: Container
    address: AgentAddress | None = None
    is_running: bool = True
    was_up: bool = False
    is_terminated: bool = False
    last_line: str = ""


class HostReply(FrozenModel):
    """One line back; `error` is set when the request was refused."""

    error: str | None = None
    instance: str = ""
    containers: tuple[HostedContainer, ...] = ()
    signature: str = ""

    @property
    def signed_text(self) -> str:
        """The text that the signature is over, behind the request's nonce."""
        return self.model_dump_json(exclude={"signature"})


HOST_REQUEST: TypeAdapter[HostRequest] = TypeAdapter(HostRequest)
