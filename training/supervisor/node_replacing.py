"""Another node for one that is lost, while the processes of the others live on.

The supervisor alone knows that a node is lost and where another one is; the coordinator alone knows
whether the ranks that live have the state of those that are gone. So the coordinator is told of
the loss and decides, and what it decides is carried out here. It goes on in the same attempt and
the same placement, whose record then has the new node. Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from perdure.storage.errors import StorageError
from perdure.training.config.job import Job
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, SlowNode
from perdure.training.engines.base import ANY_NODE, Placement, Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError, MoveFailed, NoCapacity
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import LedgerEvent
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import NodeGone, NotReplaced, RecoveryBegan, RecoveryEnded
from perdure.training.recovery.reactions import GENERATIONS_APART
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.finishing import Decider
from perdure.training.supervisor.placing import Placer
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent import NoticeOrder, StartOrder
from perdure.training.wire.agent_status import AgentState

_log = logging.getLogger("perdure.supervisor")

ANSWER_S = 5.0  # for the coordinator's decision to be seen
WITHOUT_COORDINATOR_S = 60.0  # half of what ranks wait for another one
SAVE_MARGIN_S = 5.0  # beyond the grace period, for the last save of those that live


@dataclass(slots=True)
class _Move:
    """One node that is left.

    Attributes:
        began: the decision.
        node: that is to be left: first the fault's, then each one that was lost while it joined.
        waits_since_s: for a node to become free.
        is_done: whether another node has been brought in.
    """

    began: RecoveryBegan
    node: str
    waits_since_s: float
    is_done: bool = False

    @property
    def takes_coordinator(self) -> bool:
        """Whether the coordinator was on it, so that another one has to go on."""
        return 0 in self.began.moved


@dataclass(slots=True)
class NodeReplacer:
    """Answers the loss of nodes in one attempt.

    Attributes:
        decider: of the run.
        placer: of the run.
        view: the attempt.
        start_order: of the attempt, made when it is needed.
        slow_node: one that holds the others up, if there is one.
    """

    decider: Decider
    placer: Placer
    view: AttemptView
    start_order: Callable[[], StartOrder]
    slow_node: Callable[[], SlowNode | None] = lambda: None
    _told_s: dict[str, float] = field(default_factory=dict)
    _moves: dict[int, _Move] = field(default_factory=dict)  # by the number of the recovery
    _joining: dict[str, int] = field(default_factory=dict)  # nodes that came, and the recovery's

    @property
    def job(self) -> Job:
        """Of the run."""
        return self.decider.job

    @property
    def fleet(self) -> Fleet:
        """Of the run."""
        return self.decider.fleet

    def look(self, snapshot: Snapshot, progress: Progress) -> frozenset[str]:
        """Do what is to be done now. The nodes whose loss is being answered, or whose start is.

        Raises:
            MoveFailed: the attempt has to end; `progress` has the fault.
        """
        if not replaces_nodes(self.job, self.fleet):
            return frozenset()
        self._note(progress.open_recoveries)
        lost = frozenset(snapshot.lost)
        for node in lost & self._joining.keys():
            self._lost_while_joining(node, progress)
        for move in sorted(self._moves.values(), key=lambda one: not one.takes_coordinator):
            if not move.is_done:
                self._carry_out(move, progress)
        if not self._waits_for_coordinator(snapshot):
            moving = {one.node for one in self._moves.values()}
            self._tell_of(lost - self._told_s.keys() - moving, snapshot, progress)
            self._leave_slow(progress)
        # The node that an engine has yet to choose has no name.
        unnamed = [ANY_NODE] if self._moves else []
        return frozenset((*self._joining, *self._answered(snapshot, progress), *unnamed))

    def _tell_of(self, nodes: Collection[str], snapshot: Snapshot, progress: Progress) -> None:
        """Tell the coordinator, or have another one go on first: it can be told afterwards."""
        members_on = {node: self.placer.members_on(node) for node in nodes}
        first = [node for node, members in members_on.items() if 0 in members]
        for node in first or nodes:
            fault, members = self._fault_of(node, progress), members_on[node]
            self._told_s[node] = time.monotonic()
            if 0 not in members:
                message = NodeGone(fault=fault, ranks=self._ranks_of(members))
                is_answered = self._send(message, about=node)
            else:
                is_answered = self._begin(fault, members, snapshot, progress)
            if not is_answered:
                self._told_s[node] = float("-inf")

    def _leave_slow(self, progress: Progress) -> None:
        """Have a node left that holds the others up, where that costs no more than a step."""
        slow = self.slow_node()
        if slow is None or self.leaves(slow) or self._moves or not progress.trains:
            return
        step = progress.last.step if progress.last is not None else None
        fault = diagnose(Evidence(time.time(), step, slow=slow)).fault
        moved = self._ranks_of(self.placer.members_on(slow.node))
        is_possible = moved and self.placer.has_room()
        if is_possible and self.decider.within(fault, moved).rung is Rung.NODE_REPLACE:
            self._told_s[slow.node] = time.monotonic()
            if not self._send(NodeGone(fault=fault, ranks=moved), about=slow.node):
                self._told_s.pop(slow.node)

    def leaves(self, slow: SlowNode | None) -> bool:
        """Whether a node that holds the others up is being left inside the attempt."""
        moving = {one.node for one in self._moves.values()}
        return slow is not None and slow.node in (*self._told_s, *moving)

    def _fault_of(self, node: str, progress: Progress) -> Fault:
        step = progress.last.step if progress.last is not None else None
        losses = tuple(loss for loss in self.fleet.losses((node,)) if loss.node == node)
        return diagnose(Evidence(time.time(), step, lost_nodes=(node,), losses=losses)).fault

    def _waits_for_coordinator(self, snapshot: Snapshot) -> bool:
        """Whether another one is about to go on, and cannot be told of anything yet."""
        first = snapshot.agents.get(0)
        begins = first is None or first.state in (AgentState.IDLE, AgentState.STAGING)
        moves = (one for one in self._moves.values() if one.takes_coordinator)
        return any(begins or not one.is_done for one in moves)

    def _answered(self, snapshot: Snapshot, progress: Progress) -> Collection[str]:
        """Lost nodes that the coordinator is about to answer, or has answered."""
        if self._waits_for_coordinator(snapshot):
            return snapshot.lost
        now_s = time.monotonic()
        limit_s = ANSWER_S
        if progress.has_given_up:  # those that live may be saving
            limit_s += self.job.engine.grace_s + SAVE_MARGIN_S
        told = {node for node, at_s in self._told_s.items() if now_s - at_s < limit_s}
        return told | {move.node for move in self._moves.values()}

    def _note(self, recoveries: Collection[RecoveryBegan]) -> None:
        """Take up moves that have begun, and forget those that are over."""
        view = self.decider.writer.now(self.view)
        over = {one.number for one in view.events if isinstance(one, RecoveryEnded)}
        known = [one.began for one in view.recoveries]
        for began in (*recoveries, *known):
            if began.moved and began.number not in (*over, *self._moves):
                node = began.fault.node or ""
                self._moves[began.number] = _Move(began, node, time.monotonic())
        for number in over & self._moves.keys():
            self._forget(number)

    def _forget(self, number: int) -> None:
        """A move is over: its nodes may be lost once more."""
        move = self._moves.pop(number)
        for node in (move.node, move.began.fault.node or ""):
            self._told_s.pop(node, None)
        self._joining = {node: its for node, its in self._joining.items() if its != number}

    def _begin(
        self, fault: Fault, members: Collection[int], snapshot: Snapshot, progress: Progress
    ) -> bool:
        """Decide in the place of the coordinator, and have another one go on with it.

        Whether that is possible: all others train, and nobody else is on the way.
        """
        moved, others = self._ranks_of(members), snapshot.agents.values()
        is_over = any(one.is_over or any(w.exit_code is not None for w in one.workers)
                      for one in others)  # fmt: skip
        if progress.last is None or progress.has_given_up or self._moves or is_over:
            return False
        decision = self.decider.within(fault, moved)
        if decision.rung is not Rung.NODE_REPLACE:
            return False
        for one in progress.open_recoveries:
            self._end(one, "the coordinator was lost with its node", progress)
        events = self.decider.writer.now(self.view).events
        began = RecoveryBegan(
            at_s=time.time(),
            number=max((one.number for one in events), default=0) + 1,
            generation=max(map(_generation_after, events), default=1),
            fault=fault,
            decision=decision,
            moved=moved,
        )
        self.decider.writer.record_events(self.view, [began])
        self._moves[began.number] = _Move(began, fault.node or "", time.monotonic())
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
        self.decider.writer.record_events(self.view, [ended])
        progress.take([ended])

    def _ranks_of(self, members: Collection[int]) -> tuple[int, ...]:
        slots = self.job.engine.slots_per_node
        return tuple(
            rank for one in sorted(members) for rank in range(one * slots, (one + 1) * slots)
        )

    def _send(self, message: NodeGone | NotReplaced, *, about: str) -> bool:
        placement, attempt = self.view.key
        order = NoticeOrder(placement=placement, attempt=attempt, message=message)
        try:
            self.fleet.notice(order)
        except (EngineError, AgentUnreachable) as error:
            _log.warning("the coordinator cannot be told of %s: %s", about, error)
            return False
        return True

    def _carry_out(self, move: _Move, progress: Progress) -> None:
        began = move.began
        limit_s = self.job.restart.spare_wait_s
        if move.takes_coordinator:  # ranks do not wait for one for ever
            limit_s = min(limit_s, WITHOUT_COORDINATOR_S)
        members = {rank // self.job.engine.slots_per_node for rank in began.moved}
        try:
            placement, moved = self.placer.move(members, off=move.node, wait_s=limit_s)
            if move.takes_coordinator:
                self._fence(placement)
                self.fleet.resume(self.start_order(), began)
            self.fleet.join(self.start_order(), members, generation=began.generation + 1)
        except NoCapacity as error:
            if time.monotonic() - move.waits_since_s > limit_s:
                self._cannot(move, str(error), progress)
            return
        except (EngineError, AgentUnreachable) as error:
            self._cannot(move, str(error), progress)
            return
        move.is_done = True
        for index in moved:
            node = placement.members[index].node
            _log.warning("member %d has moved from %s to %s", index, move.node, node)
            self._joining[node] = began.number

    def _fence(self, placement: Placement) -> None:
        """Keep what still lives on the node that is left from committing anything."""
        try:
            self.decider.writer.fence(placement, self.view.key)
        except (
            StorageError
        ) as error:  # what it may still commit is whole, and of a step that all had
            _log.warning("the first member's old container may still commit: %s", error)

    def _cannot(self, move: _Move, why: str, progress: Progress) -> None:
        """Have the coordinator ask the ladder again; the next rung is above the processes.

        Raises:
            MoveFailed: there is none.
        """
        move.is_done = True
        if not self._send(NotReplaced(rank=move.began.moved[0], why=why), about=move.node):
            progress.take([move.began])  # it may have been written by this supervisor alone
            raise MoveFailed(why)

    def _lost_while_joining(self, node: str, progress: Progress) -> None:
        number = self._joining.pop(node)
        move = self._moves[number]
        why = f"{node} was lost while it took the place of {move.node}"
        _log.warning(why)
        self.placer.refuse(node, why)
        if move.takes_coordinator:
            # The ranks have come to a coordinator there: the next one needs another generation.
            self._end(move.began, why, progress)
            self._forget(number)
            return
        move.node, move.is_done, move.waits_since_s = node, False, time.monotonic()


def _generation_after(event: LedgerEvent) -> int:
    """The newest generation that may have been announced when this was written."""
    match event:
        case RecoveryBegan():
            apart = GENERATIONS_APART if 0 in event.moved else 0
            return event.generation + apart + 1
        case RecoveryEnded():
            return event.generation
    return 1


def replaces_nodes(job: Job, fleet: Fleet) -> bool:
    """Whether nodes can be replaced under a job while the processes of the others live on."""
    is_on = job.restart.node_replace and not job.worker.is_command
    return is_on and Rung.NODE_REPLACE in fleet.capabilities
