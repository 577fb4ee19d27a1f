"""Calls to the agents of a run, all of them from one thread and each with a deadline of its own.

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from perdure.training.agent.control import AgentClient
from perdure.training.engines.base import Contact
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.wire.agent import AgentReply, Order
from perdure.training.wire.transport import FanOut, TimedLine

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

    def client(self, contact: Contact) -> AgentClient:
        """Calls one agent.

        Raises:
            AgentUnreachable: its container has none.
        """
        if contact.address is None:
            raise AgentUnreachable(f"the agent of {contact.node} is gone")
        host, port = contact.address
        return AgentClient(host, port, contact.token, self._epoch)

    def send(self, contact: Contact, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        """Send an order; what its future has, `received` reads.

        Raises:
            AgentUnreachable: there is no agent.
        """
        client = self.client(contact)
        request = client.request(order)
        return self._fan_out.call(client.host, client.port, request, timeout_s=timeout_s)

    def received(self, contact: Contact, order: Order, sent: Future[TimedLine]) -> AgentReply:
        """The reply to an order that was sent; waits for it.

        Raises:
            AgentUnreachable: nobody has answered in time.
            EngineError: the agent refused the order.
        """
        client = self.client(contact)
        try:
            line = sent.result().line
        except (OSError, ValueError) as error:
            raise client.unreachable(error) from error
        return client.reply(order, line)

    def call_all(
        self, contacts: Mapping[K, Contact], orders: Mapping[K, Order], *, timeout_s: float
    ) -> dict[K, Answer]:
        """Call agents all at once. What each answered, or why it did not."""
        answers: dict[K, Answer] = {}
        sent: dict[K, Future[TimedLine]] = {}
        for key, contact in contacts.items():
            try:
                sent[key] = self.send(contact, orders[key], timeout_s=timeout_s)
            except AgentUnreachable as error:
                answers[key] = error
        for key, future in sent.items():
            try:
                answers[key] = self.received(contacts[key], orders[key], future)
            except (AgentUnreachable, EngineError) as error:
                answers[key] = error
        return answers
