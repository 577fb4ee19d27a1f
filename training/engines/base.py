"""The interface between a run and the engine that gives it containers.

An engine starts, replaces and ends containers, each with a node agent as its first process. The
ladder makes the decisions, and the fleet (`fleet.py`) gives orders to the agents. Times are
seconds.
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
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import AgentConfig, AgentReply, NodeLog
from perdure.training.wire.agent_status import AgentStatus

ANY_NODE = ""  # for a member whose node the engine chooses


class OnPending(Protocol):
    """A callback for the wait for containers."""

    def __call__(self, why: str, *, is_room: bool) -> None:
        """Note why they do not start, and whether that is for want of room.

        Raises:
            EngineError: the wait is over; the engine ends the containers.
        """
        ...


def _wait_on(why: str, *, is_room: bool) -> None:
    """Wait on, up to the engine's own limit."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The gang of containers of a run.

    Where the engine chooses nodes itself, the node of a member without a container is the preferred
    one, or ANY_NODE.

    Attributes:
        number: counts the run's placements, from 1.
        members: in order of their index.
        avoid: nodes that get no new containers.
        last: nodes that get new containers only where no other node is free.
        on_pending: called about each second while the platform does not start the containers;
            it may raise to end the wait.
    """

    number: int
    members: tuple[Member, ...]
    avoid: tuple[str, ...] = field(default=(), compare=False)
    last: tuple[str, ...] = field(default=(), compare=False)
    on_pending: OnPending = field(default=_wait_on, compare=False, repr=False)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in order of the members."""
        return tuple(member.node for member in self.members)

    def with_nodes(self, nodes: Mapping[int, str]) -> Self:
        """The placement with these members on these nodes."""
        members = tuple(
            member.model_copy(update={"node": nodes[member.index]})
            if member.index in nodes
            else member
            for member in self.members
        )
        return replace(self, members=members)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every member at one moment.

    Attributes:
        agents: status by member index, of the members that answered.
        lost: names of nodes whose container is gone.
        unanswered: names of nodes that live but did not answer this poll.
    """

    agents: dict[int, AgentStatus] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()

    def of_attempt(self, placement: int, attempt: int) -> Snapshot:
        """Return the state of the members in this attempt, and in no earlier attempt."""
        agents = {i: status.of_attempt(placement, attempt) for i, status in self.agents.items()}
        return replace(self, agents=agents)

    @property
    def is_over(self) -> bool:
        """Whether all processes of the attempt have ended, as far as can be known."""
        return not self.unanswered and all(status.is_over for status in self.agents.values())


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """The address and the clock of a member, as it answered a greeting.

    Attributes:
        node: the member's node.
        host: the address for the other members.
        port: a free port there.
        clock_s: how far its clock is ahead of the supervisor's.
        doubt_s: the error of `clock_s`, at most: half the time that the answer took.
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
        """Compute the probe from a greeting's reply and its times."""
        doubt_s = (answered_s - sent_s) / 2
        clock_s = (reply.at_s or 0.0) - sent_s - doubt_s
        return cls(node, host, reply.port or 0, clock_s, doubt_s)


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """A container, with the way to the agent in it.

    Attributes:
        node: name of the container's node.
        token: secret that callers of the agent must have.
        address: host and port for the supervisor; None: there is no agent, or it is gone.
        host: address for the other members.
        loss: how the container was lost or is being lost, as far as the engine knows.
        node_problem: the platform's complaint about the node, which may train all the same.
        unknown: why the platform cannot tell what has become of the container; "": it can.
        was_spare: whether the container was started before its member needed it.
        schedule_cnt: how many times its member was scheduled with it, for a former spare.
    """

    node: str
    token: str = field(repr=False)
    address: tuple[str, int] | None
    host: str
    loss: NodeLoss | None = None
    node_problem: str = ""
    unknown: str = ""
    was_spare: bool = False
    schedule_cnt: int = 0


TERMINATED = "AGENT_TERMINATED"


def terminated(node: str) -> NodeLoss:
    """The loss of a container whose agent SIGTERM has ended: the node is not to blame."""
    return NodeLoss(node, FaultClass.PREEMPTED, TERMINATED, "SIGTERM has ended its agent")


