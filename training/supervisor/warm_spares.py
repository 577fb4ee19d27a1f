"""Keeps containers standing by, so that a member that must move finds one that has imported all.

One is started once the attempt trains, so that it delays no start; its node is checked then, and
again now and then. One that fails is ended, and another one made. Nothing here is waited for: the
attempt is being watched by the same thread. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from perdure.training.config.job import Job
from perdure.training.engines.agent_calls import SILENT_AGENT_S
from perdure.training.engines.base import ANY_NODE, AgentEndpoint, Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.history import RunHistory
from perdure.training.node_checks.verdict import verdict_of
from perdure.training.supervisor.placing import Placer, placement_of, sub_healthy_nodes
from perdure.training.wire.agent import AgentReply, CheckOrder, Order, StatusQuery
from perdure.training.wire.node import Check
from perdure.training.wire.transport import TimedLine

LOOK_S = 1.0
ASK_S = 5.0  # between two looks at the agent of one
CHECK_AGAIN_S = 3600.0
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
UP_S = 900.0  # the image may have to be fetched first
RETRY_S = 5.0  # after one that failed; doubled each time, as long as none becomes ready
MAX_RETRY_S = 3600.0

_log = logging.getLogger("perdure.supervisor")


@dataclass(slots=True)
class _Spare:
    """What is known of one.

    Attributes:
        since_s: when it was first seen.
        up_s: since when its agent could have answered, or when it last did; None: not yet.
        asked_s: when it was last asked.
        checked_s: when its node last passed; None: never.
        is_told: whether it was seen to have imported all.
        asked: what it was asked and has not answered.
    """

    since_s: float
    up_s: float | None = None
    asked_s: float = float("-inf")
    checked_s: float | None = None
    is_told: bool = False
    asked: tuple[Order, Future[TimedLine]] | None = None


class WarmSpares:
    """The containers that stand by for one attempt.

    Args:
        job: of the run.
        fleet: of the run.
        placer: of the run; keeps out nodes that fail.
        history: of the run, as it was last read.
        clock: monotonic.
    """

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        placer: Placer,
        *,
        history: Callable[[], RunHistory],
        clock: Callable[[], float],
    ) -> None:
        self._wanted = job.engine.num_warm_spares
        # On this machine the node of a spare is the one that trains, with the devices in use.
        self._checks = job.preflight.nodes and not job.engine.on_this_machine
        self._is_command = job.worker.is_command  # then there is nothing to import
        self._fleet, self._standing_by = fleet, fleet.spare_containers
        self._placer = placer
        self._history = history
        self._clock = clock
        self._known: dict[str, _Spare] = {}
        self._next_s = 0.0
        self._start_s = 0.0
        self._retry_s = RETRY_S

    @property
    def ready(self) -> Sequence[str]:
        """Nodes of those that a member would find with everything imported."""
        contacts = self._standing_by.contacts()
        return [contacts[n].node for n, one in self._known.items() if one.is_told and n in contacts]

    def look(self, *, trains: bool) -> None:
        """Do what is to be done now.

        Args:
            trains: whether the attempt does, and nothing is being recovered: only then another
                one is started.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        is_late, self._next_s = now_s - self._next_s > ASK_S, now_s + LOOK_S
        try:
            contacts = self._standing_by.contacts()
            self._known = {
                name: self._known.get(name) or _Spare(since_s=now_s) for name in contacts
            }
            for number, (name, contact) in enumerate(contacts.items()):
                if is_late or not self._standing_by.sees_agents:
                    self._known[name].up_s = None  # nobody could have heard it
                self._look_at(name, contact, number, now_s)
            if trains and len(self._known) < self._wanted and now_s >= self._start_s:
                self._start(now_s)
        except (EngineError, AgentUnreachable) as error:
            self._put_off(f"no container can be had to stand by: {error}", now_s)

    def _start(self, now_s: float) -> None:
        history = self._history()
        current = placement_of(history)
        if current is None:
            return
        last = [one.node for one in sub_healthy_nodes(history)]
        placement = Placement(current.number, current.members, history.isolated, tuple(last))
        node = self._free_node(placement)
        if node is None:
            return
        self._standing_by.start(placement, node)
        self._start_s = now_s + LOOK_S

    def _free_node(self, placement: Placement) -> str | None:
        """Where another one may be: ANY_NODE where the engine knows; None: there is no room."""
        nodes = self._fleet.nodes()
        if nodes is None:
            return ANY_NODE
        taken = {one.node for one in self._standing_by.contacts().values()}
        taken |= {*placement.nodes, *placement.avoid}
        free = sorted((one for one in nodes if one not in taken), key=placement.last.__contains__)
        return free[0] if free else None

    def _look_at(self, name: str, contact: AgentEndpoint, number: int, now_s: float) -> None:
        one = self._known[name]
        if contact.address is not None and one.up_s is None:
            one.up_s = now_s
        why = self._why_end(one, contact, number, now_s)
        if why:
            self._end(name, contact, why, now_s)
        elif contact.address is None:
            return
        elif one.asked is not None:
            if one.asked[1].done():
                self._take_answer(name, contact, now_s)
        elif now_s - one.asked_s >= (ASK_S if self._is_done(one, now_s) else LOOK_S):
            self._ask(name, one, now_s)

    def _why_end(self, one: _Spare, contact: AgentEndpoint, number: int, now_s: float) -> str:
        """Why it is not to stand by any longer; empty: it may."""
        if number >= self._wanted:
            return "the job asks for fewer"
        if contact.node in self._history().isolated:
            return "its node is isolated"
        if contact.loss is not None:
            return contact.loss.line
        if contact.address is None and one.is_told:
            return "its agent is gone"
        if contact.address is None and now_s - one.since_s > UP_S:
            return f"it was not up within {UP_S:g} s"
        return ""

    def _is_done(self, one: _Spare, now_s: float) -> bool:
        """Whether it has only to be kept an eye on."""
        is_checked = one.checked_s is not None and now_s - one.checked_s <= CHECK_AGAIN_S
        return one.is_told and (is_checked or not self._checks)

    def _ask(self, name: str, one: _Spare, now_s: float) -> None:
        order: Order = StatusQuery()
        timeout_s = ASK_S
        if one.is_told and not self._is_done(one, now_s):
            order = self._placer.check_order()
            timeout_s = order.timeout_s + CHECK_MARGIN_S
        one.asked_s = now_s
        one.asked = order, self._standing_by.ask(name, order, timeout_s=timeout_s)

    def _take_answer(self, name: str, contact: AgentEndpoint, now_s: float) -> None:
        one = self._known[name]
        assert one.asked is not None  # noqa: S101 the caller looked
        (order, sent), one.asked = one.asked, None
        try:
            reply = self._standing_by.reply(name, order, sent)
        except (AgentUnreachable, EngineError) as error:
            silent_s = now_s - one.up_s if one.up_s is not None else 0.0
            if silent_s > SILENT_AGENT_S or isinstance(order, CheckOrder):
                self._end(name, contact, str(error), now_s)
            return
        one.up_s = now_s
        if isinstance(order, CheckOrder):
            self._judge(name, contact, reply.checks, now_s)
        elif not one.is_told and (self._is_command or _is_warm(reply)):
            one.is_told, self._retry_s = True, RETRY_S
            _log.info("%s stands by, ready to take a member", contact.node)

    def _judge(
        self, name: str, contact: AgentEndpoint, checks: Sequence[Check], now_s: float
    ) -> None:
        verdict = verdict_of(checks)
        why = "; ".join(verdict.refused.values())
        if why:
            self._end(name, contact, f"its node failed its checks: {why}", now_s)
            self._placer.refuse(contact.node, why)
            return
        self._known[name].checked_s = now_s
        self._standing_by.note_checked(name)
        for text in verdict.common:
            _log.warning("checked on %s, which stands by: %s", contact.node, text)

    def _end(self, name: str, contact: AgentEndpoint, why: str, now_s: float) -> None:
        self._known.pop(name)
        self._standing_by.end([name])
        node = contact.node or "a node that is not known yet"
        self._put_off(f"the container that stood by on {node} is ended: {why}", now_s)

    def _put_off(self, why: str, now_s: float) -> None:
        """Wait before the next one, longer each time: what fails once may do so again."""
        _log.warning(why)
        self._start_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)


def _is_warm(reply: AgentReply) -> bool:
    """Whether its imports are done."""
    return reply.status is not None and reply.status.is_warm
