"""The seam between a run and whatever gives it containers.

An engine starts, replaces and ends containers, each with a node agent as its first process. It
decides nothing, which is the ladder's business, and speaks to no agent, which is the fleet's
(`fleet.py`). Times are seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from perdure.training.config.job import Job
from perdure.training.config.watch import HangAction
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.environment import variables_of
from perdure.training.errors import NoCapacity
from perdure.training.journal.records import Member
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import AgentConfig, AgentReply, NodeLog
from perdure.training.wire.agent_status import AgentStatus

ANY_NODE = ""  # of a member whose node the engine chooses


@dataclass(frozen=True, slots=True)
class Placement:
    """The gang of containers of a run.

    Where the engine chooses nodes itself, the node of a member that is not there yet is the one
    that it should have if it can, or ANY_NODE.

    Attributes:
        members: in order of their index.
        avoid: nodes that new containers must not be on.
        last: nodes that they are on only where no other is left.
        wait_s: for room, where an engine would wait longer by itself; None: as long as it does.
    """

    number: int
    members: tuple[Member, ...]
    avoid: tuple[str, ...] = field(default=(), compare=False)
    last: tuple[str, ...] = field(default=(), compare=False)
    wait_s: float | None = field(default=None, compare=False)

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
class ClockProbe:
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


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """How the agent in a container is reached.

    Attributes:
        node: that the container is on.
        token: of its agent.
        address: host and port for the supervisor; None: there is no agent, or it is gone.
        host: where the other members reach it.
        loss: how its container was lost or is being lost, as far as the engine knows.
        node_problem: what the platform holds against its node; it may train all the same.
        stood_by: whether it was started before its member needed it.
        schedule_cnt: of its member with it, where it stood by.
    """

    node: str
    token: str = field(repr=False)
    address: tuple[str, int] | None
    host: str
    loss: NodeLoss | None = None
    node_problem: str = ""
    stood_by: bool = False
    schedule_cnt: int = 0


class Engine(Protocol):
    """Where containers come from.

    It knows nothing of what goes on inside them: the agents are the fleet's business. Calls may
    raise EngineError.
    """

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs this engine can carry out."""
        ...

    @property
    def sees_agents(self) -> bool:
        """Whether the way to the agents works: if it does not, their silence says nothing."""
        ...

    @property
    def poll_s(self) -> float:
        """How often a look at all agents is worth what it takes."""
        ...

    def nodes(self) -> Sequence[str] | None:
        """Names of all nodes, in order of preference; None: the engine chooses them itself."""
        ...

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """Start a container for every member; what the run has is ended by force first.

        Returns when every agent has an address.

        Args:
            placement: of the members.
            ready: names of containers that stand by; members take them where they fit.

        Raises:
            NoCapacity: there is no room for all of them; none is left.
        """
        ...

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Likewise for these members; the others keep theirs."""
        ...

    def stand_by(self, placement: Placement, node: str) -> None:
        """Start a container that is to be some member's later; returns at once.

        It is on no node of the placement, nor on one that it avoids, nor where another one of the
        run stands by. Where a member needs that node before it is ready, it is ended.

        Args:
            placement: that is there.
            node: where it is; ANY_NODE where the engine chooses.
        """
        ...

    def standing_by(self) -> Mapping[str, AgentEndpoint]:
        """The containers that no member has taken yet, by names of the engine's own."""
        ...

    def dismiss(self, names: Collection[str]) -> None:
        """End some of them by force."""
        ...

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        ...

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The containers of the placement that was submitted or adopted last, by member."""
        ...

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """The containers that the run has, whoever made them and for whichever placement."""
        ...

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        """What the platform reports of the placement's nodes, with their names.

        Args:
            since_s: earlier reports are left out; seconds since the epoch.
        """
        ...

    def end(self) -> None:
        """End every container of the run by force, wait until nothing is left."""
        ...

    def left_over(self) -> Sequence[str]:
        """Names of what the run still has here: processes, or objects of the platform."""
        ...


def agent_config(
    job: Job, member: Member, *, token: str, epoch: int, node_folder: str | None
) -> AgentConfig:
    """What the agent in a member's container begins with, the same on every engine.

    Args:
        job: of the run.
        member: whose container it is; of index NO_MEMBER where it stands by for one.
        token: that its callers must have; drawn anew for every container.
        epoch: of the supervisor that starts it.
        node_folder: on the node's disk, which outlives the container; None: there is none.
    """
    return AgentConfig(
        run_id=job.run_id,
        node=member.node,
        member=member.index,
        schedule_cnt=member.schedule_cnt,
        token=token,
        epoch=epoch,
        orphan_timeout_s=job.engine.orphan_timeout_s,
        start_timeout_s=job.restart.start_timeout_s,
        hang_timeout_s=job.restart.hang_timeout_s,
        save_timeout_s=job.watch.save_timeout_s,
        restore_timeout_s=job.watch.restore_timeout_s,
        evaluate_timeout_s=job.watch.evaluate_timeout_s,
        command_quiet_s=job.watch.command_quiet_s,
        detect_hangs=job.restart.hang,
        hangs_end_attempt=job.watch.hang_action is HangAction.RESTART,
        node_folder=node_folder,
        variables=None if job.worker.is_command else variables_of(job),
        is_drill=job.drill.is_drill,
    )


def bound(placement: Placement, contacts: Mapping[int, AgentEndpoint]) -> Placement:
    """The placement with the nodes that its containers are on."""
    members = tuple(
        member.model_copy(update={"node": contacts[member.index].node})
        if member.index in contacts
        else member
        for member in placement.members
    )
    return replace(placement, members=members)


def plan(
    nodes: Sequence[str] | None,
    needed: int,
    *,
    previous: Placement | None,
    avoid: Collection[str],
    last: Collection[str] = (),
) -> Placement:
    """A new job-level placement: former nodes where allowed, others in their order.

    Args:
        nodes: there are; None: the engine chooses.
        needed: number of members.
        previous: placement that it follows.
        avoid: nodes that it must not use.
        last: nodes that it uses only where no other is left.

    Raises:
        NoCapacity: fewer than `needed` nodes remain.
    """
    before = previous.members[:needed] if previous is not None else ()
    kept = {member.index: member.node for member in before if member.node not in avoid}
    if nodes is not None:
        free = _in_order(nodes, last, taken={*avoid, *kept.values()})
        for index in range(needed):
            if index not in kept:
                kept[index] = _next(free, nodes, avoid)
        _leave(kept, free, last)
    counts = {member.index: member.schedule_cnt for member in before}
    members = [
        Member(index=index, node=kept.get(index, ANY_NODE), schedule_cnt=counts.get(index, 0) + 1)
        for index in range(needed)
    ]
    number = previous.number + 1 if previous is not None else 1
    return Placement(number, tuple(members), tuple(avoid), tuple(last))


def plan_replacement(
    nodes: Sequence[str] | None,
    *,
    previous: Placement,
    avoid: Collection[str],
    lost: Collection[str],
    last: Collection[str] = (),
) -> tuple[Placement, tuple[int, ...]]:
    """A pod-level placement: members on `avoid` or `lost` nodes move, the others stay.

    Args:
        nodes: there are; None: the engine chooses.
        previous: placement that it follows.
        avoid: nodes that it must not use.
        lost: nodes whose container is gone.
        last: nodes that members move to only where no other is left.

    Returns:
        The placement, and the indices of the members that get new containers.

    Raises:
        NoCapacity: no spare node for one of them.
    """
    moved = {m.index: m.node for m in previous.members if m.node in avoid or m.node in lost}
    if nodes is None:
        moved = {index: ANY_NODE if node in avoid else node for index, node in moved.items()}
    else:
        free = _in_order(nodes, last, taken={*avoid, *previous.nodes})
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
    placement = Placement(previous.number + 1, members, tuple(avoid), tuple(last))
    return placement, tuple(moved)


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
