"""What a supervisor does with the containers of a run: the agents in them are spoken to here.

The same for every engine. All members are called at once, each with a deadline of its own, so a
node that is dead or cut off delays nobody's look at the others. Times are seconds.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from perdure.training.agent.control import CALL_TIMEOUT_S
from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.agent_calls import AgentCalls
from perdure.training.engines.base import (
    ANY_NODE,
    AgentEndpoint,
    ClockProbe,
    Engine,
    Placement,
    Snapshot,
    bound,
)
from perdure.training.engines.rank_table import Server, rank_table
from perdure.training.engines.standing_by import StandingBy
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.recovery.faults import FaultClass
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
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.agent_status import AgentStatus, SavedCheckpoint
from perdure.training.wire.logs import (
    Collected,
    CollectOrder,
    LogPiece,
    LogsQuery,
    ReadLogsQuery,
    WorkerLog,
)
from perdure.training.wire.node import Check, HealOrder, HealReply, NodeDevices, unanswered
from perdure.training.wire.transport import TimedLine

RENDEZVOUS_TIMEOUT_S = 120.0  # the first one imports torch, which a cold disk makes slow
SILENT_AGENT_S = 15.0  # an agent that lives but does not answer for this long is lost
REJOIN_TIMEOUT_S = 40.0  # an agent itself gives the coordinator 30 s
LOOK_TIMEOUT_S = 2.0  # of one look at all members; who is later answers the next one
SHUTDOWN_MARGIN_S = 10.0
GREET_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the answer; one that hangs is ended by force
COLLECT_TIMEOUT_S = 3.0  # it answers at once, and a recovery must not wait for one that does not
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
SAVED_TIMEOUT_S = 60.0  # a shared file system with many files
EVIDENCE_TIMEOUT_S = 60.0  # the driver's tools are asked one by one for every device
ENDING_POLL_S = 0.1

Key = tuple[str, int]  # host and port


class Fleet:
    """The containers of a run, with the agents in them.

    Calls may raise EngineError; those that need one certain agent, AgentUnreachable.

    Args:
        engine: where the containers come from.
        job: of the run.
        epoch: the supervisor's; agents obey the highest that they have received.
    """

    def __init__(self, engine: Engine, job: Job, *, epoch: int) -> None:
        self._engine = engine
        self._job = job
        self._calls = AgentCalls(epoch)
        self.standing_by = StandingBy(engine, self._calls)
        self._answered_s: dict[int, float] = {}
        self._asked: dict[Key, Future[TimedLine]] = {}  # looks that have had no answer yet
        self._logging_member = 0
        self._silent: set[int] = set()  # members that count as lost: looks alone still go to them

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs that its engine can carry out."""
        return self._engine.capabilities

    def nodes(self) -> Sequence[str] | None:
        """Names of all nodes, in order of preference; None: the engine chooses them itself."""
        return self._engine.nodes()

    def bound(self, placement: Placement, members: Collection[int] | None = None) -> Placement:
        """The placement with the nodes that the containers of these members are on; None: all."""
        contacts = self._engine.contacts()
        chosen = {i: one for i, one in contacts.items() if members is None or i in members}
        return bound(placement, chosen)

    def misplaced(self, placement: Placement) -> frozenset[int]:
        """Members of a placement whose container is another one's, or gone."""
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
        """How often a look at all agents is worth what it takes."""
        return self._engine.poll_s

    def losses(self, lost: Collection[str]) -> Sequence[NodeLoss]:
        """What the engine knows of containers that are gone, or about to be.

        Args:
            lost: nodes whose agents are.
        """
        contacts = self._engine.contacts().values()
        known = [contact.loss for contact in contacts if contact.loss is not None]
        suspected = [
            NodeLoss(one.node, FaultClass.NODE_LOST, "NODE_NOT_READY", one.node_problem)
            for one in contacts
            if one.loss is None and one.node in lost and one.node_problem
        ]
        return [*known, *suspected]

    def submit(self, placement: Placement) -> None:
        """Start a container for every member; whatever the run had before is ended first."""
        self._retire(self._engine.inventory, None, self._job.engine.grace_s)
        self._engine.submit(placement, ready=self.standing_by.ready())
        members = [member.index for member in placement.members]
        self._begin(members)
        self._assign(placement, members)

    def replace(
        self, placement: Placement, members: Collection[int], *, grace_s: float | None = None
    ) -> None:
        """Start new containers for these members; the others keep theirs.

        Args:
            placement: that they are in.
            members: by their indices.
            grace_s: for the processes in the old containers; None: the job's.
        """
        grace_s = self._job.engine.grace_s if grace_s is None else grace_s
        ready = self.standing_by.ready()
        self._retire(self._engine.contacts, members, grace_s)
        self._engine.replace(placement, members, ready=ready)
        self._begin(members)
        self._assign(placement, members)

    def _assign(self, placement: Placement, members: Collection[int]) -> None:
        """Have containers that stood by be these members'; new ones for those that do not obey."""
        failed = self.standing_by.assign(members)
        if failed:
            self._engine.replace(placement, failed)
            self._begin(failed)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        alive = self._engine.adopt(placement)
        # Silence counts from here: a new supervisor has not asked anybody yet. Who was silent for
        # this one already stays so, or a recovery would wait for a dead node once more.
        self._begin(set(self._engine.contacts()) - self._silent)
        return alive

    def cancel(self, grace_s: float) -> None:
        """Stop the processes, end the containers, wait until nothing is left."""
        self._retire(self._engine.inventory, None, grace_s)
        self._engine.end()

    def greet(self) -> dict[int, ClockProbe]:
        """The members that answer, by their index; the checks report the others."""
        contacts = self._engine.contacts()
        sent = {
            index: self._calls.send(contact, ClockQuery(), timeout_s=GREET_TIMEOUT_S)
            for index, contact in self._heard(contacts).items()
        }
        found: dict[int, ClockProbe] = {}
        for index, answer in sent.items():
            node, host = contacts[index].node, contacts[index].host
            with suppress(AgentUnreachable, EngineError):
                reply = self._calls.received(contacts[index], ClockQuery(), answer)
                times = answer.result()
                found[index] = ClockProbe.of(
                    node, host, reply, sent_s=times.sent_s, answered_s=times.answered_s
                )
        return found

    def check(self, orders: Mapping[int, CheckOrder]) -> Sequence[Check]:
        """Check all members at once; one that does not answer has failed."""
        known = self._engine.contacts()
        contacts = {index: known[index] for index in orders}
        limit_s = max((order.timeout_s for order in orders.values()), default=0.0)
        answers = self._call_all(contacts, orders, timeout_s=limit_s + CHECK_MARGIN_S)
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
        """Heal the chips of one node, in the background; repeated: how far it is."""
        contact = next((c for c in self._engine.contacts().values() if c.node == node), None)
        if contact is None:
            raise AgentUnreachable(f"no container is on {node}")
        return self._calls.client(contact).call(order).healing or HealReply()

    def start(self, order: StartOrder) -> None:
        """Start the processes of an attempt in every container; rendezvous is filled in."""
        contacts = dict(sorted(self._engine.contacts().items()))
        self.standing_by.assign(contacts)  # a supervisor before may have died over it
        filled = self._filled(order, contacts)
        self._asked.clear()  # what was asked before says nothing of this attempt
        self._replies(contacts, filled, timeout_s=CALL_TIMEOUT_S, needs_all=True)

    def join(self, order: StartOrder, members: Collection[int], *, generation: int) -> None:
        """Start the processes of these members in an attempt whose other processes live.

        Args:
            order: of the attempt.
            members: that have new containers.
            generation: of the process groups that they join, or an earlier one.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        self.standing_by.assign(members)  # likewise
        filled = self._filled(order, contacts).model_copy(update={"generation": generation})
        joining = {index: contacts[index] for index in members}
        self._replies(joining, filled, timeout_s=CALL_TIMEOUT_S, needs_all=True)

    def notice(self, order: NoticeOrder) -> None:
        """Let the coordinator of an attempt know; it is where the first member is.

        Raises:
            AgentUnreachable: nobody is there to pass it on.
            EngineError: the coordinator is gone, or of another attempt.
        """
        self._calls.client(self._engine.contacts()[0]).call(order)

    def resume(self, order: StartOrder, began: RecoveryBegan) -> None:
        """Open the coordinator of an attempt where the first member is now, and lead others there.

        Args:
            order: of the attempt.
            began: the recovery with which it begins.

        Raises:
            AgentUnreachable: the first member is not there.
            EngineError: another one cannot reach it.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        reply = self._rendezvous(order, contacts[0], resumes=began)
        assert reply.coordinator is not None  # noqa: S101 a session has one
        moved = {rank // self._job.engine.slots_per_node for rank in began.moved}
        others = {index: one for index, one in contacts.items() if index not in moved}
        rejoin = RejoinOrder(
            placement=order.placement, attempt=order.attempt, coordinator=reply.coordinator
        )
        # Of those that do not answer, the next look shows whether they are lost, too.
        self._replies(others, rejoin, timeout_s=REJOIN_TIMEOUT_S)

    @property
    def first_container(self) -> str:
        """Distinguishes the container where the attempt's log is.

        That is the first member's; of a command whose output shows its steps, the container of the
        first member that prints them.
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

    def _filled(self, order: StartOrder, contacts: Mapping[int, AgentEndpoint]) -> StartOrder:
        """The order with the attempt's rendezvous and its hosts."""
        first = contacts[0]
        reply = self._rendezvous(order, first)
        opened = {"master_port": reply.port, "coordinator": reply.coordinator}
        placed = {
            "hosts": tuple(contact.host for contact in contacts.values()),
            "master_addr": first.host,
            "rank_table": self._rank_table(contacts),
        }
        return order.model_copy(update={**placed, **opened})

    def _rank_table(self, contacts: Mapping[int, AgentEndpoint]) -> str | None:
        query = query_of(self._job)
        if query is None:
            return None
        replies = self._replies(contacts, query, timeout_s=CALL_TIMEOUT_S, needs_all=True)
        servers = [
            Server(contact.node, contact.host, replies[index].devices or NodeDevices(devices=()))
            for index, contact in contacts.items()
        ]
        return rank_table(query.form, servers)

    def poll(self) -> Snapshot:
        """The state of the members, as far as they answer within one look.

        Raises:
            EngineError: an agent obeys another supervisor.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        self._look(contacts)
        try:
            return self._snapshot(contacts)
        except EngineError:
            self._asked.clear()  # answers that nobody has taken would be those of the next look
            raise

    def _snapshot(self, contacts: Mapping[int, AgentEndpoint]) -> Snapshot:
        agents: dict[int, AgentStatus] = {}
        lost: list[str] = []
        unanswered_nodes: list[str] = []
        for index, contact in contacts.items():
            status = self._answer(index, contact)
            if status is not None:
                agents[index] = status
                self._silent.discard(index)
            elif contact.address is None or self._is_silent(index):
                lost.append(contact.node)
                self._silent.add(index)
            else:
                unanswered_nodes.append(contact.node)
        shown = [index for index, status in agents.items() if status.shown is not None]
        if shown and self._logging_member not in shown:
            self._logging_member = shown[0]
        return Snapshot(agents, tuple(lost), tuple(unanswered_nodes))

    def _look(self, contacts: Mapping[int, AgentEndpoint]) -> None:
        """Ask everybody who has not been asked yet, and wait for the answers a little."""
        living = {c.address: c for c in contacts.values() if c.address is not None}
        self._asked = {at: one for at, one in self._asked.items() if at in living}
        for at, contact in living.items():
            if at not in self._asked:
                self._asked[at] = self._calls.send(contact, StatusQuery(), timeout_s=CALL_TIMEOUT_S)
        concurrent.futures.wait(self._asked.values(), timeout=LOOK_TIMEOUT_S)

    def _answer(self, index: int, contact: AgentEndpoint) -> AgentStatus | None:
        """What a member answered to the look, None while it has not."""
        if contact.address is None or not self._asked[contact.address].done():
            return None
        try:
            answer = self._asked.pop(contact.address)
            reply = self._calls.received(contact, StatusQuery(), answer)
        except AgentUnreachable:
            return None
        # Its own time: nobody may have looked for a while.
        self._answered_s[index] = time.monotonic() - (time.time() - answer.result().answered_s)
        return reply.status

    def _is_silent(self, index: int) -> bool:
        if not self._engine.sees_agents:
            self._answered_s[index] = time.monotonic()  # nobody could have heard it
        return time.monotonic() - self._answered_s.get(index, 0.0) > SILENT_AGENT_S

    def _begin(self, members: Collection[int]) -> None:
        """Count the silence of members from now on; what was asked before is of others."""
        self._asked.clear()
        self._silent.difference_update(members)
        self._answered_s.update(dict.fromkeys(members, time.monotonic()))

    def stop(self, grace_s: float) -> None:
        """Stop the processes in every container that answers; returns at once.

        Raises:
            EngineError: an agent obeys another supervisor.
        """
        contacts = self._engine.contacts()
        self._replies(contacts, StopOrder(grace_s=grace_s), timeout_s=CALL_TIMEOUT_S)
        self._asked.clear()

    def kill(self, victim: Victim, index: int) -> bool:
        """Have something killed, in a drill; whether it was there.

        Args:
            victim: what.
            index: global rank, else the member; the coordinator is where it is.

        Raises:
            EngineError: the run is no drill, or an agent obeys another supervisor.
        """
        if victim is Victim.SPARE:
            return self.standing_by.kill_one()
        contacts = self._engine.contacts()
        rank = index if victim is Victim.RANK else None
        # Which member has a rank or the coordinator, it knows itself.
        if victim not in (Victim.RANK, Victim.COORDINATOR):
            contacts = {member: one for member, one in contacts.items() if member == index}
        order = KillOrder(victim=victim, rank=rank)
        replies = self._replies(contacts, order, timeout_s=CALL_TIMEOUT_S)
        return any(reply.num_killed for reply in replies.values())

    def left_over(self) -> Sequence[str]:
        """Names of what the run still has where its containers were."""
        return self._engine.left_over()

    def metrics(self, offset: int) -> tuple[str, int]:
        """Step records that the first rank wrote after `offset` bytes, and the new offset.

        None while its agent is lost, or owes an answer: nobody's look at the others waits for it.
        """
        member = self._logging_member
        first = self._engine.contacts().get(member)
        if first is None or first.address is None or self._owes_answer(member, first):
            return "", offset
        query = MetricsQuery(offset=offset)
        sent = self._calls.send(first, query, timeout_s=LOOK_TIMEOUT_S)
        try:
            reply = self._calls.received(first, query, sent)
        except (AgentUnreachable, EngineError):
            return "", offset
        return reply.text or "", reply.offset if reply.offset is not None else offset

    def _owes_answer(self, index: int, contact: AgentEndpoint) -> bool:
        asked = self._asked.get(contact.address) if contact.address is not None else None
        return index in self._silent or (asked is not None and not asked.done())

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        """The end of each worker's output, of the containers that answer, with their nodes."""
        replies = self._ask_all(LogsQuery(tail_bytes=tail_bytes), timeout_s=CALL_TIMEOUT_S)
        return [(node, log) for node, reply in replies for log in reply.logs]

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        """What logs of the newest attempt hold, of the containers that answer, with their nodes."""
        replies = self._ask_all(query, timeout_s=CALL_TIMEOUT_S)
        return [(node, piece) for node, reply in replies for piece in reply.pieces]

    def saved(self, query: SavedQuery) -> dict[str, tuple[SavedCheckpoint, ...]]:
        """The complete checkpoints of a command that each node sees.

        Raises:
            EngineError: a node cannot read them, or none has answered.
        """
        contacts = self._engine.contacts()
        sent = dict.fromkeys(contacts, query)
        found: dict[str, tuple[SavedCheckpoint, ...]] = {}
        for index, answer in self._call_all(contacts, sent, timeout_s=SAVED_TIMEOUT_S):
            if isinstance(answer, EngineError):
                raise answer
            if isinstance(answer, AgentReply):
                found[contacts[index].node] = answer.saved
        if not found:
            raise EngineError("no node says which checkpoints the command has")
        return found

    def texts(self, tail_bytes: int, *, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        """What the nodes know beside what workers print.

        Device logs and the output of the driver's tools, of the containers that answer; and what
        the engine's platform reports of their nodes.

        Args:
            tail_bytes: of each log.
            since_s: of what the platform reports, seconds since the epoch.
        """
        of_agents = self._texts(EvidenceQuery(tail_bytes=tail_bytes))
        return [*of_agents, *self._engine.texts(since_s)]

    def stacks(self) -> Sequence[tuple[str, NodeLog]]:
        """The stack of every thread of the workers, of the containers that answer."""
        return self._texts(StacksQuery())

    def _texts(self, query: EvidenceQuery | StacksQuery) -> Sequence[tuple[str, NodeLog]]:
        replies = self._ask_all(query, timeout_s=EVIDENCE_TIMEOUT_S)
        return [(node, text) for node, reply in replies for text in reply.texts]

    def collect_logs(self, placement: int, attempt: int) -> Sequence[tuple[str, Collected]]:
        """Have every node put its logs of an ended attempt into the store, in the background.

        Returns how far each is that answers at once, with its name; may be called again.
        """
        order = CollectOrder(placement=placement, attempt=attempt)
        replies = self._ask_all(order, timeout_s=COLLECT_TIMEOUT_S)
        return [(node, reply.collected) for node, reply in replies if reply.collected is not None]

    def _ask_all(self, query: Order, *, timeout_s: float) -> Sequence[tuple[str, AgentReply]]:
        """Ask everybody; callers do without those that do not answer, who are named already."""
        contacts = self._engine.contacts()
        answers = self._call_all(contacts, dict.fromkeys(contacts, query), timeout_s=timeout_s)
        return [
            (contacts[index].node, answer)
            for index, answer in answers
            if isinstance(answer, AgentReply)
        ]

    def _retire(
        self,
        known: Callable[[], Mapping[int, AgentEndpoint]],
        members: Collection[int] | None,
        grace_s: float,
    ) -> None:
        """Have containers end by themselves, saves and uploads included; None: all that is known.

        Those that do not answer cannot, and are left to the engine's force.
        """
        leaving = {i: c for i, c in known().items() if members is None or i in members}
        order = ShutdownOrder(grace_s=grace_s)
        ending = self._replies(leaving, order, timeout_s=SHUTDOWN_TIMEOUT_S)
        deadline_s = time.monotonic() + grace_s + SHUTDOWN_MARGIN_S
        while time.monotonic() < deadline_s:
            now = known()
            if all(index not in now or now[index].address is None for index in ending):
                return
            time.sleep(ENDING_POLL_S)

    def _replies(
        self,
        contacts: Mapping[int, AgentEndpoint],
        order: Order,
        *,
        timeout_s: float,
        needs_all: bool = False,
    ) -> dict[int, AgentReply]:
        """Have every member carry out an order. What they answered, by their index.

        Raises:
            AgentUnreachable: one does not answer, and `needs_all`; else it is lost, or hangs.
            EngineError: one refuses.
        """
        replies: dict[int, AgentReply] = {}
        problems: list[AgentUnreachable | EngineError] = []
        # All of them are awaited: an order on its way could be overtaken by the one to stop.
        orders = dict.fromkeys(contacts, order)
        for index, answer in self._call_all(contacts, orders, timeout_s=timeout_s):
            if isinstance(answer, AgentReply):
                replies[index] = answer
            elif needs_all or isinstance(answer, EngineError):
                problems.append(answer)
        if problems:
            raise problems[0]
        return replies

    def _call_all(
        self,
        contacts: Mapping[int, AgentEndpoint],
        orders: Mapping[int, Order],
        *,
        timeout_s: float,
    ) -> Iterator[tuple[int, AgentReply | AgentUnreachable | EngineError]]:
        """Call members all at once. What each answered, or why it did not."""
        answers = self._calls.call_all(self._heard(contacts), orders, timeout_s=timeout_s)
        for index, contact in contacts.items():
            silent = AgentUnreachable(f"the agent of {contact.node} is gone, or silent")
            yield index, answers.get(index, silent)

    def _heard(self, contacts: Mapping[int, AgentEndpoint]) -> dict[int, AgentEndpoint]:
        """Those that have an agent; one that is lost would keep a recovery waiting."""
        return {
            index: contact
            for index, contact in contacts.items()
            if contact.address is not None and index not in self._silent
        }
