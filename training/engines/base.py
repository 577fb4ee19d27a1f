"""The seam between a run and whatever gives it containers.

An engine starts, replaces and ends containers, each with a node agent as its first process,
and passes orders on to the agents. It decides nothing: which rung to take is the ladder's
business. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from training.errors import NoCapacity
from training.journal.records import Member
from training.recovery.rungs import Rung
from training.wire.agent import AgentReply, AgentStatus, CheckOrder, NodeText, StartOrder
from training.wire.healing import Healing, HealOrder
from training.wire.logs import Collected, LogPiece, ReadLogsQuery, WorkerLog
from training.wire.node import Check


@dataclass(frozen=True, slots=True)
class Placement:
    """The gang of containers of a run; members in order of their index."""

    number: int
    members: tuple[Member, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in order of the members."""
        return tuple(member.node for member in self.members)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every member at one moment.

    Attributes:
        agents: status by member index, of the members that answered.
        lost: names of nodes whose container is gone.
        unanswered: names of nodes that live but did not answer this time.
    """

    agents: dict[int, AgentStatus] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether no process of the attempt is left anywhere, as far as can be known."""
        return not self.unanswered and all(status.is_over for status in self.agents.values())


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a member answered when it was greeted.

    Attributes:
        host: where others reach it.
        port: of it that is free.
        clock_s: how far its clock is ahead of the supervisor's.
        doubt_s: by how much that may be wrong, half the time that the answer took.
    """

    node: str
    host: str
    port: int
    clock_s: float
    doubt_s: float

    @classmethod
    def of(
        cls, node: str, host: str, reply: AgentReply, *, sent_s: float, answered_s: float
    ) -> Self:
        """A reply to a greeting that was sent and answered at these times."""
        doubt_s = (answered_s - sent_s) / 2
        clock_s = (reply.at_s or 0.0) - sent_s - doubt_s
        return cls(node, host, reply.port or 0, clock_s, doubt_s)


class Engine(Protocol):
    """Where containers come from.

    Calls may raise EngineError, and AgentUnreachable where they call an agent.
    """

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs this engine can carry out."""
        ...

    def nodes(self) -> Sequence[str]:
        """Names of all nodes, in order of preference."""
        ...

    def submit(self, placement: Placement) -> None:
        """Start a container for every member; whatever the run had before is ended first."""
        ...

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        """Start new containers for these members; the others keep theirs."""
        ...

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        ...

    def greet(self) -> dict[int, Greeting]:
        """The members that answer, by their index."""
        ...

    def check(self, orders: Mapping[int, CheckOrder]) -> Sequence[Check]:
        """Check all members at once; one that does not answer has failed."""
        ...

    def heal(self, node: str, order: HealOrder) -> Healing:
        """Heal the chips of one node, in the background; repeated: how far it is."""
        ...

    def start(self, order: StartOrder) -> None:
        """Start the processes of an attempt in every container; rendezvous is filled in."""
        ...

    def poll(self) -> Snapshot:
        """The state of the members; one that does not answer is tried for a while first."""
        ...

    def stop(self, grace_s: float) -> None:
        """Stop the processes in every container that answers; returns at once."""
        ...

    def metrics(self, offset: int) -> tuple[str, int]:
        """Step records that the first rank wrote after `offset` bytes, and the new offset."""
        ...

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        """The end of each worker's output, with the name of its node."""
        ...

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        """What logs of the newest attempt hold, of the containers that answer, with their nodes."""
        ...

    def texts(self, tail_bytes: int) -> Sequence[tuple[str, NodeText]]:
        """Device logs and the output of the driver's tools, with the name of the node."""
        ...

    def stacks(self) -> Sequence[tuple[str, NodeText]]:
        """The stack of every thread of the workers, with the name of the node."""
        ...

    def collect_logs(self, placement: int, attempt: int) -> Sequence[tuple[str, Collected]]:
        """Have every node put its logs of an ended attempt into the store, in the background.

        Returns how far each is that answers at once, with its name; may be called again.
        """
        ...

    def cancel(self, grace_s: float) -> None:
        """Stop the processes, end the containers, wait until nothing is left."""
        ...


def plan(
    nodes: Sequence[str],
    needed: int,
    *,
    previous: Placement | None,
    avoid: Collection[str],
    last: Collection[str] = (),
) -> Placement:
    """A new job-level placement: former nodes where allowed, others in their order.

    Args:
        nodes: there are.
        needed: number of members.
        previous: placement that it follows.
        avoid: nodes that it must not use.
        last: nodes that it uses only where no other is left.

    Raises:
        NoCapacity: fewer than `needed` nodes remain.
    """
    before = previous.members[:needed] if previous is not None else ()
    kept = {member.index: member.node for member in before if member.node not in avoid}
    free = _in_order(nodes, last, taken={*avoid, *kept.values()})
    for index in range(needed):
        if index not in kept:
            kept[index] = _next(free, nodes, avoid)
    _leave(kept, free, last)
    counts = {member.index: member.schedule_cnt for member in before}
    members = [
        Member(index=index, node=kept[index], schedule_cnt=counts.get(index, 0) + 1)
        for index in range(needed)
    ]
    return Placement(previous.number + 1 if previous is not None else 1, tuple(members))


def plan_replacement(
    nodes: Sequence[str],
    *,
    previous: Placement,
    avoid: Collection[str],
    lost: Collection[str],
    last: Collection[str] = (),
) -> tuple[Placement, tuple[int, ...]]:
    """A pod-level placement: members on `avoid` or `lost` nodes move, the others stay.

    Args:
        nodes: there are.
        previous: placement that it follows.
        avoid: nodes that it must not use.
        lost: nodes whose container is gone.
        last: nodes that members move to only where no other is left.

    Returns:
        The placement, and the indices of the members that get new containers.

    Raises:
        NoCapacity: no spare node for one of them.
    """
    free = _in_order(nodes, last, taken={*avoid, *previous.nodes})
    moved = {m.index: m.node for m in previous.members if m.node in avoid or m.node in lost}
    for index, node in moved.items():
        if node in avoid:
            moved[index] = _next(free, nodes, avoid)
    _leave(moved, free, last)
    members = tuple(
        Member(index=m.index, node=moved[m.index], schedule_cnt=m.schedule_cnt + 1)
        if m.index in moved
        else m
        for m in previous.members
    )
    return Placement(previous.number + 1, members), tuple(moved)


def _leave(chosen: dict[int, str], free: list[str], last: Collection[str]) -> None:
    """Have members leave nodes that come last, where others are left.

    Called when every member has a node: one without comes before one that could have a better one.
    """
    for index in sorted(chosen):
        if chosen[index] in last and free and free[0] not in last:
            chosen[index] = free.pop(0)


def _in_order(nodes: Sequence[str], last: Collection[str], *, taken: Collection[str]) -> list[str]:
    """Nodes that are free, in their order but for those that come last."""
    free = [node for node in nodes if node not in taken]
    return sorted(free, key=lambda node: node in last)


def _next(free: list[str], nodes: Sequence[str], avoid: Collection[str]) -> str:
    if not free:
        isolated = ", ".join(node for node in nodes if node in avoid) or "none"
        raise NoCapacity(f"no healthy spare among {len(nodes)} nodes; isolated: {isolated}")
    return free.pop(0)
