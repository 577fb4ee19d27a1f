"""Calls to the agents of a run, all of them from one thread and each with a deadline of its own.

A node that is dead or cut off delays no poll of the others. An agent that lives but stays silent
for too long is lost: from then on it gets polls alone, so that no recovery waits for it. Times are
seconds.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from perdure.training.agent.control import CALL_TIMEOUT_S, AgentClient
from perdure.training.config.recovery import RankTableForm
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, Engine, Snapshot
from perdure.training.errors import AgentUnreachable, EngineError, OtherRelease
from perdure.training.node_checks.device_network import ping_targets
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.agent import AgentReply, CheckOrder, Order, StatusQuery
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.node import VISIBLE, DevicesQuery
from perdure.training.wire.transport import FanOut, TimedLine

SILENT_AGENT_S = 15.0  # an agent that lives but does not answer for this long is lost
POLL_TIMEOUT_S = 2.0  # for all members together; a later answer counts in the next poll
MAX_UNASKED_S = 5.0  # between two polls: a supervisor that was busy for longer has asked nobody

OTHER_RELEASE = "OTHER_RELEASE"  # of an agent that this supervisor cannot speak to

K = TypeVar("K")
Answer = AgentReply | AgentUnreachable | EngineError


class AgentCalls:
    """Sends orders to agents.

    Args:
        epoch: the supervisor's; agents obey the highest that they have received.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._fan_out = FanOut()

    def client(self, contact: AgentEndpoint) -> AgentClient:
        """Return a client for one agent.

        Raises:
            AgentUnreachable: the agent's container is gone.
        """
        if contact.address is None:
            raise AgentUnreachable(f"the agent of {contact.node} is gone")
        host, port = contact.address
        return AgentClient(host, port, contact.token, self._epoch)

    def send(self, contact: AgentEndpoint, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        """Send an order; `receive` reads the reply from the future.

        Raises:
            AgentUnreachable: there is no agent.
        """
        client = self.client(contact)
        request = client.request(order)
        return self._fan_out.call(client.host, client.port, request, timeout_s=timeout_s)

    def receive(self, contact: AgentEndpoint, order: Order, sent: Future[TimedLine]) -> AgentReply:
        """Wait for the reply to an order that was sent.

        Raises:
            AgentUnreachable: the agent did not answer in time.
            EngineError: the agent refused the order.
        """
        client = self.client(contact)
        try:
            line = sent.result().line
        except (OSError, ValueError) as error:
            raise client.unreachable(error) from error
        return client.reply(order, line)

    def call_all(
        self, contacts: Mapping[K, AgentEndpoint], orders: Mapping[K, Order], *, timeout_s: float
    ) -> dict[K, Answer]:
        """Call agents all at once. Returns each agent's reply, or the reason why there is none."""
        answers: dict[K, Answer] = {}
        sent: dict[K, Future[TimedLine]] = {}
        for key, contact in contacts.items():
            try:
                sent[key] = self.send(contact, orders[key], timeout_s=timeout_s)
            except AgentUnreachable as error:
                answers[key] = error
        for key, future in sent.items():
            try:
                answers[key] = self.receive(contacts[key], orders[key], future)
            except (AgentUnreachable, EngineError) as error:
                answers[key] = error
        return answers


class MemberAgents:
    """The agents of the members: polled, ordered all at once, and lost after a long silence.

    Args:
        engine: knows their containers.
        calls: carries the orders.
    """

    def __init__(self, engine: Engine, calls: AgentCalls) -> None:
        self._engine = engine
        self._calls = calls
        self._polls: dict[
            tuple[str, int], Future[TimedLine]
        ] = {}  # polls without an answer, by address
        self._silence_s: dict[int, float] = {}  # since the newest answer, by member
        self._polled_s = time.monotonic()
        self._silent: set[int] = set()  # members that count as lost
        self._others: dict[int, OtherRelease] = {}  # members that cannot be spoken to
        self._has_spoken = False  # with any member

    def restart_silence(self, members: Collection[int]) -> None:
        """Count the silence of these members from now on, since their containers are new."""
        self.forget_polls()
        self._silent.difference_update(members)
        self._others = {i: why for i, why in self._others.items() if i not in members}
        self._silence_s.update(dict.fromkeys(members, 0.0))

    def restart_all_silence(self) -> None:
        """Count the silence of all members from now on, except of those that are lost already.

        A new supervisor has not asked anybody yet; a recovery must not wait for a dead node twice.
        """
        self.restart_silence(self._engine.contacts().keys() - self._silent)

    def forget_polls(self) -> None:
        """Drop polls without an answer; a later answer would be that of former processes."""
        self._polls.clear()

    def owes_answer(self, index: int, contact: AgentEndpoint) -> bool:
        """Whether a member is lost, or has yet to answer a poll."""
        poll = self._polls.get(contact.address) if contact.address is not None else None
        return index in self._silent or (poll is not None and not poll.done())

    def poll(self) -> Snapshot:
        """Ask all members for their status and wait a little for the answers.

        Raises:
            EngineError: an agent obeys another supervisor.
            OtherRelease: nobody has answered yet but agents of another release.
        """
        contacts = dict(sorted(self._engine.contacts().items()))
        living = {c.address: c for c in contacts.values() if c.address is not None}
        self._polls = {address: poll for address, poll in self._polls.items() if address in living}
        for address, contact in living.items():
            if address not in self._polls:
                poll = self._calls.send(contact, StatusQuery(), timeout_s=CALL_TIMEOUT_S)
                self._polls[address] = poll
        concurrent.futures.wait(self._polls.values(), timeout=POLL_TIMEOUT_S)
        try:
            return self._snapshot(contacts)
        except EngineError:
            self.forget_polls()  # the next poll would take answers that this one has not read
            raise

    def _snapshot(self, contacts: Mapping[int, AgentEndpoint]) -> Snapshot:
        agents: dict[int, AgentStatus] = {}
        lost: list[str] = []
        unanswered: list[str] = []
        since_s, self._polled_s = self._polled_s, time.monotonic()
        unheard_s = min(self._polled_s - since_s, MAX_UNASKED_S)
        statuses = {index: self._status(index, contact) for index, contact in contacts.items()}
        self._has_spoken |= any(statuses.values())
        if self._others and not self._has_spoken:
            raise next(iter(self._others.values()))
        if not any(statuses.values()):
            self._look_for_way(contacts, unheard_s)
        for index, contact in contacts.items():
            status = statuses[index]
            if status is not None:
                agents[index] = status
                self._silent.discard(index)
                self._others.pop(index, None)
            elif (
                contact.address is None
                or index in self._others
                or self._is_silent(index, unheard_s)
            ):
                lost.append(contact.node)
                self._silent.add(index)
            else:
                unanswered.append(contact.node)
        return Snapshot(agents, tuple(lost), tuple(unanswered))

    def with_losses(self, contacts: Mapping[int, AgentEndpoint]) -> list[AgentEndpoint]:
        """Add the loss of lost members whose agent is of another release."""
        return [
            replace(
                contact,
                loss=NodeLoss(
                    contact.node, FaultClass.CONTAINER_LOST, OTHER_RELEASE, str(self._others[index])
                ),
            )
            if contact.loss is None and index in self._others
            else contact
            for index, contact in contacts.items()
        ]

    def _look_for_way(self, contacts: Mapping[int, AgentEndpoint], unheard_s: float) -> None:
        """Where all agents fall silent at once, ask whether only the way to them is cut.

        If so, their silence counts from now on.
        """
        living = {i for i, contact in contacts.items() if contact.address is not None}
        is_new = any(
            self._silence_s.get(index, 0.0) + unheard_s > SILENT_AGENT_S
            for index in living - self._silent
        )
        if is_new and self._engine.find_way():
            self._silence_s.update(dict.fromkeys(living, -unheard_s))

    def _status(self, index: int, contact: AgentEndpoint) -> AgentStatus | None:
        """The answer of a member to the poll; None while there is none."""
        if contact.address is None or not self._polls[contact.address].done():
            return None
        try:
            poll = self._polls.pop(contact.address)
            reply = self._calls.receive(contact, StatusQuery(), poll)
        except AgentUnreachable:
            return None
        except OtherRelease as error:
            self._others[index] = error
            return None
        self._silence_s[index] = 0.0
        return reply.status

    def _is_silent(self, index: int, unheard_s: float) -> bool:
        """Whether a member without an answer is lost, `unheard_s` after the poll before."""
        if not self._engine.sees_agents:
            unheard_s = 0.0  # nobody could have heard it
        self._silence_s[index] = self._silence_s.get(index, 0.0) + unheard_s
        return self._silence_s[index] > SILENT_AGENT_S

    def reachable(self, contacts: Mapping[int, AgentEndpoint]) -> dict[int, AgentEndpoint]:
        """The members that have an agent and are not lost."""
        return {
            index: contact
            for index, contact in contacts.items()
            if contact.address is not None and index not in self._silent
        }

    def call_all(
        self,
        contacts: Mapping[int, AgentEndpoint],
        orders: Mapping[int, Order],
        *,
        timeout_s: float,
    ) -> Iterator[tuple[int, Answer]]:
        """Call members all at once. Yields each one's reply, or the reason why there is none."""
        answers = self._calls.call_all(self.reachable(contacts), orders, timeout_s=timeout_s)
        for index, contact in contacts.items():
            silent = AgentUnreachable(f"the agent of {contact.node} is gone, or silent")
            yield index, answers.get(index, silent)

    def order(
        self,
        contacts: Mapping[int, AgentEndpoint],
        order: Order,
        *,
        timeout_s: float,
        needs_all: bool = False,
    ) -> dict[int, AgentReply]:
        """Have every member carry out an order. Returns their replies, by their index.

        Raises:
            AgentUnreachable: a member does not answer, and `needs_all`; else it is lost, or hangs.
            EngineError: a member refuses.
        """
        replies: dict[int, AgentReply] = {}
        problems: list[AgentUnreachable | EngineError] = []
        # All of them are awaited: an order to stop could overtake an order on its way.
        orders = dict.fromkeys(contacts, order)
        for index, answer in self.call_all(contacts, orders, timeout_s=timeout_s):
            if isinstance(answer, AgentReply):
                replies[index] = answer
            elif needs_all or isinstance(answer, EngineError):
                problems.append(answer)
        if problems:
            raise problems[0]
        return replies

    def with_pings(
        self, orders: Mapping[int, CheckOrder], contacts: Mapping[int, AgentEndpoint]
    ) -> dict[int, CheckOrder]:
        """Add the ports of other nodes' devices to the checks of a gang, where nodes know them."""
        order = next((order for order in orders.values() if order.gang_host is not None), None)
        if order is None or len(contacts) < 2:
            return dict(orders)
        slots, visible = order.slots_per_node, order.job.env.get(VISIBLE, "")
        query = DevicesQuery(form=RankTableForm.V1_0, slots=slots, visible=visible)
        answers = self.call_all(contacts, dict.fromkeys(contacts, query), timeout_s=CALL_TIMEOUT_S)
        ports = {
            index: [device.device_ip for device in answer.devices.devices]
            for index, answer in answers
            if isinstance(answer, AgentReply) and answer.devices is not None
        }
        targets = ping_targets(ports)
        return {
            index: order.model_copy(update={"pings": targets.get(index, ())})
            for index, order in orders.items()
        }

    def query(self, query: Order, *, timeout_s: float) -> list[tuple[str, AgentReply]]:
        """Ask all members. Returns the replies of those that answer, with the names of their nodes.

        Callers do without the others: a poll names them.
        """
        contacts = self._engine.contacts()
        answers = self.call_all(contacts, dict.fromkeys(contacts, query), timeout_s=timeout_s)
        return [
            (contacts[index].node, answer)
            for index, answer in answers
            if isinstance(answer, AgentReply)
        ]
