"""Where the next attempt stands: on the containers that are there, or on new ones.

Whatever a supervisor was doing when it died is found again and finished. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from training.engines.base import Engine, Placement, plan, plan_replacement
from training.errors import AgentUnreachable, EngineError, NoCapacity
from training.job import Job
from training.journal.history import RunHistory
from training.journal.ledger import Identity
from training.journal.records import Placed
from training.recovery.ladder import RESTARTS_IN_PLACE, Rung
from training.supervisor.deciding import Decider
from training.supervisor.ledger_writer import LedgerWriter

SPARE_POLL_S = 1.0


class Placer:
    """Makes the placements of one run.

    Args:
        job: of the run.
        engine: where containers come from.
        book: of the run.
        decider: asked when a rung cannot be carried out.
        identity: of this supervisor.
        home: Perdure's folder on this machine.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        book: LedgerWriter,
        decider: Decider,
        *,
        identity: Identity,
        home: Path,
    ) -> None:
        self._job = job
        self._engine = engine
        self._book = book
        self._decider = decider
        self._identity = identity
        self._home = home
        self._waited_s = 0.0

    def place(self, *, stop_wanted: Callable[[], bool]) -> Placement:
        """The placement the next attempt stands on: the living one, or a new one.

        Raises:
            EngineError: no placement is possible, and the ladder says stop.
        """
        self._decider.decide_what_is_open()
        current = placement_of(self._book.history)
        repairs = current is not None and bool(self._book.history.refused_in(current.number))
        if current is not None and not repairs and self._keeps(self._book.history, current):
            return current
        while True:
            rung = self._repair if repairs else _rung_of(self._book.refresh())
            if rung is Rung.STOP:
                decided = self._book.history.pending_decision
                reason = decided.reason if decided else "no placement is possible"
                raise EngineError("; ".join((reason, *_refusals(self._book.history))))
            try:
                return self._carry_out(rung, current, stop_wanted)
            except (EngineError, AgentUnreachable) as error:
                if stop_wanted():
                    raise EngineError("stopped on request") from error
                why = "; ".join((str(error), *_refusals(self._book.history)))
                self._decider.rung_failed(rung, why, waited_s=self._waited_s)
                repairs = False

    @property
    def _repair(self) -> Rung:
        """How members on refused nodes move: alone where the engine can, or all."""
        can = Rung.POD_RESCHEDULE in self._engine.capabilities
        return Rung.POD_RESCHEDULE if can else Rung.JOB_RESCHEDULE

    def _keeps(self, history: RunHistory, current: Placement) -> bool:
        """Whether the next attempt stands on the placement that is there.

        With some of its members gone it is still kept when processes were started on it: the
        attempt then ends with the loss, and the ladder is asked.
        """
        if not history.attempts_in(current.number):
            return self._completes(history, current)
        alive = self._engine.adopt(current)
        if history.open_attempt is not None:
            if not alive:
                self._decider.vanished(history.open_attempt)
            return bool(alive)
        decided = history.pending_decision
        in_place = decided is not None and decided.rung in RESTARTS_IN_PLACE
        return in_place and len(history.attempts) > history.budgets_from and bool(alive)

    def _completes(self, history: RunHistory, current: Placement) -> bool:
        """Finish a placement whose supervisor died between its record and its first attempt.

        Returns:
            False when it cannot stand as recorded: members that were to stay are gone.
        """
        members = {member.index for member in current.members}
        before = history.placements[-2].members if len(history.placements) > 1 else ()
        stay = {m.index for m in current.members if m in before}
        alive = self._engine.adopt(current)
        if alive == members:
            return True
        if not stay:
            self._engine.submit(current)
            return True
        if not alive:
            placed = history.placements[-2]
            alive = self._engine.adopt(Placement(placed.placement, placed.members)) & stay
        if not stay <= alive:
            return False
        self._engine.replace(current, members - alive)
        return True

    def _carry_out(
        self, rung: Rung, current: Placement | None, stop_wanted: Callable[[], bool]
    ) -> Placement:
        began_s, self._waited_s = time.monotonic(), 0.0
        deadline_s = began_s + self._job.restart.spare_wait_s
        while True:
            try:
                return self._new_placement(rung, current)
            except NoCapacity:
                self._waited_s = time.monotonic() - began_s
                if current is None or stop_wanted() or time.monotonic() > deadline_s:
                    raise
                time.sleep(SPARE_POLL_S)

    def _new_placement(self, rung: Rung, current: Placement | None) -> Placement:
        history, nodes = self._book.history, self._engine.nodes()
        avoid = history.isolated
        if rung is Rung.JOB_RESCHEDULE and self._may_go_back(avoid):
            avoid = history.refused
        if rung is Rung.POD_RESCHEDULE and current is not None:
            alive = self._engine.adopt(current)
            lost = [m.node for m in current.members if m.index not in alive]
            placement, moved = plan_replacement(nodes, previous=current, avoid=avoid, lost=lost)
            self._record(placement, avoid)
            self._engine.replace(placement, moved)
            return placement
        placement = plan(nodes, self._job.engine.nodes, previous=current, avoid=avoid)
        self._record(placement, avoid)
        self._engine.submit(placement)
        return placement

    def _may_go_back(self, avoid: tuple[str, ...]) -> bool:
        """Whether too few healthy nodes are left and the policy lets the job use isolated ones."""
        left = len(self._engine.nodes()) - len(avoid)
        return left < self._job.engine.nodes and self._job.restart.allow_without_isolation

    def _record(self, placement: Placement, avoid: tuple[str, ...]) -> None:
        self._book.ledger.append(
            Placed,
            placement=placement.number,
            members=placement.members,
            avoid=avoid,
            host=self._identity.host,
            boot_id=self._identity.boot_id,
            home=str(self._home),
            waited_s=self._waited_s,
        )


def placement_of(history: RunHistory) -> Placement | None:
    """The placement in effect."""
    placed = history.placement
    return Placement(placed.placement, placed.members) if placed is not None else None


def _refusals(history: RunHistory) -> list[str]:
    """Why nodes were refused that nothing but their own checks spoke against."""
    return [f"{one.node} failed its checks: {one.why}" for one in history.refusals]


def _rung_of(history: RunHistory) -> Rung:
    decided = history.pending_decision
    if decided is None or len(history.attempts) <= history.budgets_from:
        return Rung.JOB_RESCHEDULE  # a first placement, or somebody started an ended run again
    if decided.rung is Rung.STOP:
        return Rung.STOP  # also after a placement whose nodes were refused
    done = (
        history.placement is not None
        and history.placement.placement > history.attempts[-1].started.placement
    )
    # Carried out already, or in place where nothing is left: only new containers help.
    return Rung.JOB_RESCHEDULE if done or decided.rung in RESTARTS_IN_PLACE else decided.rung
