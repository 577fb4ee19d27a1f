"""The placement of the next attempt, on the containers that are there or on new ones.

The next supervisor finishes any action in which a supervisor died.

Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from perdure.training.engines.base import ANY_NODE, Placement, plan, plan_replacement
from perdure.training.errors import AgentUnreachable, EngineError, NoCapacity, StopRequested
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Identity
from perdure.training.journal.records import NodeRefused, PlacementCreated
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.recovery.faults import POD_PREEMPTED
from perdure.training.recovery.rungs import RESTARTS_IN_PLACE, Rung
from perdure.training.reporting.action_items import spares_of
from perdure.training.supervisor.finishing import Healer, fault_of
from perdure.training.supervisor.observing import placement_of, staying_members
from perdure.training.supervisor.room import GO_BACK_AFTER_S, LONGEST_POLL_S, RoomWait
from perdure.training.supervisor.sub_health import sub_healthy_nodes

SPARE_POLL_S = 1.0
LONGEST_PAUSE_S = 60.0  # between two requests that the platform has refused

_log = logging.getLogger("perdure.supervisor")


class Placer:
    """Makes the placements of one run.

    Attributes:
        on_wait: called with what the run waits for, and with None when that is over.

    Args:
        healer: its decider is asked when a rung cannot be carried out.
        identity: this supervisor's.
        home: Perdure's folder on this machine.
        on_wait: the attribute.
    """

    def __init__(
        self,
        healer: Healer,
        *,
        identity: Identity,
        home: Path,
        on_wait: Callable[[Wait | None], None] = lambda _wait: None,
    ) -> None:
        self._healer, self._decider = healer, healer.decider
        decider = healer.decider
        self._job, self._fleet, self._writer = decider.job, decider.fleet, decider.writer
        self._identity = identity
        self._home = home
        self.on_wait = on_wait
        self._room = RoomWait(lambda: None)
        self._is_wait_over = False  # of a rung before

    def place(self, *, stop_wanted: Callable[[], bool]) -> Placement:
        """Find the placement of the next attempt: the living placement, or a new one.

        A platform that refuses, or does not answer, is waited for once there was an attempt.

        Raises:
            StopRequested: while it was looking.
            EngineError: no placement is possible, and the ladder stops the run.
        """
        since_s, pause_s, why = time.time(), SPARE_POLL_S, ""
        try:
            while True:
                try:
                    return self._place(stop_wanted)
                except EngineError as error:
                    if not error.is_refusal or not self._has_begun:
                        raise
                    if str(error) != why:
                        _log.warning("the platform refuses, or does not answer: %s", error)
                    why = str(error)
                self.on_wait(Wait(kind=WaitKind.PLATFORM, since_s=since_s, why=why))
                self._pause(pause_s, stop_wanted)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            if why:
                self.on_wait(None)

    @property
    def _has_begun(self) -> bool:
        """Whether there was an attempt, since an ended run was started again."""
        history = self._writer.history
        return len(history.attempts) > history.budgets_from

    def _pause(self, seconds: float, stop_wanted: Callable[[], bool]) -> None:
        until_s = time.monotonic() + seconds
        while not stop_wanted():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(SPARE_POLL_S, left_s))
        raise StopRequested

    def _place(self, stop_wanted: Callable[[], bool]) -> Placement:
        self._decider.decide_pending()
        current = placement_of(self._writer.history)
        refused = self._writer.history.refused_in(current.number) if current is not None else ()
        repairs = current is not None and not set(refused).isdisjoint(current.nodes)
        if current is not None and not repairs and self._keeps(current, stop_wanted):
            return placement_of(self._writer.refresh()) or current
        while True:
            rung = self._repair if repairs else _rung_of(self._writer.refresh())
            if rung is Rung.STOP:
                decided = self._writer.history.pending_decision
                reason = decided.reason if decided else "no placement is possible"
                raise EngineError("; ".join((reason, *_refusals(self._writer.history))))
            try:
                return self._carry_out(rung, current, stop_wanted)
            except (EngineError, AgentUnreachable) as error:
                if stop_wanted():
                    raise StopRequested from error
                if isinstance(error, EngineError) and error.is_refusal and self._has_begun:
                    raise
                why = "; ".join((str(error), *_refusals(self._writer.history)))
                self._decider.rung_failed(rung, why, waited_s=self._room.waited_s)
                repairs = False

    @property
    def _repair(self) -> Rung:
        """The rung that moves members off refused nodes: alone where the engine can, or all."""
        moves_alone = Rung.POD_RESCHEDULE in self._fleet.capabilities
        return Rung.POD_RESCHEDULE if moves_alone else Rung.JOB_RESCHEDULE

    def _keeps(self, current: Placement, stop_wanted: Callable[[], bool]) -> bool:
        """Whether the next attempt keeps the placement that is there.

        It does with some members gone, too, when processes were started on it: the attempt then
        ends with the loss, and the ladder decides.
        """
        history = self._writer.history
        if not history.attempts_in(current.number):
            try:
                return self._completes(history, current, stop_wanted)
            except NoCapacity as error:  # another placement may find room, or waits for it
                _log.warning("placement %d cannot be completed: %s", current.number, error)
                return False
        alive = self._fleet.adopt(current)
        if history.open_attempt is not None:
            if not alive:
                is_from_outside = self._is_from_outside(history)
                self._decider.record_vanished(history.open_attempt, is_from_outside=is_from_outside)
            return bool(alive)
        if history.restarts_on_schedule:
            return bool(alive)
        decided = history.pending_decision
        if decided is None or len(history.attempts) <= history.budgets_from or not alive:
            return False
        if decided.rung in RESTARTS_IN_PLACE:
            # The previous supervisor may have died over it; a node that is done has the answer.
            view = history.attempts[-1]
            decided = self._healer.heal(view, fault_of(view), decided, stop_wanted=stop_wanted)
        return decided.rung in RESTARTS_IN_PLACE

    def _is_from_outside(self, history: RunHistory) -> bool:
        """Whether the containers of this machine were ended with it, or by SIGTERM to all."""
        if not self._job.engine.on_this_machine or history.placement is None:
            return False
        is_rebooted = history.placement.boot_id not in ("", self._identity.boot_id)
        return is_rebooted or self._fleet.are_terminated

    def _completes(
        self, history: RunHistory, current: Placement, stop_wanted: Callable[[], bool]
    ) -> bool:
        """Finish a placement whose supervisor died between its record and its first attempt.

        Returns:
            False when it cannot be as recorded: members that were to stay are gone.
        """
        members = {member.index for member in current.members}
        stay = staying_members(history, current)
        alive = self._fleet.adopt(current)
        if alive == members:
            self._bind(current)
            return True
        placed = history.placements[-2] if len(history.placements) > 1 else None
        former = Placement(placed.placement, placed.members) if placed is not None else None
        if stay and not alive and former is not None:
            alive = self._fleet.adopt(former) & stay
        if not stay <= alive:
            return False

        def complete() -> Placement:
            placement = replace(current, avoid=self._writer.refresh().isolated)
            if stay:
                self._replace(placement, members - alive)
            else:
                self._renew_all(placement, former)
            return self._bind(placement)

        rung = Rung.POD_RESCHEDULE if stay else Rung.JOB_RESCHEDULE
        self._await_room(complete, rung, stop_wanted)
        return True

    def _replace(self, placement: Placement, members: Collection[int]) -> None:
        self._fleet.replace(replace(placement, on_pending=self._room.note_pending), members)

    def _bind(self, placement: Placement, members: Collection[int] | None = None) -> Placement:
        """Put the nodes that the engine has chosen on record, and return the placement with them.

        Args:
            placement: whose containers are there.
            members: with new containers; None: all. Another member may be about to move, and its
                container is still on the old node.
        """
        placed = self._fleet.resolve_nodes(placement, members)
        # Of the same number: it takes the place of the record that had no nodes, or no wait, yet.
        previous = self._writer.refresh().placement
        sub_healthy = previous.sub_healthy if previous is not None else {}
        self._record(placed, sub_healthy, waited_s=self._room.waited_s)
        return placed

    def _carry_out(
        self, rung: Rung, current: Placement | None, stop_wanted: Callable[[], bool]
    ) -> Placement:
        return self._await_room(lambda: self._new_placement(rung, current), rung, stop_wanted)

    def _await_room(
        self, act: Callable[[], Placement], rung: Rung, stop_wanted: Callable[[], bool]
    ) -> Placement:
        """Repeat an action until there is room for its containers."""
        room = self._room = RoomWait(
            lambda: self._room_limit_s(rung), on_wait=self.on_wait, stop_wanted=stop_wanted
        )
        pause_s = SPARE_POLL_S
        try:
            while True:
                try:
                    return act()
                except NoCapacity as error:
                    if room.is_over or self._is_in_vain:
                        raise
                    room.note(str(error))
                    self._pause(pause_s, stop_wanted)
                if self._fleet.nodes() is None:  # each look is a request to the platform
                    pause_s = min(2 * pause_s, LONGEST_POLL_S)
        finally:
            self._is_wait_over |= room.is_over
            room.end()

    @property
    def _is_in_vain(self) -> bool:
        """Whether no wait helps: a first placement, on an engine that lists all nodes there are."""
        return not self._writer.history.placements and self._fleet.nodes() is not None

    def _room_limit_s(self, rung: Rung) -> float | None:
        """How long a rung waits for room; None: as long as it takes."""
        restart = self._job.restart
        if restart.spare_wait_s is not None:
            return restart.spare_wait_s
        goes_back = restart.unconditional and rung is not Rung.JOB_RESCHEDULE
        may = goes_back and self._may_go_back(self._writer.history.isolated)
        return GO_BACK_AFTER_S if may else None

    def _new_placement(self, rung: Rung, current: Placement | None) -> Placement:
        # Read again: while it waits for a spare, a user may release a node.
        history, nodes = self._writer.refresh(), self._fleet.nodes()
        isolated = avoid = history.isolated
        self._room.is_outdated = lambda: self._writer.refresh().isolated != isolated
        if rung is Rung.JOB_RESCHEDULE and self._may_go_back(avoid):
            avoid = history.refused
        sub_healthy = {sub.node: sub.why for sub in sub_healthy_nodes(history)}
        if rung is Rung.POD_RESCHEDULE and current is not None:
            alive = self._fleet.adopt(current)
            lost = [m.node for m in current.members if m.index not in alive]
            lost += _renewed_nodes(history)
            placement, moved = plan_replacement(
                nodes, previous=current, avoid=avoid, lost=lost, last=sub_healthy
            )
            # On record before it is done: after a death in between, _completes() finishes it.
            self._record(placement, sub_healthy)
            self._replace(placement, moved)
            return self._bind(placement)
        placement = plan(
            nodes, self._job.engine.nodes, previous=current, avoid=avoid, last=sub_healthy
        )
        self._record(placement, sub_healthy)
        self._renew_all(placement, current)
        return self._bind(placement)

    def _renew_all(self, placement: Placement, former: Placement | None) -> None:
        """Start a new container for every member.

        Where the engine asks a platform for room, healthy members keep their containers until those
        of the others are there: what is given back may be somebody else's a moment later. After a
        preemption, the rest is given back, and all members wait for room.

        Args:
            placement: the members.
            former: the placement before it.
        """
        done, staying = frozenset[int](), frozenset[int]()
        if former is not None and self._fleet.nodes() is None:
            done = self._fleet.adopt(placement)  # by an earlier try
            if not self._is_preempted:
                stay = {member.index for member in placement.members if member.node != ANY_NODE}
                stay &= {m.index for m in former.members if m.node in placement.nodes}
                staying = (self._fleet.adopt(former) & stay) - done
        missing = {member.index for member in placement.members} - done - staying
        if not done and not (staying and missing):
            self._fleet.submit(replace(placement, on_pending=self._room.note_pending))
            return
        for members in filter(None, (missing, staying)):
            self._replace(placement, members)
        if done:
            self._fleet.adopt(placement)

    @property
    def _is_preempted(self) -> bool:
        """Whether the platform has taken a container of the newest attempt for somebody else."""
        attempts = self._writer.history.attempts
        fault = attempts[-1].fault if attempts else None
        return fault is not None and fault.code == POD_PREEMPTED

    def members_on(self, node: str) -> frozenset[int]:
        """List the indices of the members of the placement that are on a node."""
        placement = placement_of(self._writer.refresh())
        members = placement.members if placement is not None else ()
        return frozenset(member.index for member in members if member.node == node)

    def has_room(self, *, is_sure: bool = True) -> bool:
        """Whether a member could move to another node, as far as is known.

        Args:
            is_sure: False: a node is enough that fits a container and may be taken by others, as
                for a member that cannot stay where it is.
        """
        nodes = self._fleet.nodes()
        if nodes is not None:
            return bool(spares_of(nodes, self._writer.history))
        if self._fleet.spare_containers.ready():
            return True
        usable = self._fleet.usable_nodes() if not is_sure else None
        return bool(spares_of(sorted(usable or ()), self._writer.history))

    def refuse(self, node: str, why: str) -> None:
        """Keep a node out of what is placed from now on."""
        current = placement_of(self._writer.refresh())
        assert current is not None  # noqa: S101 the node belongs to it
        self._writer.ledger.append(NodeRefused, placement=current.number, node=node, why=why)

    def move(
        self, members: Collection[int], *, off: str, room: RoomWait
    ) -> tuple[Placement, tuple[int, ...]]:
        """Move members to other nodes, in the placement of an attempt that goes on.

        On record before it is done; what is on record already is finished.

        Args:
            members: indices of the members on the node.
            off: the node's name.
            room: the wait for another node.

        Returns:
            The placement, of the same number, and the members that have new containers.

        Raises:
            NoCapacity: there is no node for a member.
            EngineError: a container cannot be started.
        """
        history, nodes = self._writer.refresh(), self._fleet.nodes()
        current = placement_of(history)
        assert current is not None  # noqa: S101 an attempt is on it
        sub_healthy = {sub.node: sub.why for sub in sub_healthy_nodes(history)}
        # Not there again, whatever its fault: nodes differ by name alone.
        avoid = tuple(dict.fromkeys((*history.isolated, off)))
        if off in current.nodes:
            planned, _ = plan_replacement(
                nodes, previous=current, avoid=avoid, lost=(off,), last=sub_healthy
            )
            current = replace(planned, number=current.number)
            self._record(current, sub_healthy)
        current = replace(
            current, avoid=avoid, last=tuple(sub_healthy), on_pending=room.note_pending
        )
        moved = self._fleet.misplaced_members(current) & set(members)
        # Processes left in the old containers wait for ranks that have ended, and can save nothing.
        grace_s = max(0.0, float(self._job.restart.failover_grace_s))
        self._fleet.replace(current, moved, grace_s=grace_s)
        return self._bind(current, moved), tuple(sorted(moved))

    def _may_go_back(self, avoid: tuple[str, ...]) -> bool:
        """Whether too few healthy nodes are left and the policy lets the job use isolated nodes.

        Where their number is unknown, only a wait for room that is over shows that they are few.
        """
        num_healthy, needed = self._decider.num_healthy(avoid), self._job.engine.nodes
        has_too_few = num_healthy < needed if num_healthy is not None else self._is_wait_over
        return has_too_few and self._job.restart.allow_without_isolation

    def _record(
        self, placement: Placement, sub_healthy: dict[str, str], *, waited_s: float = 0.0
    ) -> None:
        """Put a placement on record, once however often it is tried."""
        last, members, avoid = self._writer.history.placement, placement.members, placement.avoid
        if (
            last is not None
            and (last.placement, last.members, last.avoid) == (placement.number, members, avoid)
            and last.waited_s >= waited_s
        ):
            return
        for node, why in sub_healthy.items():
            verb = "uses" if node in placement.nodes else "does without"
            _log.warning(f"placement {placement.number} {verb} {node}, which is sub-healthy: {why}")
        self._writer.ledger.append(
            PlacementCreated,
            placement=placement.number,
            members=placement.members,
            avoid=placement.avoid,
            sub_healthy=sub_healthy,
            host=self._identity.host,
            boot_id=self._identity.boot_id,
            home=str(self._home),
            waited_s=waited_s,
        )


def _refusals(history: RunHistory) -> list[str]:
    """Say why nodes were refused that nothing but their own checks spoke against."""
    return [f"{refusal.node} failed its checks: {refusal.why}" for refusal in history.refusals]


def _rung_of(history: RunHistory) -> Rung:
    decided = history.pending_decision
    if decided is None or len(history.attempts) <= history.budgets_from:
        return Rung.JOB_RESCHEDULE  # a first placement, or an ended run was started again
    if decided.rung is Rung.STOP:
        return Rung.STOP  # also after a placement whose nodes were refused
    done = _has_newer_placement(history)
    # Carried out already, or in place where nothing is left: only new containers help.
    return Rung.JOB_RESCHEDULE if done or decided.rung in RESTARTS_IN_PLACE else decided.rung


def _has_newer_placement(history: RunHistory) -> bool:
    """Whether a placement was made since the newest attempt."""
    placed = history.placement
    return placed is not None and placed.placement > history.attempts[-1].started.placement


def _renewed_nodes(history: RunHistory) -> list[str]:
    """List the node whose container is to be made anew though it lives: a process ended in it."""
    decided = history.pending_decision
    if decided is None or decided.rung is not Rung.POD_RESCHEDULE or _has_newer_placement(history):
        return []
    fault = history.attempts[-1].fault
    return [fault.node] if fault is not None and fault.node is not None else []
