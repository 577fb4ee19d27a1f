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

from training.agent.control import CALL_TIMEOUT_S, AgentClient
from training.engines.base import Contact, Engine, Greeting, Placement, Snapshot
from training.engines.rank_table import Server, rank_table
from training.errors import AgentUnreachable, EngineError
from training.health.device_addresses import query_of
from training.job import Job
from training.recovery.rungs import Rung
from training.wire.agent import (
    AgentReply,
    AgentStatus,
    CheckOrder,
    EvidenceQuery,
    GreetQuery,
    MetricsQuery,
    NodeText,
    Order,
    RendezvousOrder,
    ShutdownOrder,
    StacksQuery,
    StartOrder,
    StatusQuery,
    StopOrder,
)
from training.wire.fan_out import FanOut, TimedLine
from training.wire.healing import HealOrder, HealReply
from training.wire.logs import (
    Collected,
    CollectOrder,
    LogPiece,
    LogsQuery,
    ReadLogsQuery,
    WorkerLog,
)
from training.wire.node import Check, unanswered
from training.wire.rank_table import NodeDevices

RENDEZVOUS_TIMEOUT_S = 120.0  # the first one imports torch, which a cold disk makes slow
SILENT_AGENT_S = 15.0  # an agent that lives but does not answer for this long is lost
LOOK_TIMEOUT_S = 2.0  # of one look at all members; who is later answers the next one
SHUTDOWN_MARGIN_S = 10.0
GREET_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the answer; one that hangs is ended by force
COLLECT_TIMEOUT_S = 3.0  # it answers at once, and a recovery must not wait for one that does not
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
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
        self._epoch = epoch
        self._fan_out = FanOut()
        self._answered_s: dict[int, float] = {}
        self._asked: dict[Key, Future[TimedLine]] = {}  # looks that have had no answer yet

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Rungs that its engine can carry out."""
        return self._engine.capabilities

    def nodes(self) -> Sequence[str]:
        """Names of all nodes, in order of preference."""
        return self._engine.nodes()

    def submit(self, placement: Placement) -> None:
        """Start a container for every member; whatever the run had before is ended first."""
        self._retire(self._engine.inventory, None, self._job.engine.grace_s)
        self._engine.submit(placement)
        self._begin([member.index for member in placement.members])

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        """Start new containers for these members; the others keep theirs."""
        self._retire(self._engine.contacts, members, self._job.engine.grace_s)
        self._engine.replace(placement, members)
        self._begin(members)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        alive = self._engine.adopt(placement)
        # Silence counts from here: a new supervisor has not asked anybody yet.
        self._begin(self._engine.contacts())
        return alive

    def cancel(self, grace_s: float) -> None:
        """Stop the processes, end the containers, wait until nothing is left."""
        self._retire(self._engine.inventory, None, grace_s)
        self._engine.end()

    def greet(self) -> dict[int, Greeting]:
        """The members that answer, by their index; the checks report the others."""
        contacts = self._engine.contacts()
        sent = self._send_all(contacts, dict.fromkeys(contacts, GreetQuery()), GREET_TIMEOUT_S)
        found: dict[int, Greeting] = {}
        for index, answer in sent.items():
            node, host = contacts[index].node, contacts[index].host
            with suppress(AgentUnreachable, EngineError):
                reply = _received(self._client(contacts[index]), GreetQuery(), answer)
                times = answer.result()
                found[index] = Greeting.of(
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
        return self._client(contact).call(order).healing or HealReply()

    def start(self, order: StartOrder) -> None:
        """Start the processes of an attempt in every container; rendezvous is filled in."""
        contacts = dict(sorted(self._engine.contacts().items()))
        first = contacts[0]
        rendezvous = RendezvousOrder(
            port=self._job.comm.master_port,
            start=order.without_secrets(),
            supported=tuple(rung for rung in Rung if rung in self.capabilities),
        )
        reply = self._client(first).call(rendezvous, timeout_s=RENDEZVOUS_TIMEOUT_S)
        opened = {"master_port": reply.port, "coordinator": reply.coordinator}
        placed = {
            "hosts": tuple(contact.host for contact in contacts.values()),
            "master_addr": first.host,
            "rank_table": self._rank_table(contacts),
        }
        filled = order.model_copy(update={**placed, **opened})
        self._asked.clear()  # what was asked before says nothing of this attempt
        self._replies(contacts, filled, timeout_s=CALL_TIMEOUT_S, needs_all=True)

    def _rank_table(self, contacts: Mapping[int, Contact]) -> str | None:
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

    def _snapshot(self, contacts: Mapping[int, Contact]) -> Snapshot:
        agents: dict[int, AgentStatus] = {}
        lost: list[str] = []
        unanswered_nodes: list[str] = []
        for index, contact in contacts.items():
            status = self._answer(index, contact)
            if status is not None:
                agents[index] = status
            elif contact.address is None or self._is_silent(index):
                lost.append(contact.node)
            else:
                unanswered_nodes.append(contact.node)
        return Snapshot(agents, tuple(lost), tuple(unanswered_nodes))

    def _look(self, contacts: Mapping[int, Contact]) -> None:
        """Ask everybody who has not been asked yet, and wait for the answers a little."""
        living = {c.address: c for c in contacts.values() if c.address is not None}
        self._asked = {at: one for at, one in self._asked.items() if at in living}
        for at, contact in living.items():
            if at not in self._asked:
                self._asked[at] = self._send(contact, StatusQuery(), timeout_s=CALL_TIMEOUT_S)
        concurrent.futures.wait(self._asked.values(), timeout=LOOK_TIMEOUT_S)

    def _answer(self, index: int, contact: Contact) -> AgentStatus | None:
        """What a member answered to the look, None while it has not."""
        if contact.address is None or not self._asked[contact.address].done():
            return None
        try:
            answer = self._asked.pop(contact.address)
            reply = _received(self._client(contact), StatusQuery(), answer)
        except AgentUnreachable:
            return None
        # Its own time: nobody may have looked for a while.
        self._answered_s[index] = time.monotonic() - (time.time() - answer.result().answered_s)
        return reply.status

    def _is_silent(self, index: int) -> bool:
        return time.monotonic() - self._answered_s.get(index, 0.0) > SILENT_AGENT_S

    def _begin(self, members: Collection[int]) -> None:
        """Count the silence of members from now on; what was asked before is of others."""
        self._asked.clear()
        self._answered_s.update(dict.fromkeys(members, time.monotonic()))

    def stop(self, grace_s: float) -> None:
        """Stop the processes in every container that answers; returns at once.

        Raises:
            EngineError: an agent obeys another supervisor.
        """
        contacts = self._engine.contacts()
        self._replies(contacts, StopOrder(grace_s=grace_s), timeout_s=CALL_TIMEOUT_S)
        self._asked.clear()

    def metrics(self, offset: int) -> tuple[str, int]:
        """Step records that the first rank wrote after `offset` bytes, and the new offset."""
        try:
            reply = self._client(self._engine.contacts()[0]).call(MetricsQuery(offset=offset))
        except (AgentUnreachable, EngineError):
            return "", offset
        return reply.text or "", reply.offset if reply.offset is not None else offset

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        """The end of each worker's output, of the containers that answer, with their nodes."""
        replies = self._ask_all(LogsQuery(tail_bytes=tail_bytes), timeout_s=CALL_TIMEOUT_S)
        return [(node, log) for node, reply in replies for log in reply.logs]

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        """What logs of the newest attempt hold, of the containers that answer, with their nodes."""
        replies = self._ask_all(query, timeout_s=CALL_TIMEOUT_S)
        return [(node, piece) for node, reply in replies for piece in reply.pieces]

    def texts(self, tail_bytes: int) -> Sequence[tuple[str, NodeText]]:
        """Device logs and the output of the driver's tools, of the containers that answer."""
        return self._texts(EvidenceQuery(tail_bytes=tail_bytes))

    def stacks(self) -> Sequence[tuple[str, NodeText]]:
        """The stack of every thread of the workers, of the containers that answer."""
        return self._texts(StacksQuery())

    def _texts(self, query: EvidenceQuery | StacksQuery) -> Sequence[tuple[str, NodeText]]:
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
        known: Callable[[], Mapping[int, Contact]],
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
        contacts: Mapping[int, Contact],
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
        self, contacts: Mapping[int, Contact], orders: Mapping[int, Order], *, timeout_s: float
    ) -> Iterator[tuple[int, AgentReply | AgentUnreachable | EngineError]]:
        """Call members all at once. What each answered, or why it did not."""
        sent = self._send_all(contacts, orders, timeout_s)
        for index, contact in contacts.items():
            try:
                client = self._client(contact)
                yield index, _received(client, orders[index], sent[index])
            except (AgentUnreachable, EngineError) as error:
                yield index, error

    def _send_all(
        self, contacts: Mapping[int, Contact], orders: Mapping[int, Order], timeout_s: float
    ) -> dict[int, Future[TimedLine]]:
        """Call those that have an agent."""
        return {
            index: self._send(contact, orders[index], timeout_s=timeout_s)
            for index, contact in contacts.items()
            if contact.address is not None
        }

    def _send(self, contact: Contact, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        client = self._client(contact)
        request = client.request(order)
        return self._fan_out.call(client.host, client.port, request, timeout_s=timeout_s)

    def _client(self, contact: Contact) -> AgentClient:
        if contact.address is None:
            raise AgentUnreachable(f"the agent of {contact.node} is gone")
        host, port = contact.address
        return AgentClient(host, port, contact.token, self._epoch)


def _received(client: AgentClient, order: Order, answer: Future[TimedLine]) -> AgentReply:
    try:
        line = answer.result().line
    except (OSError, ValueError) as error:
        raise client.unreachable(error) from error
    return client.reply(order, line)