_SILENT_WHY = (
    "The container is still there, but its agent has been silent for too long: the node is frozen, "
    "cut off, or has no processor to spare."
)


def losses_of(contacts: Collection[AgentEndpoint], lost: Collection[str]) -> list[NodeLoss]:
    """List the losses that the platform reports, and suspects of containers on lost nodes."""
    reported = [contact.loss for contact in contacts if contact.loss is not None]
    silent = (contact for contact in contacts if contact.loss is None and contact.node in lost)
    return [*reported, *filter(None, map(_suspected_loss, silent))]


def _suspected_loss(contact: AgentEndpoint) -> NodeLoss | None:
    """The loss of a container whose agent is silent, as the platform makes it likely.

    Where the platform cannot tell, the container may only have been deleted: no node is blamed.
    """
    node = contact.node
    if contact.node_problem:
        return NodeLoss(node, FaultClass.NODE_LOST, "NODE_NOT_READY", contact.node_problem)
    if contact.unknown:
        text = f"its agent is silent, and the platform does not tell why: {contact.unknown}"
        return NodeLoss(node, FaultClass.CONTAINER_LOST, "LOSS_UNKNOWN", text)
    if contact.address is not None:
        text, why = "its agent does not answer", _SILENT_WHY
        return NodeLoss(node, FaultClass.NODE_LOST, "NODE_LOST", text, why)
    return None


class Engine(Protocol):
    """A source of containers.

    It does not look inside them: the fleet deals with the agents. Calls may raise EngineError.
    """

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs that this engine can carry out."""
        ...

    @property
    def sees_agents(self) -> bool:
        """Whether the agents can be reached; if not, their silence says nothing."""
        ...

    @property
    def poll_s(self) -> float:
        """How often polling all agents is worth its cost."""
        ...

    def find_way(self) -> bool:
        """Look for another way to the agents, which are all silent: the present one may be cut.

        Returns:
            Whether the containers run, as far as another way or the platform shows.
        """
        ...

    def nodes(self) -> Sequence[str] | None:
        """Names of all nodes, in order of preference; None: the engine chooses them itself."""
        ...

    def usable_nodes(self) -> Collection[str] | None:
        """Names of the nodes that could take a container, as the platform shows; None: unknown."""
        ...

    def failure_domains(self) -> Mapping[str, str]:
        """Failure domains by node, as far as the platform shows them."""
        ...

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """End the run's containers by force, and start one for every member.

        Returns when every agent has an address.

        Args:
            placement: the members.
            ready: names of spares; members take them where they fit.

        Raises:
            NoCapacity: there is no room for all members; the engine has ended every container.
        """
        ...

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Start new containers for these members as `submit` does; the others keep theirs."""
        ...

    def start_spare(self, placement: Placement, node: str) -> None:
        """Start a spare container that a member may take later; returns at once.

        It shares no node with a member or another spare, and avoids what the placement avoids. The
        engine ends it where a member needs its node before it is ready.

        Args:
            placement: the current members.
            node: where it starts; ANY_NODE where the engine chooses.
        """
        ...

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        """The spares that no member has taken yet, by names that the engine gives them."""
        ...

    def end_spares(self, names: Collection[str]) -> None:
        """End spares by force."""
        ...

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of an earlier placement. Returns the indices of living members."""
        ...

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The containers of the placement that was submitted or adopted last, by member."""
        ...

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """All containers of the run's members, also those of other supervisors and placements."""
        ...

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        """Read the platform's reports of the placement's nodes, with their names.

        Args:
            since_s: earlier reports are left out; seconds since the epoch.
        """
        ...

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:
        """Read the platform's reports of the placement's chips, with the codes that each has now.

        Args:
            since_s: faults that began earlier are left out; seconds since the epoch.
        """
        ...

    def end(self) -> None:
        """End every container of the run by force, and wait until all have ended."""
        ...

    def leftovers(self) -> Sequence[str]:
        """Names of processes or objects that the run still has on the platform."""
        ...


