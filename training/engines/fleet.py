"""The containers of a run as a supervisor handles them, the same on every engine.

The engine starts and ends containers; the fleet gives orders to the agents in them. Times are
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from perdure.training.agent.control import CALL_TIMEOUT_S
from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.agent_calls import POLL_TIMEOUT_S, AgentCalls, MemberAgents
from perdure.training.engines.base import (
    ANY_NODE,
    TERMINATED,
    AgentEndpoint,
    ClockProbe,
    Engine,
    Placement,
    Snapshot,
    losses_of,
)
from perdure.training.engines.rank_table import Server, rank_table
from perdure.training.engines.spare_containers import SpareContainers
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.protocol import RecoveryBegan
from perdure.training.recovery.rungs import Rung
from perdure.training.telemetry.device_addresses import query_of
from perdure.training.wire.agent import (
    AgentReply,
    CheckOrder,
    ClockQuery,
    EvidenceQuery,
    KillOrder,
    MetricsQuery,
    NodeLog,
    NoticeOrder,
    Order,
    RejoinOrder,
    RendezvousOrder,
    SavedQuery,
    ShutdownOrder,
    StacksQuery,
    StartOrder,
    StopOrder,
)
from perdure.training.wire.agent_status import SavedCheckpoint
from perdure.training.wire.logs import (
    Collected,
    CollectOrder,
    LogPiece,
    LogsQuery,
    ReadLogsQuery,
    WorkerLog,
)
from perdure.training.wire.node import Check, HealOrder, HealReply, NodeDevices, unanswered

RENDEZVOUS_TIMEOUT_S = 120.0  # the first rendezvous imports torch, which a cold disk makes slow
REJOIN_TIMEOUT_S = 40.0  # an agent itself gives the coordinator 30 s
SHUTDOWN_MARGIN_S = 10.0
GREET_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the answer; the engine ends an agent that hangs by force
COLLECT_TIMEOUT_S = 3.0  # an agent answers at once; a recovery must not wait for a silent one
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
SAVED_TIMEOUT_S = 60.0  # the file system may be shared and hold many files
EVIDENCE_TIMEOUT_S = 60.0  # agents run the driver's tools for one device after the other
ENDING_POLL_S = 0.1


class Fleet:
    """The containers of a run, with the agents in them.

    Calls may raise EngineError, and those that need a particular agent AgentUnreachable.

    Attributes:
        spare_containers: started ahead of time; a member that must move takes one of them.

    Args:
        engine: starts the containers.
        job: the run's job.
        epoch: the supervisor's; agents obey the highest that they have received.
    """

    def __init__(self, engine: Engine, job: Job, *, epoch: int) -> None:
        self._engine = engine
        self._job = job
        self._calls = AgentCalls(epoch)
        self.spare_containers = SpareContainers(engine, self._calls)
        self._agents = MemberAgents(engine, self._calls)
        self._logging_member = 0

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs that the engine can carry out for this job."""
        return self._job.possible(self._engine.capabilities)

    def nodes(self) -> Sequence[str] | None:
        """Names of all nodes, in order of preference; None: the engine chooses them itself."""
        return self._engine.nodes()

    def usable_nodes(self) -> Collection[str] | None:
        """See `Engine.usable_nodes`."""
        return self._engine.usable_nodes()

    def failure_domains(self) -> Mapping[str, str]:
        """See `Engine.failure_domains`."""
        return self._engine.failure_domains()

    def resolve_nodes(
        self, placement: Placement, members: Collection[int] | None = None
    ) -> Placement:
        """Fill in the nodes that the containers of these members are on; None: of all members."""
        nodes = {
            index: contact.node
            for index, contact in self._engine.contacts().items()
            if members is None or index in members
        }
        return placement.with_nodes(nodes)

    def misplaced_members(self, placement: Placement) -> frozenset[int]:
        """Indices of members whose container is gone, or is not on the node of the placement."""
        contacts = self._engine.contacts()
        return frozenset(
            member.index
            for member in placement.members
            if (contact := contacts.get(member.index)) is None
            or contact.address is None
            or member.node not in (contact.node, ANY_NODE)
            or member.node == ANY_NODE
        )

    @property
    def poll_s(self) -> float:
        """How often polling all agents is worth its cost."""
        return self._engine.poll_s

    @property
    def are_terminated(self) -> bool:
        """Whether SIGTERM has ended an agent, as its engine knows it."""
        contacts = self._engine.contacts().values()
        return any(c.loss is not None and c.loss.code == TERMINATED for c in contacts)

    def losses(self, lost: Collection[str]) -> Sequence[NodeLoss]:
        """List the reasons that the engine knows for containers that are gone, or about to be.

        Args:
            lost: nodes whose agent is lost.
        """
        return losses_of(self._agents.with_losses(self._engine.contacts()), lost)

    def submit(self, placement: Placement) -> None:
        """End the containers that the run has, and start one for every member."""
        self._retire(self._engine.inventory, None, self._job.engine.grace_s)
        self._engine.submit(placement, ready=self.spare_containers.ready())
        members = [member.index for member in placement.members]
        self._agents.restart_silence(members)
        self._assign(placement, members)

    def replace(
        self, placement: Placement, members: Collection[int], *, grace_s: float | None = None
    ) -> None:
        """Start new containers for these members; the others keep theirs.

        Args:
            placement: the members' placement.
            members: indices of the members.
            grace_s: time for the processes in the old containers to end; None: the job's.
        """
        grace_s = self._job.engine.grace_s if grace_s is None else grace_s
        ready = self.spare_containers.ready()
        self._retire(self._engine.contacts, members, grace_s)
        self._engine.replace(placement, members, ready=ready)
        self._agents.restart_silence(members)
        self._assign(placement, members)

    def _assign(self, placement: Placement, members: Collection[int]) -> None:
        """Assign spares to the members that took them; replace those that do not obey."""
        failed = self.spare_containers.assign(members)
        if failed:
            self._engine.replace(placement, failed)
            self._agents.restart_silence(failed)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of an earlier placement. Returns the indices of living members."""
        alive = self._engine.adopt(placement)
        self._agents.restart_all_silence()
        return alive

    def cancel(self, grace_s: float) -> None:
        """Stop the processes, end the containers, wait until nothing is left."""
        self._retire(self._engine.inventory, None, grace_s)
        self._engine.end()

    def greet(self) -> dict[int, ClockProbe]:
        """Probe the clocks of members. Those that do not answer are left to their checks."""
        contacts = self._engine.contacts()
        sent = {
            index: self._calls.send(contact, ClockQuery(), timeout_s=GREET_TIMEOUT_S)
            for index, contact in self._agents.reachable(contacts).items()
        }
        probes: dict[int, ClockProbe] = {}
        for index, answer in sent.items():
            node, host = contacts[index].node, contacts[index].host
            with suppress(AgentUnreachable, EngineError):
                reply = self._calls.receive(contacts[index], ClockQuery(), answer)
                times = answer.result()
                probes[index] = ClockProbe.of(
                    node, host, reply, sent_s=times.sent_s, answered_s=times.answered_s
                )
        return probes

    def check(self, orders: Mapping[int, CheckOrder]) -> Sequence[Check]:
        """Check members all at once; a member that does not answer has failed."""
        all_contacts = self._engine.contacts()
        contacts = {index: all_contacts[index] for index in orders}
        limit_s = max((order.timeout_s for order in orders.values()), default=0.0)
        orders = self._agents.with_pings(orders, contacts)
        answers = self._agents.call_all(contacts, orders, timeout_s=limit_s + CHECK_MARGIN_S)
        return [
            check
            for index, answer in answers
            for check in (
                answer.checks
                if isinstance(answer, AgentReply)
                else [unanswered(contacts[index].node, str(answer))]
            )
        ]

    def heal(self, node: str, order: HealOrder) -> HealReply:
        """Heal the chips of a node in the background. A repeated call returns the progress."""
        return self.order(node, order).healing or HealReply()

    def order(self, node: str, order: Order) -> AgentReply:
        """Give an order to the agent of a node."""
        contact = next((c for c in self._engine.contacts().values() if c.node == node), None)
        if contact is None:
            raise AgentUnreachable(f"no container is on {node}")
        return self._calls.client(contact).call(order)

    def start(self, order: StartOrder) -> None:
        """Start the processes of an attempt in every container, after opening its rendezvous."""
        contacts = dict(sorted(self._engine.contacts().items()))
        self.spare_containers.assign(contacts)  # an earlier supervisor may have died before it did
        order = self._with_rendezvous(order, contacts)
        self._agents.forget_polls()  # their answers say nothing of this attempt
        self._agents.order(contacts, order, timeout_s=CALL_TIMEOUT_S, needs_all=True)

    def join(self, order: StartOrder, members: Collection[int], *, generation: int) -> None:
        """Start the processes of these members in an attempt whose other processes live.

        Args:
            order: starts the attempt.
            members: indices of the members with new containers.
            generation: the process groups' generation that they join, or an earlier one.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        self.spare_containers.assign(members)  # an earlier supervisor may have died before it did
        order = self._with_rendezvous(order, contacts)
        order = order.model_copy(update={"generation": generation})
        joining = {index: contacts[index] for index in members}
        self._agents.order(joining, order, timeout_s=CALL_TIMEOUT_S, needs_all=True)

    def notice(self, order: NoticeOrder) -> None:
        """Pass a notice to the attempt's coordinator, through the first member's agent.

        Raises:
            AgentUnreachable: the agent does not answer.
            EngineError: the coordinator is gone, or belongs to another attempt.
        """
        self._calls.client(self._engine.contacts()[0]).call(order)

    def resume(self, order: StartOrder, began: RecoveryBegan) -> None:
        """Open an attempt's coordinator where the first member is now, and lead the others there.

        Args:
            order: starts the attempt.
            began: the recovery that is under way.

        Raises:
            AgentUnreachable: the first member does not answer.
            EngineError: another member cannot reach the coordinator, or there is none.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        reply = self._rendezvous(order, contacts[0], resumes=began)
        if reply.coordinator is None:
            raise EngineError(f"{contacts[0].node} opened no coordinator")
        moved = {rank // self._job.engine.slots_per_node for rank in began.moved}
        staying = {index: contact for index, contact in contacts.items() if index not in moved}
        rejoin = RejoinOrder(
            placement=order.placement, attempt=order.attempt, coordinator=reply.coordinator
        )
        # The next poll shows whether members that do not answer are lost, too.
        self._agents.order(staying, rejoin, timeout_s=REJOIN_TIMEOUT_S)

    @property
    def first_container(self) -> str:
        """The token of the container with the attempt's log: the first member's.

        Where a command's output shows its steps, it is the first member that prints them.
        """
        first = self._engine.contacts().get(self._logging_member)
        return first.token if first is not None else ""

    def _rendezvous(
        self, order: StartOrder, first: AgentEndpoint, *, resumes: RecoveryBegan | None = None
    ) -> AgentReply:
        """Have the first member open the attempt's rendezvous, once."""
        rendezvous = RendezvousOrder(
            port=self._job.comm.master_port,
            start=order.without_secrets(),
            supported=tuple(rung for rung in Rung if rung in self.capabilities),
            resumes=resumes,
        )
        return self._calls.client(first).call(rendezvous, timeout_s=RENDEZVOUS_TIMEOUT_S)

    def _with_rendezvous(
        self, order: StartOrder, contacts: Mapping[int, AgentEndpoint]
    ) -> StartOrder:
        """Open the attempt's rendezvous. Returns the order with its address and all hosts."""
        first = contacts[0]
        reply = self._rendezvous(order, first)
        places = {
            "hosts": tuple(contact.host for contact in contacts.values()),
            "master_addr": first.host,
            "master_port": reply.port,
            "coordinator": reply.coordinator,
            "rank_table": self._rank_table(contacts),
        }
        return order.model_copy(update=places)

    def _rank_table(self, contacts: Mapping[int, AgentEndpoint]) -> str | None:
        query = query_of(self._job)
        if query is None:
            return None
        replies = self._agents.order(contacts, query, timeout_s=CALL_TIMEOUT_S, needs_all=True)
        servers = [
            Server(contact.node, contact.host, replies[index].devices or NodeDevices(devices=()))
            for index, contact in contacts.items()
        ]
        return rank_table(query.form, servers, sp_block=self._job.engine.sp_block)

    def poll(self) -> Snapshot:
        """Read the state of the members, as far as they answer within one poll.

        Raises:
            EngineError: an agent obeys another supervisor.
        """
        snapshot = self._agents.poll()
        shown = [i for i, status in snapshot.agents.items() if status.shown is not None]
        if shown and self._logging_member not in shown:
            self._logging_member = shown[0]
        return snapshot

    def stop(self, grace_s: float) -> None:
        """Stop the processes in every container that answers; returns at once.

        Raises:
            EngineError: an agent obeys another supervisor.
        """
        contacts = self._engine.contacts()
        self._agents.order(contacts, StopOrder(grace_s=grace_s), timeout_s=CALL_TIMEOUT_S)
        self._agents.forget_polls()

    def kill(self, victim: Victim, index: int) -> bool:
        """Have agents kill a victim, in a drill. Returns whether it was there.

        Args:
            victim: the kind of process, or the node.
            index: the global rank of a worker, else the member; ignored for the coordinator.

        Raises:
            EngineError: the run is no drill, or an agent obeys another supervisor.
        """
        if victim is Victim.SPARE:
            return self.spare_containers.kill_first()
        contacts = self._engine.contacts()
        rank = index if victim is Victim.RANK else None
        # A member knows itself whether it has a rank or the coordinator.
        if victim not in (Victim.RANK, Victim.COORDINATOR):
            contacts = {member: c for member, c in contacts.items() if member == index}
        order = KillOrder(victim=victim, rank=rank)
        replies = self._agents.order(contacts, order, timeout_s=CALL_TIMEOUT_S)
        return any(reply.num_killed for reply in replies.values())

    def leftovers(self) -> Sequence[str]:
        """Names of processes or objects that the run still has on the platform."""
        return self._engine.leftovers()

    def metrics(self, offset: int, *, of_attempt: tuple[int, int] | None = None) -> tuple[str, int]:
        """Read the step records that the first rank wrote after `offset` bytes.

        Returns them with the new offset. They are empty while the agent is lost or owes an answer,
        since the poll of the other members must not wait for it.

        Args:
            offset: where the last reading ended.
            of_attempt: placement and attempt; None: the newest of the member.
        """
        member = self._logging_member
        first = self._engine.contacts().get(member)
        if first is None or first.address is None or self._agents.owes_answer(member, first):
            return "", offset
        query = MetricsQuery(offset=offset, of_attempt=of_attempt)
        sent = self._calls.send(first, query, timeout_s=POLL_TIMEOUT_S)
        try:
            reply = self._calls.receive(first, query, sent)
        except (AgentUnreachable, EngineError):
            return "", offset
        return reply.text or "", reply.offset if reply.offset is not None else offset

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        """Read the end of each worker's output, with the nodes of the containers that answer."""
        replies = self._agents.query(LogsQuery(tail_bytes=tail_bytes), timeout_s=CALL_TIMEOUT_S)
        return [(node, log) for node, reply in replies for log in reply.logs]

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        """Read logs of the newest attempt, with the nodes of the containers that answer."""
        replies = self._agents.query(query, timeout_s=CALL_TIMEOUT_S)
        return [(node, piece) for node, reply in replies for piece in reply.pieces]

    def list_saved(self, query: SavedQuery) -> dict[str, tuple[SavedCheckpoint, ...]]:
        """List the complete checkpoints of a command that each node sees.

        Raises:
            EngineError: a node cannot read them, or no node answers.
        """
        contacts = self._engine.contacts()
        queries = dict.fromkeys(contacts, query)
        checkpoints: dict[str, tuple[SavedCheckpoint, ...]] = {}
        for index, answer in self._agents.call_all(contacts, queries, timeout_s=SAVED_TIMEOUT_S):
            if isinstance(answer, EngineError):
                raise answer
            if isinstance(answer, AgentReply):
                checkpoints[contacts[index].node] = answer.saved
        if not checkpoints:
            raise EngineError("no node says which checkpoints the command has")
        return checkpoints

    def texts(
        self, tail_bytes: int, *, since_s: float, of_attempt: tuple[int, int] | None = None
    ) -> Sequence[tuple[str, NodeLog]]:
        """Read what the nodes know beside the output of workers.

        Containers that answer give device logs and the output of the driver's tools; the platform
        adds its reports of their nodes.

        Args:
            tail_bytes: length that is read of each log.
            since_s: platform reports before it are left out; seconds since the epoch.
            of_attempt: placement and attempt of the device logs; None: the newest.
        """
        device_logs = self._texts(EvidenceQuery(tail_bytes=tail_bytes, of_attempt=of_attempt))
        return [*device_logs, *self._engine.texts(since_s)]

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:
        """Read the platform's reports of chips; see `Engine.chip_reports`."""
        return self._engine.chip_reports(since_s)

    def stacks(self) -> Sequence[tuple[str, NodeLog]]:
        """Read the stack of every thread of the workers, in the containers that answer."""
        return self._texts(StacksQuery())

    def _texts(self, query: EvidenceQuery | StacksQuery) -> Sequence[tuple[str, NodeLog]]:
        replies = self._agents.query(query, timeout_s=EVIDENCE_TIMEOUT_S)
        return [(node, text) for node, reply in replies for text in reply.texts]

    def collect_logs(self, placement: int, attempt: int) -> Sequence[tuple[str, Collected]]:
        """Have every node put its logs of an ended attempt into the store, in the background.

        Returns the progress of each node that answers at once. It may be called again.
        """
        order = CollectOrder(placement=placement, attempt=attempt)
        replies = self._agents.query(order, timeout_s=COLLECT_TIMEOUT_S)
        return [(node, reply.collected) for node, reply in replies if reply.collected is not None]

    def _retire(
        self,
        list_contacts: Callable[[], Mapping[int, AgentEndpoint]],
        members: Collection[int] | None,
        grace_s: float,
    ) -> None:
        """Have containers end by themselves, with their saves and uploads, and wait for them.

        The engine ends those that do not answer by force.

        Args:
            list_contacts: lists the containers that are there.
            members: indices of the members whose containers end; None: all.
            grace_s: time for their processes to end.
        """
        leaving = {i: c for i, c in list_contacts().items() if members is None or i in members}
        order = ShutdownOrder(grace_s=grace_s)
        ending = self._agents.order(leaving, order, timeout_s=SHUTDOWN_TIMEOUT_S)
        deadline_s = time.monotonic() + grace_s + SHUTDOWN_MARGIN_S
        while time.monotonic() < deadline_s:
            now = list_contacts()
            if all(index not in now or now[index].address is None for index in ending):
                return
            time.sleep(ENDING_POLL_S)
