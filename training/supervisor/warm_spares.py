"""Warm spares: containers that have imported everything, for members that must move.

A spare is started once the attempt trains, so that it delays no start; its node is checked then,
and once an hour. A spare that fails is ended, and replaced. The module waits for nothing: the same
thread watches the attempt. Times are seconds of CLOCK_MONOTONIC.
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
from perdure.training.supervisor.observing import placement_of
from perdure.training.supervisor.placement_checks import check_order
from perdure.training.supervisor.placing import Placer
from perdure.training.supervisor.sub_health import sub_healthy_nodes
from perdure.training.wire.agent import CheckOrder, Order, StatusQuery
from perdure.training.wire.node import Check
from perdure.training.wire.transport import TimedLine

POLL_S = 1.0
ASK_S = 5.0  # between two polls of a spare that is ready
CHECK_AGAIN_S = 3600.0
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
UP_S = 900.0  # the image may have to be fetched first
RETRY_S = 5.0  # after a spare that failed; doubled each time until a spare becomes ready
MAX_RETRY_S = 3600.0

_log = logging.getLogger("perdure.supervisor")


@dataclass(slots=True)
class _Spare:
    """The state of a spare.

    Attributes:
        since_s: when it was first listed.
        up_s: since when its agent could have answered, or when it last did; None: not yet.
        asked_s: when it was last asked.
        checked_s: when its node last passed its checks; None: never.
        is_warm: whether it has imported everything.
        request: an order without an answer yet.
    """

    since_s: float
    up_s: float | None = None
    asked_s: float = float("-inf")
    checked_s: float | None = None
    is_warm: bool = False
    request: tuple[Order, Future[TimedLine]] | None = None


class WarmSpares:
    """The warm spares of one run.

    Args:
        job: says how many.
        fleet: starts and ends them.
        placer: keeps out nodes that fail their checks.
        history: returns the ledger's content as it was last read.
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
        # On this machine the node of a spare trains, too, and its devices are in use.
        self._checks = job.preflight.nodes and not job.engine.on_this_machine
        self._is_command = job.worker.is_command  # then there is nothing to import
        self._job = job
        self._fleet, self._spare_containers = fleet, fleet.spare_containers
        self._placer = placer
        self._history = history
        self._clock = clock
        self._spares: dict[str, _Spare] = {}
        self._next_s = 0.0
        self._start_s = 0.0
        self._retry_s = RETRY_S

    @property
    def ready(self) -> Sequence[str]:
        """Nodes of the spares that have imported everything."""
        contacts = self._spare_containers.contacts()
        return [
            contacts[n].node for n, spare in self._spares.items() if spare.is_warm and n in contacts
        ]

    def update(self, *, trains: bool) -> None:
        """Take the next steps with every spare, at most once a second.

        Args:
            trains: whether the attempt trains, and recovers from nothing: only then another spare
                is started.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        is_late, self._next_s = now_s - self._next_s > ASK_S, now_s + POLL_S
        try:
            contacts = self._spare_containers.contacts()
            self._spares = {
                name: self._spares.get(name) or _Spare(since_s=now_s) for name in contacts
            }
            for number, (name, contact) in enumerate(contacts.items()):
                if is_late or not self._spare_containers.sees_agents:
                    self._spares[name].up_s = None  # nobody could have heard it
                self._update(name, contact, number, now_s)
            if trains and len(self._spares) < self._wanted and now_s >= self._start_s:
                self._start(now_s)
        except (EngineError, AgentUnreachable) as error:
            self._put_off(f"no warm spare can be started: {error}", now_s)

    def _start(self, now_s: float) -> None:
        history = self._history()
        current = placement_of(history)
        if current is None:
            return
        last = [sub.node for sub in sub_healthy_nodes(history)]
        placement = Placement(current.number, current.members, history.isolated, tuple(last))
        node = self._free_node(placement)
        if node is None:
            return
        self._spare_containers.start(placement, node)
        self._start_s = now_s + POLL_S

    def _free_node(self, placement: Placement) -> str | None:
        """Find a node for another spare; ANY_NODE: the engine chooses; None: there is no room."""
        nodes = self._fleet.nodes()
        if nodes is None:
            return ANY_NODE
        used = {contact.node for contact in self._spare_containers.contacts().values()}
        used |= {*placement.nodes, *placement.avoid}
        free = sorted((node for node in nodes if node not in used), key=placement.last.__contains__)
        return free[0] if free else None

    def _update(self, name: str, contact: AgentEndpoint, number: int, now_s: float) -> None:
        spare = self._spares[name]
        if contact.address is not None and spare.up_s is None:
            spare.up_s = now_s
        why = self._why_end(spare, contact, number, now_s)
        if why:
            self._end(name, contact, why, now_s)
        elif contact.address is None:
            return
        elif spare.request is not None:
            order, answer = spare.request
            if answer.done():
                spare.request = None
                self._take_answer(name, contact, order, answer)
        elif now_s - spare.asked_s >= (ASK_S if self._is_ready(spare, now_s) else POLL_S):
            self._ask(name, spare, now_s)

    def _why_end(self, spare: _Spare, contact: AgentEndpoint, number: int, now_s: float) -> str:
        """Say why a spare is to be ended; empty: it stays."""
        if number >= self._wanted:
            return "the job asks for fewer"
        if contact.node in self._history().isolated:
            return "its node is isolated"
        if contact.loss is not None:
            return contact.loss.line
        if contact.address is None and spare.is_warm:
            return "its agent is lost"
        if contact.address is None and now_s - spare.since_s > UP_S:
            return f"it was not up within {UP_S:g} s"
        return ""

    def _is_ready(self, spare: _Spare, now_s: float) -> bool:
        """Whether a spare is warm and its node was checked."""
        is_checked = spare.checked_s is not None and now_s - spare.checked_s <= CHECK_AGAIN_S
        return spare.is_warm and (is_checked or not self._checks)

    def _ask(self, name: str, spare: _Spare, now_s: float) -> None:
        order: Order = StatusQuery()
        timeout_s = ASK_S
        if spare.is_warm and not self._is_ready(spare, now_s):
            order = check_order(self._job)
            timeout_s = order.timeout_s + CHECK_MARGIN_S
        spare.asked_s = now_s
        spare.request = order, self._spare_containers.ask(name, order, timeout_s=timeout_s)

    def _take_answer(
        self, name: str, contact: AgentEndpoint, order: Order, answer: Future[TimedLine]
    ) -> None:
        spare, now_s = self._spares[name], self._clock()
        try:
            reply = self._spare_containers.reply(name, order, answer)
        except (AgentUnreachable, EngineError) as error:
            silent_s = now_s - spare.up_s if spare.up_s is not None else 0.0
            if silent_s > SILENT_AGENT_S or isinstance(order, CheckOrder):
                self._end(name, contact, str(error), now_s)
            return
        spare.up_s = now_s
        if isinstance(order, CheckOrder):
            self._judge(name, contact, reply.checks, now_s)
        elif not spare.is_warm and (
            self._is_command or (reply.status is not None and reply.status.is_warm)
        ):
            spare.is_warm, self._retry_s = True, RETRY_S
            _log.info("warm spare on %s is ready to take a member", contact.node)

    def _judge(
        self, name: str, contact: AgentEndpoint, checks: Sequence[Check], now_s: float
    ) -> None:
        verdict = verdict_of(checks)
        why = "; ".join(verdict.refused.values())
        if why:
            self._end(name, contact, f"its node failed its checks: {why}", now_s)
            self._placer.refuse(contact.node, why)
            return
        self._spares[name].checked_s = now_s
        self._spare_containers.note_checked(name)
        for text in verdict.common:
            _log.warning("checks on %s found for its warm spare: %s", contact.node, text)

    def _end(self, name: str, contact: AgentEndpoint, why: str, now_s: float) -> None:
        self._spares.pop(name)
        self._spare_containers.end([name])
        node = contact.node or "a node that is not known yet"
        self._put_off(f"warm spare on {node} is ended: {why}", now_s)

    def _put_off(self, why: str, now_s: float) -> None:
        """Wait before the next spare, longer each time: its fault may persist."""
        _log.warning(why)
        self._start_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
