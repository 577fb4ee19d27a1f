"""The spare containers of a run: started ahead of time, and no member's yet.

A member that needs a container takes a spare, if its agent answers then: the engine knows the
spare's node, and its agent learns whose container it is. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future

from perdure.training.config.drill import Victim
from perdure.training.engines.agent_calls import AgentCalls
from perdure.training.engines.base import AgentEndpoint, Engine, Placement
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.wire.agent import AgentReply, AssignOrder, KillOrder, Order, StatusQuery
from perdure.training.wire.transport import TimedLine

READY_S = 1.0  # for a spare to answer when it is needed: a new container takes longer than that
ASSIGN_S = 5.0


class SpareContainers:
    """The spares, with the orders that a supervisor gives to their agents.

    Args:
        engine: starts and ends them.
        calls: carries orders to their agents.
    """

    def __init__(self, engine: Engine, calls: AgentCalls) -> None:
        self._engine = engine
        self._calls = calls
        self._checked: set[str] = set()  # tokens of the spares that passed their check

    @property
    def sees_agents(self) -> bool:
        """Whether the agents can be reached; if not, their silence says nothing."""
        return self._engine.sees_agents

    def contacts(self) -> Mapping[str, AgentEndpoint]:
        """The spares, by their names."""
        return self._engine.warm_spares()

    def start(self, placement: Placement, node: str) -> None:
        """Start another spare; returns at once.

        Args:
            placement: the members; a spare is on none of their nodes, nor on an avoided node.
            node: where it starts; ANY_NODE where the engine chooses.
        """
        self._engine.start_spare(placement, node)

    def end(self, names: Collection[str]) -> None:
        """End spares by force."""
        self._engine.end_spares(names)

    def ask(self, name: str, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        """Send an order to a spare; `reply` reads the answer from the future.

        Raises:
            AgentUnreachable: the spare is not up, or gone.
        """
        return self._calls.send(self._contact(name), order, timeout_s=timeout_s)

    def reply(self, name: str, order: Order, sent: Future[TimedLine]) -> AgentReply:
        """Read the answer to an order that was sent.

        Raises:
            AgentUnreachable: the spare did not answer in time.
            EngineError: the spare refused the order.
        """
        return self._calls.receive(self._contact(name), order, sent)

    def _contact(self, name: str) -> AgentEndpoint:
        contact = self.contacts().get(name)
        if contact is None:
            raise AgentUnreachable(f"there is no spare container {name}")
        return contact

    def ready(self) -> frozenset[str]:
        """Names of the spares whose agent answers now."""
        up = {name: c for name, c in self.contacts().items() if c.address is not None}
        answers = self._calls.call_all(up, dict.fromkeys(up, StatusQuery()), timeout_s=READY_S)
        return frozenset(name for name in up if isinstance(answers[name], AgentReply))

    def note_checked(self, name: str) -> None:
        """Remember that a spare has passed the check of its node."""
        self._checked.add(self._contact(name).token)

    def was_checked(self, member: int) -> bool:
        """Whether a member took a spare that had passed its check."""
        contact = self._engine.contacts().get(member)
        return contact is not None and contact.was_spare and contact.token in self._checked

    def kill_first(self) -> bool:
        """Have the first spare lose its node, in a drill. Returns whether there was a spare.

        Raises:
            EngineError: the run is no drill.
        """
        up = (contact for contact in self.contacts().values() if contact.address is not None)
        contacts = dict(enumerate([*up][:1]))
        orders = dict.fromkeys(contacts, KillOrder(victim=Victim.SPARE))
        num_killed = 0
        for answer in self._calls.call_all(contacts, orders, timeout_s=ASSIGN_S).values():
            if isinstance(answer, EngineError):
                raise answer
            num_killed += answer.num_killed if isinstance(answer, AgentReply) else 0
        return num_killed > 0

    def assign(self, members: Collection[int]) -> frozenset[int]:
        """Tell the agents of the spares that these members took whose container they are in.

        It may be repeated. Returns the members whose agent did not obey.
        """
        contacts = {
            index: contact
            for index, contact in self._engine.contacts().items()
            if index in members and contact.was_spare
        }
        orders: dict[int, Order] = {
            index: AssignOrder(member=index, schedule_cnt=contact.schedule_cnt)
            for index, contact in contacts.items()
        }
        answers = self._calls.call_all(contacts, orders, timeout_s=ASSIGN_S)
        return frozenset(i for i, answer in answers.items() if not isinstance(answer, AgentReply))
