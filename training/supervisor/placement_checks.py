"""The checks of the nodes of a placement before its first attempt.

Nodes that fail their checks are on record as refused before anything is done about it; the next
placement avoids them. A check that fails everywhere is no node's fault: before the first attempt of
a run it ends the run, with its message; later the attempt starts all the same, and the ladder
answers its fault.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perdure.training.config.job import Job
from perdure.training.engines.base import ClockProbe, Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.environment import variables_of
from perdure.training.errors import EngineError
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import NodeRefused
from perdure.training.node_checks.verdict import CheckVerdict, verdict_of
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.observing import staying_members
from perdure.training.trainer.size import state_bytes
from perdure.training.wire.agent import CheckOrder
from perdure.training.wire.node import Check, CheckOutcome


def check_order(job: Job) -> CheckOrder:
    """Build the order to check a node by itself."""
    return CheckOrder(
        job=job,
        num_nodes=job.engine.nodes,
        slots_per_node=job.engine.slots_per_node,
        state_bytes=state_bytes(job),
        is_new=True,
        gang_host=None,
        variables=variables_of(job),
        timeout_s=job.preflight.limit_s,
    )


class PlacementChecks:
    """Checks the nodes of one run's placements."""

    def __init__(self, job: Job, fleet: Fleet, writer: LedgerWriter) -> None:
        self._job, self._fleet, self._writer = job, fleet, writer

    def run(self, placement: Placement) -> CheckVerdict:
        """Check the nodes that are new, and the gang of all.

        Raises:
            EngineError: before the first attempt, something is wrong that no node is to blame for.
        """
        greetings = self._fleet.greet()
        orders = self._orders(placement, self._writer.refresh(), greetings)
        checks = [*self._fleet.check(orders), *self._compare_clocks(greetings)]
        verdict = verdict_of(checks)
        for node, why in verdict.refused.items():
            self._writer.ledger.append(NodeRefused, placement=placement.number, node=node, why=why)
        history = self._writer.refresh()
        if verdict.common and not verdict.refused and not history.attempts:
            raise EngineError(f"checks before the first step failed: {'; '.join(verdict.common)}")
        return verdict

    def _orders(
        self, placement: Placement, history: RunHistory, greetings: Mapping[int, ClockProbe]
    ) -> dict[int, CheckOrder]:
        staying = staying_members(history, placement)
        first = greetings.get(0) if self._job.preflight.gang else None
        order = check_order(self._job)
        if first is not None:
            order = order.model_copy(update={"gang_host": first.host, "gang_port": first.port})
        was_checked = self._fleet.spare_containers.was_checked
        return {
            i: order.model_copy(
                update={"is_new": i not in staying and not (i > 0 and was_checked(i))}
            )
            for i in (member.index for member in placement.members)
        }

    def _compare_clocks(self, greetings: Mapping[int, ClockProbe]) -> Iterator[Check]:
        """Compare clocks with the supervisor's: they order the logs of several nodes."""
        limit_s = self._job.preflight.clock_skew_s
        for greeting in greetings.values():
            # A slow answer makes the offset doubtful, not the clock wrong.
            is_off = abs(greeting.clock_s) > limit_s + greeting.doubt_s
            yield Check(
                name="clock",
                node=greeting.node,
                outcome=CheckOutcome.WARNING if is_off else CheckOutcome.OK,
                seen=f"{greeting.clock_s:+.3f} s, known to {greeting.doubt_s:.3f} s",
                allowed=f"{limit_s:g} s",
                figures={"clock_s": greeting.clock_s},
            )