def agent_config(
    job: Job, member: Member, *, token: str, epoch: int, node_folder: str | None
) -> AgentConfig:
    """Compose the configuration of the agent in a member's container, for every engine.

    Args:
        job: the run's job.
        member: the container's member; a spare's has the index NO_MEMBER.
        token: secret that the agent's callers must have, drawn anew for every container.
        epoch: the epoch of the supervisor that starts it.
        node_folder: folder on the node's disk, which outlives the container; None: there is none.
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


def plan(
    nodes: Sequence[str] | None,
    needed: int,
    *,
    previous: Placement | None,
    avoid: Collection[str],
    last: Collection[str] = (),
) -> Placement:
    """Plan a new job-level placement: former nodes where allowed, others in their order.

    Args:
        nodes: names of all nodes; None: the engine chooses.
        needed: number of members.
        previous: placement that the new one follows.
        avoid: nodes that it must not use.
        last: nodes that it uses only where no other is free.

    Raises:
        NoCapacity: fewer than `needed` nodes remain.
    """
    former_members = previous.members[:needed] if previous is not None else ()
    node_by_member = {m.index: m.node for m in former_members if m.node not in avoid}
    if nodes is not None:
        free = _free_nodes(nodes, last, exclude={*avoid, *node_by_member.values()})
        for index in range(needed):
            if index not in node_by_member:
                node_by_member[index] = _take_first(free, nodes, avoid)
        _improve(node_by_member, free, last)
    counts = {m.index: m.schedule_cnt + 1 for m in former_members}
    members = [
        Member(index=i, node=node_by_member.get(i, ANY_NODE), schedule_cnt=counts.get(i, 1))
        for i in range(needed)
    ]
    number = 1 if previous is None else previous.number + 1
    return Placement(number, tuple(members), tuple(avoid), tuple(last))


def plan_replacement(
    nodes: Sequence[str] | None,
    *,
    previous: Placement,
    avoid: Collection[str],
    lost: Collection[str],
    last: Collection[str] = (),
) -> tuple[Placement, tuple[int, ...]]:
    """Plan a pod-level placement: members on `avoid` or `lost` nodes move, the others stay.

    Args:
        nodes: names of all nodes; None: the engine chooses.
        previous: placement that the new one follows.
        avoid: nodes that it must not use.
        lost: nodes whose container is gone.
        last: nodes that members move to only where no other is free.

    Returns:
        The placement, and the indices of the members that get new containers.

    Raises:
        NoCapacity: there is no spare node for a member that moves.
    """
    moved = {m.index: m.node for m in previous.members if m.node in avoid or m.node in lost}
    if nodes is None:
        moved = {index: ANY_NODE if node in avoid else node for index, node in moved.items()}
    else:
        free = _free_nodes(nodes, last, exclude={*avoid, *previous.nodes})
        for index, node in moved.items():
            if node in avoid:
                moved[index] = _take_first(free, nodes, avoid)
        _improve(moved, free, last)
    members = tuple(
        Member(index=m.index, node=moved[m.index], schedule_cnt=m.schedule_cnt + 1)
        if m.index in moved
        else m
        for m in previous.members
    )
    placement = Placement(previous.number + 1, members, tuple(avoid), tuple(last))
    return placement, tuple(moved)


def _improve(node_by_member: dict[int, str], free: list[str], last: Collection[str]) -> None:
    """Move members away from nodes that come last, where other nodes are free.

    Called when every member has a node: a member without one comes first.
    """
    for index in sorted(node_by_member):
        if node_by_member[index] in last and free and free[0] not in last:
            node_by_member[index] = free.pop(0)


def _free_nodes(
    nodes: Sequence[str], last: Collection[str], *, exclude: Collection[str]
) -> list[str]:
    """List the free nodes in their order, with those that come last at the end."""
    free = [node for node in nodes if node not in exclude]
    return sorted(free, key=lambda node: node in last)


def _take_first(free: list[str], nodes: Sequence[str], avoid: Collection[str]) -> str:
    if not free:
        isolated = ", ".join(node for node in nodes if node in avoid) or "none"
        raise NoCapacity(f"no healthy spare among {len(nodes)} nodes; isolated: {isolated}")
    return free.pop(0)
