"""Before processes are started on a chip that had a fault: what its node does about it, on record.

The first degradation of a restart in place: where the fault is still there, the rung has failed,
and the ladder is asked again. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.training.environment import variables_of
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import ChipsHealed
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.healing import Act, ActDone, HealPlan, hardware_fault
from perdure.training.recovery.rungs import RESTARTS_IN_PLACE, Decision
from perdure.training.supervisor.deciding import Decider
from perdure.training.wire.healing import HealOrder

POLL_S = 0.05
ANSWER_MARGIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Healer:
    """Has chips healed before a restart in place.

    Attributes:
        decider: of the run.
        cwd: folder that the workers start in.
    """

    decider: Decider
    cwd: str

    def answer(
        self, view: AttemptView, fault: Fault, *, stop_wanted: Callable[[], bool]
    ) -> tuple[Decision, ChipsHealed | None]:
        """Ask the ladder about the fault that ended an attempt, and heal where it says to stay."""
        decision = self.decider.decide(view, fault)
        decision = self.heal(view, fault, decision, stop_wanted=stop_wanted)
        return decision, self.decider.writer.refresh().attempts[-1].healed

    def heal(
        self,
        view: AttemptView,
        fault: Fault,
        decision: Decision,
        *,
        stop_wanted: Callable[[], bool],
    ) -> Decision:
        """The decision to act on: the given one, or the next rung where the fault is still there.

        Args:
            view: the attempt that has failed; none of its processes is left.
            fault: that ended it.
            decision: that answers it.
            stop_wanted: polled meanwhile; a request to stop ends the wait, not what goes on.
        """
        ended = self.decider.writer.history.attempts[-1].ended
        hurt = hardware_fault(fault, ended.runners_up if ended is not None else ())
        if decision.rung not in RESTARTS_IN_PLACE or hurt is None or hurt.node is None:
            return decision
        if not self.decider.job.restart.heal.check:
            return decision
        done = self._await(self._order(view, hurt, decision), hurt.node, stop_wanted)
        if done is None:
            return decision  # the next attempt shows what has become of the node
        self.decider.writer.record_events(view, [done])
        if done.succeeded:
            return decision
        return self.decider.rung_failed(decision.rung, done.text)

    def _await(
        self, order: HealOrder, node: str, stop_wanted: Callable[[], bool]
    ) -> ChipsHealed | None:
        """What came of it; None when nobody knows, or a stop was requested."""
        until_s = time.monotonic() + order.plan.limit_s + ANSWER_MARGIN_S
        while time.monotonic() < until_s and not stop_wanted():
            try:
                done = self.decider.fleet.heal(node, order).done
            except (EngineError, AgentUnreachable):
                return None
            if done is not None:
                return done
            time.sleep(POLL_S)
        return None if stop_wanted() else _late(order, node)

    def _order(self, view: AttemptView, fault: Fault, decision: Decision) -> HealOrder:
        job = self.decider.job
        placement, attempt = view.key
        return HealOrder(
            placement=placement,
            attempt=attempt,
            rung=decision.rung,
            plan=HealPlan(
                fault.chip_code,
                devices=(fault.device,) if fault.device is not None else (),
                may_reset=job.restart.heal.reset,
                wait_s=job.restart.heal.wait_s,
                reset_s=job.restart.heal.reset_s,
            ),
            slots_per_node=job.engine.slots_per_node,
            variables=variables_of(job),
            cwd=self.cwd,
        )


def _late(order: HealOrder, node: str) -> ChipsHealed:
    """A node that lives and comes to no end."""
    limit_s = order.plan.limit_s
    silent = ActDone(Act.CHECK, is_good=False, seen=f"no end within {limit_s:g} s", seconds=limit_s)
    return ChipsHealed(
        at_s=time.time(),
        number=1,
        node=node,
        rung=order.rung,
        succeeded=False,
        acts=(silent,),
        seconds=limit_s,
    )
