"""Messages among the workers, the node agents and the coordinator of an attempt.

One JSON object per line over TCP; the first line of a connection carries the attempt's token.
In files of the attempt's folder an agent and its coordinator exchange the configuration and the
addresses. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, SecretStr, TypeAdapter

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.job import Job
from perdure.training.recovery.protocol import (
    ChipReported,
    CoordinatorMessage,
    Ending,
    GenerationReport,
    LastSaved,
    NodeGone,
    NotReplaced,
    Paused,
    Reconnected,
    RecoveryBegan,
    ToMember,
    Trains,
    WorkerEnded,
    WorkerFault,
)
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.recovery.rungs import Recovery, Rung


class MetricsAddress(FrozenModel):
    """Where the coordinator answers Prometheus."""

    url: str


def metrics_file(attempt_folder: Path) -> Path:
    """Return the file in which a coordinator writes its `MetricsAddress`, once it answers there."""
    return attempt_folder / "metrics-address.json"


class CoordinatorConfig(FrozenModel):
    """Configuration of an attempt's coordinator: a private file, for it has the token.

    Attributes:
        job: it holds no secrets.
        host: address to bind; loopback unless configured otherwise.
        store_port: port of the rendezvous store, 0: any free port.
        placement: number of the placement.
        attempt: number of the attempt in its placement.
        live_file: the attempt log.
        address_file: written once it listens.
        supported: rungs that the engine can do.
        past: recoveries of the run so far, oldest first.
        resumes: the recovery that it takes up; the coordinator before it is lost with its node.
    """

    job: Job
    host: str
    store_port: int
    token: str
    placement: int
    attempt: int
    live_file: str
    address_file: str
    supported: tuple[Rung, ...]
    past: tuple[Recovery, ...] = ()
    resumes: RecoveryBegan | None = None


class CoordinatorAddress(CoordinatorMessage):
    """Where the coordinator of an attempt listens; files that hold it are private."""

    host: str
    port: int
    store_port: int = Field(description="of the rendezvous store of the process groups")
    token: str


class WorkerJoined(CoordinatorMessage):
    """First line of a worker.

    Attributes:
        layout: the program's layout, the same on every rank; None: the job's.
    """

    op: Literal["worker_joined"] = "worker_joined"
    token: SecretStr
    rank: int
    pid: int
    layout: ParallelLayout | None = None


class AgentJoined(CoordinatorMessage):
    """First line of a node agent."""

    op: Literal["agent_joined"] = "agent_joined"
    token: SecretStr
    node: str
    ranks: tuple[int, ...]


class Gather(CoordinatorMessage):
    """A document of this rank that all ranks are to have; answered once every rank has sent one.

    For ranks whose framework has no collectives for documents.

    Attributes:
        number: of the exchange in this attempt, the same on every rank.
        document: JSON, packed by `pack_document`.
    """

    op: Literal["gather"] = "gather"
    number: int
    document: str


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
    | Gather
    | AgentJoined
    | WorkerEnded
    | NotReplaced
    | NodeGone
    | ChipReported
    | NodeSampled,
    Field(discriminator="op"),
]
FROM_MEMBER: TypeAdapter[FromMember] = TypeAdapter(FromMember)
TO_MEMBER: TypeAdapter[ToMember] = TypeAdapter(ToMember)

PACKED_FROM_CHARACTERS = 1 << 16  # shorter documents are sent as they are
_PACKED = "zlib:"  # no JSON begins so


def pack_document(document: Any) -> str:
    """Write a document as JSON; a long one, such as a manifest, is compressed."""
    text = json.dumps(document)
    if len(text) < PACKED_FROM_CHARACTERS:
        return text
    return _PACKED + base64.b85encode(zlib.compress(text.encode(), 1)).decode()


def unpack_document(text: str) -> Any:
    """Read back what `pack_document` writes."""
    if not text.startswith(_PACKED):
        return json.loads(text)
    return json.loads(zlib.decompress(base64.b85decode(text.removeprefix(_PACKED))))
