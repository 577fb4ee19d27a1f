"""The replacement of a node that is lost or slow, while the processes of the others live on.

The supervisor alone knows that a node is lost and where another is free; the coordinator alone
knows whether the ranks that live have the state of those that are lost. So this module reports the
loss to the coordinator, which decides, and carries out its decision. The attempt and the placement
stay the same; the record of the placement then has the new node. Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from perdure.storage.errors import StorageError
from perdure.training.config.job import Job
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, SlowNode
from perdure.training.engines.base import ANY_NODE, Placement, Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError, NoCapacity
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import LedgerEvent
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import NodeGone, NotReplaced, RecoveryBegan, RecoveryEnded
from perdure.training.recovery.reactions import GENERATIONS_APART
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.finishing import Decider
from perdure.training.supervisor.health_watch import AttemptHealth
from perdure.training.supervisor.placing import SPARE_POLL_S, Placer
from perdure.training.supervisor.room import SURVIVORS_WAIT_S, RoomWait
from perdure.training.supervisor.starting import AttemptStarter
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from perdure.training.wire.agent import NoticeOrder
from perdure.training.wire.agent_status import AgentState

_log = logging.getLogger("perdure.supervisor")

ANSWER_S = 5.0  # for the coordinator's decision to be seen
WITHOUT_COORDINATOR_S = 60.0  # half of the time that ranks wait for another
SAVE_MARGIN_S = 5.0  # beyond the grace period, for the last save of those that live


class _MoveFailed(Exception):  # noqa: N818 a state of affairs
    """Nothing inside the attempt answers the loss of a node."""


@dataclass(slots=True)
class _Move:
    """The evacuation of a node.

    Attributes:
        began: the decision.
        node: first the fault's, then each node that was lost while it joined.
        room: the wait for a node to become free.
        retry_at_s: when another node is looked for again.
        is_done: whether another node has been brought in.
    """

    began: RecoveryBegan
    node: str
    room: RoomWait
    retry_at_s: float = 0.0
    is_done: bool = False

    @property
    def takes_coordinator(self) -> bool:
        """Whether the coordinator was on the node, so that another has to go on."""
        return 0 in self.began.moved


@dataclass(slots=True)
class NodeReplacer:
    """The watcher that answers the loss of nodes in one attempt.

    Attributes:
        decider: stands in for a coordinator that is lost.
        placer: finds and refuses nodes.
        starter: starts processes on the nodes that join the attempt.
        health: names a node that holds the others up.
    """

    decider: Decider
    placer: Placer
    starter: AttemptStarter
    health: AttemptHealth
    _reported_s: dict[str, float] = field(default_factory=dict)
    _moves: dict[int, _Move] = field(default_factory=dict)  # by the number of the recovery
    _joining: dict[str, int] = field(default_factory=dict)  # new nodes, and the recovery's number

    @property
    def _view(self) -> AttemptView:
        return self.starter.view

    @property
    def _job(self) -> Job:
        return self.decider.job

    @property
    def _fleet(self) -> Fleet:
        return self.decider.fleet

    def check(self, progress: Progress) -> WatchResult | None:
        """Take the next steps of every replacement; FAILED: the attempt has to end for a loss.

        It may take as long as a container needs to start.
        """
        if not self.starter.replaces_nodes:
            return None
        try:
            answered = self._answer(progress.snapshot, progress)
        except _MoveFailed:  # `progress` has the fault
            return WatchResult(EndKind.FAILED, is_fault=True)
        return WatchResult(answered_nodes=answered)

    def _answer(self, snapshot: Snapshot, progress: Progress) -> frozenset[str]:
        """Return the nodes whose loss, or start, is being answered."""
        self._note(progress.open_recoveries)
        lost = frozenset(snapshot.lost)
        for node in lost & self._joining.keys():
            self._lost_while_joining(node, progress)
        for move in sorted(self._moves.values(), key=lambda move: not move.takes_coordinator):
            if not move.is_done:
                self._carry_out(move, progress)
        if not self._waits_for_coordinator(snapshot):
            moving = {move.node for move in self._moves.values()}
            self._report_loss(lost - self._reported_s.keys() - moving, snapshot, progress)
            self._evacuate_slow(progress)
        # The node that an engine has yet to choose has no name.
        unnamed = [ANY_NODE] if self._moves else []
        return frozenset((*self._joining, *self._answered(snapshot, progress), *unnamed))

    def _report_loss(self, nodes: Collection[str], snapshot: Snapshot, progress: Progress) -> None:
        """Report losses to the coordinator; where it is lost itself, first have another go on."""
        members_on = {node: self.placer.members_on(node) for node in nodes}
        first = [node for node, members in members_on.items() if 0 in members]
        for node in first or nodes:
            fault, members = self._fault_of(node, progress), members_on[node]
            self._reported_s[node] = time.monotonic()
            if 0 not in members:
                message = NodeGone(fault=fault, ranks=self._ranks_of(members))
                is_answered = self._send(message, about=node)
            else:
                is_answered = self._begin(fault, members, snapshot, progress)
            if not is_answered:
                self._reported_s[node] = float("-inf")

    def _evacuate_slow(self, progress: Progress) -> None:
        """Evacuate a node that holds the others up, where that costs no more than a step."""
        slow = self.health.slow_node(self.decider.writer.history)
        if slow is None or self.evacuates(slow) or self._moves or not progress.trains:
            return
        step = progress.last.step if progress.last is not None else None
        fault = diagnose(Evidence(time.time(), step, slow=slow)).fault
        moved = self._ranks_of(self.placer.members_on(slow.node))
        is_possible = moved and self.placer.has_room()
        if is_possible and self.decider.decide_inside(fault, moved).rung is Rung.NODE_REPLACE:
            self._reported_s[slow.node] = time.monotonic()
            if not self._send(NodeGone(fault=fault, ranks=moved), about=slow.node):
                self._reported_s.pop(slow.node)

    def evacuates(self, slow: SlowNode) -> bool:
        """Whether a node that holds the others up is being evacuated inside the attempt."""
        return slow.node in (*self._reported_s, *(move.node for move in self._moves.values()))

    def _fault_of(self, node: str, progress: Progress) -> Fault:
        step = progress.last.step if progress.last is not None else None
        losses = tuple(loss for loss in self._fleet.losses((node,)) if loss.node == node)
        return diagnose(Evidence(time.time(), step, lost_nodes=(node,), losses=losses)).fault

    def _waits_for_coordinator(self, snapshot: Snapshot) -> bool:
        """Whether another coordinator is about to go on, and can take no report yet."""
        first = snapshot.agents.get(0)
        begins = first is None or first.state in (AgentState.IDLE, AgentState.STAGING)
        moves = (move for move in self._moves.values() if move.takes_coordinator)
        return any(begins or not move.is_done for move in moves)

    def _answered(self, snapshot: Snapshot, progress: Progress) -> Collection[str]:
        """List the nodes whose loss the coordinator is about to answer, or has answered."""
        if self._waits_for_coordinator(snapshot):
            return snapshot.lost
        now_s = time.monotonic()
        limit_s = ANSWER_S
        if progress.has_given_up:  # those that live may be saving
            limit_s += self._job.engine.grace_s + SAVE_MARGIN_S
        reported = {node for node, at_s in self._reported_s.items() if now_s - at_s < limit_s}
        return reported | {move.node for move in self._moves.values()}

    def _note(self, recoveries: Collection[RecoveryBegan]) -> None:
        """Take up moves that have begun, and forget those that are over."""
        view = self.decider.writer.now(self._view)
        over = {event.number for event in view.events if isinstance(event, RecoveryEnded)}
        for began in (*recoveries, *(span.began for span in view.recoveries)):
            if began.moved and began.number not in (*over, *self._moves):
                node = began.fault.node or ""
                self._moves[began.number] = _Move(began, node, self._room_of(began))
        for number in over & self._moves.keys():
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Forget a move that is over: its nodes may be lost once more."""
        move = self._moves.pop(number)
        for node in (move.node, move.began.fault.node or ""):
            self._reported_s.pop(node, None)
        self._joining = {node: joined for node, joined in self._joining.items() if joined != number}

    def _begin(
        self, fault: Fault, members: Collection[int], snapshot: Snapshot, progress: Progress
    ) -> bool:
        """Decide in the place of the coordinator, and have another go on with the decision.

        Returns:
            Whether that is possible: all other members train, and no other move is under way.
        """
        moved = self._ranks_of(members)
        is_over = any(
            status.is_over or any(worker.exit_code is not None for worker in status.workers)
            for status in snapshot.agents.values()
        )
        if progress.last is None or progress.has_given_up or self._moves or is_over:
            return False
        decision = self.decider.decide_inside(fault, moved)
        if decision.rung is not Rung.NODE_REPLACE:
            return False
        for recovery in progress.open_recoveries:
            self._end(recovery, "the coordinator was lost with its node", progress)
        events = self.decider.writer.now(self._view).events
        began = RecoveryBegan(
            at_s=time.time(),
            number=max((event.number for event in events), default=0) + 1,
            generation=max(map(_generation_after, events), default=1),
            fault=fault,
            decision=decision,
            moved=moved,
        )
        self.decider.writer.record_events(self._view, [began])
        self._moves[began.number] = _Move(began, fault.node or "", self._room_of(began))
        return True

    def _end(self, began: RecoveryBegan, why: str, progress: Progress) -> None:
        """Put on record that nothing came of a recovery whose coordinator is lost."""
        ended = RecoveryEnded(
            at_s=time.time(),
            number=began.number,
            generation=began.generation,
            succeeded=False,
            why=why,
            cut_short=True,
        )
        self.decider.writer.record_events(self._view, [ended])
        progress.take([ended])

    def _ranks_of(self, members: Collection[int]) -> tuple[int, ...]:
        slots = self._job.engine.slots_per_node
        first_ranks = (member * slots for member in sorted(members))
        return tuple(rank for first in first_ranks for rank in range(first, first + slots))

    def _send(self, message: NodeGone | NotReplaced, *, about: str) -> bool:
        placement, attempt = self._view.key
        order = NoticeOrder(placement=placement, attempt=attempt, message=message)
        try:
            self._fleet.notice(order)
        except (EngineError, AgentUnreachable) as error:
            _log.warning("no report about %s reaches the coordinator: %s", about, error)
            return False
        return True

    def _room_of(self, began: RecoveryBegan) -> RoomWait:
        """Make the wait for a node: those that live hold the newest step in memory alone."""
        chosen_s = self._job.restart.spare_wait_s
        limit_s = chosen_s if chosen_s is not None else SURVIVORS_WAIT_S
        if 0 in began.moved:  # ranks do not wait for a coordinator for ever
            limit_s = min(limit_s, WITHOUT_COORDINATOR_S)
        return RoomWait(lambda: limit_s, on_wait=self.placer.on_wait, is_strict=True)

    def _carry_out(self, move: _Move, progress: Progress) -> None:
        if time.monotonic() < move.retry_at_s:
            return
        began = move.began
        members = {rank // self._job.engine.slots_per_node for rank in began.moved}
        try:
            placement, moved = self.placer.move(members, off=move.node, room=move.room)
            if move.takes_coordinator:
                self._fence(placement)
                self._fleet.resume(self.starter.order(), began)
            self._fleet.join(self.starter.order(), members, generation=began.generation + 1)
        except (EngineError, AgentUnreachable) as error:
            if not self._waits_on(move, error):
                self._cannot(move, str(error), progress)
            return
        move.is_done = True
        move.room.end()
        for index in moved:
            node = placement.members[index].node
            _log.warning("member %d has moved from %s to %s", index, move.node, node)
            self._joining[node] = began.number

    def _waits_on(self, move: _Move, error: EngineError | AgentUnreachable) -> bool:
        """Whether what keeps a node from taking the place may pass in time."""
        is_room = isinstance(error, NoCapacity)
        passes = is_room or (isinstance(error, EngineError) and error.is_refusal)
        if not passes or move.room.is_over:
            return False
        try:
            move.room.note(str(error), is_room=is_room)
        except NoCapacity:
            return False
        move.retry_at_s = time.monotonic() + SPARE_POLL_S
        return True

    def _fence(self, placement: Placement) -> None:
        """Keep processes that still live on the evacuated node from committing anything."""
        try:
            self.decider.writer.fence(placement, self._view.key)
        except StorageError as error:  # they could commit a whole step that all ranks had
            _log.warning("the first member's old container may still commit: %s", error)

    def _cannot(self, move: _Move, why: str, progress: Progress) -> None:
        """Have the coordinator ask the ladder again; the next rung is above the processes.

        Raises:
            _MoveFailed: there is none.
        """
        move.is_done = True
        move.room.end()
        if not self._send(NotReplaced(rank=move.began.moved[0], why=why), about=move.node):
            progress.take([move.began])  # it may have been written by this supervisor alone
            raise _MoveFailed(why)

    def _lost_while_joining(self, node: str, progress: Progress) -> None:
        number = self._joining.pop(node)
        move = self._moves[number]
        why = f"{node} was lost while it took the place of {move.node}"
        _log.warning(why)
        self.placer.refuse(node, why)
        if move.takes_coordinator:
            # The ranks have come to a coordinator there: the next needs another generation.
            self._end(move.began, why, progress)
            self._forget(number)
            return
        move.node, move.is_done, move.room = node, False, self._room_of(move.began)


def _generation_after(event: LedgerEvent) -> int:
    """The newest generation that may have been announced when this was written."""
    match event:
        case RecoveryBegan():
            apart = GENERATIONS_APART if 0 in event.moved else 0
            return event.generation + apart + 1
        case RecoveryEnded():
            return event.generation
    return 1


@dataclass(frozen=True, slots=True)
class SlowNodeCheck:
    """The watcher that ends an attempt for a node that holds the others up.

    Attributes:
        replacer: may evacuate the node inside the attempt, which costs less.
    """

    replacer: NodeReplacer

    def check(self, progress: Progress) -> WatchResult | None:  # noqa: ARG002 health has seen it
        """Find the node, once a step was committed since its alert."""
        history = self.replacer.decider.writer.history
        slow = self.replacer.health.slow_node(history, is_saved=True)
        if slow is None or self.replacer.evacuates(slow):
            return None
        return WatchResult(culprit=slow)
