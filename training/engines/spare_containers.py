"""The containers of a run that stand by: started, and no member's yet.

Whoever needs a container takes one of them, if its agent answers then; the engine knows which node
it is on, its agent learns whose container it is. Times are seconds.
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

READY_S = 1.0  # for its answer when one is needed: a new container takes longer than that
ASSIGN_S = 5.0


class SpareContainers:
    """What a supervisor does with them.

    Args:
        engine: that has them.
        calls: to their agents.
    """

    def __init__(self, engine: Engine, calls: AgentCalls) -> None:
        self._engine = engine
        self._calls = calls
        self._checked: set[str] = set()  # tokens of those that have passed their check

    @property
    def sees_agents(self) -> bool:
        """Whether the way to their agents works: if it does not, their silence says nothing."""
        return self._engine.sees_agents

    def contacts(self) -> Mapping[str, AgentEndpoint]:
        """The containers, by their names."""
        return self._engine.warm_spares()

    def start(self, placement: Placement, node: str) -> None:
        """Start one more, on this node or where the engine chooses; returns at once.

        Args:
            placement: that they stand by for; its nodes, and those that it avoids, are left out.
            node: ANY_NODE where the engine chooses.
        """
        self._engine.start_spare(placement, node)

    def end(self, names: Collection[str]) -> None:
        """End some of them by force."""
        self._engine.end_spares(names)

    def ask(self, name: str, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        """Send an order to one; `reply` has the answer.

        Raises:
            AgentUnreachable: it is not up, or gone.
        """
        return self._calls.send(self._contact(name), order, timeout_s=timeout_s)

    def reply(self, name: str, order: Order, sent: Future[TimedLine]) -> AgentReply:
        """What it answered.

        Raises:
            AgentUnreachable: nothing in time.
            EngineError: it refused.
        """
        return self._calls.received(self._contact(name), order, sent)

    def _contact(self, name: str) -> AgentEndpoint:
        contact = self.contacts().get(name)
        if contact is None:
            raise AgentUnreachable(f"no container {name} stands by")
        return contact

    def ready(self) -> frozenset[str]:
        """Names of those whose agent answers now."""
        up = {
            name: contact
            for name, contact in self.contacts().items()
            if contact.address is not None
        }
        answers = self._calls.call_all(up, dict.fromkeys(up, StatusQuery()), timeout_s=READY_S)
        return frozenset(name for name, answer in answers.items() if isinstance(answer, AgentReply))

    def note_checked(self, name: str) -> None:
        """Remember that it has passed the check of its node."""
        self._checked.add(self._contact(name).token)

    def was_checked(self, member: int) -> bool:
        """Whether a member has one of these that had passed its check."""
        contact = self._engine.contacts().get(member)
        return contact is not None and contact.was_spare and contact.token in self._checked

    def kill_one(self) -> bool:
        """Have the node of one be lost, in a drill; whether one was there.

        Raises:
            EngineError: the run is no drill.
        """
        up = [contact for contact in self.contacts().values() if contact.address is not None][:1]
        order = KillOrder(victim=Victim.SPARE)
        answers = self._calls.call_all(
            dict(enumerate(up)), dict.fromkeys(range(len(up)), order), timeout_s=ASSIGN_S
        )
        refusals = [answer for answer in answers.values() if isinstance(answer, EngineError)]
        if refusals:
            raise refusals[0]
        return any(
            isinstance(answer, AgentReply) and answer.num_killed for answer in answers.values()
        )

    def assign(self, members: Collection[int]) -> frozenset[int]:
        """Tell the agents of those that these members have taken whose they are.

        May be repeated. Returns the members whose agent did not obey.
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
