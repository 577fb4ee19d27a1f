"""Checks of a placement before its first step, and what follows from them.

Nodes that fail are on record as refused before anything is done about it; the next placement
avoids them. What fails everywhere is no node's fault: before the first attempt of a run it ends
the run, with the words of the check; later the attempt is started all the same, and the ladder
answers what becomes of it. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from training.engines.base import Engine, Greeting, Placement
from training.environment import variables_of
from training.errors import EngineError
from training.health.preflight.judging import Judgement, judge
from training.job import Job
from training.journal.history import RunHistory
from training.journal.records import NodeRefused
from training.supervisor.ledger_writer import LedgerWriter
from training.wire.agent import CheckOrder
from training.wire.check import Check, Outcome


@dataclass(frozen=True, slots=True)
class Checker:
    """Checks the placements of one run.

    Attributes:
        job: of the run.
        engine: where its containers are.
        book: of the run.
    """

    job: Job
    engine: Engine
    book: LedgerWriter

    def check(self, placement: Placement) -> Judgement:
        """Check the nodes that are new, and the gang of all.

        Raises:
            EngineError: before the first attempt, something is wrong that no node is to blame for.
        """
        greetings = self.engine.greet()
        orders = self._orders(placement, self.book.refresh(), greetings)
        found = [*self.engine.check(orders), *self._clocks(greetings)]
        judgement = judge(found)
        for node, why in judgement.refused.items():
            self.book.ledger.append(NodeRefused, placement=placement.number, node=node, why=why)
        history = self.book.refresh()
        if judgement.common and not judgement.refused and not history.attempts:
            raise EngineError(f"checks before the first step failed: {'; '.join(judgement.common)}")
        return judgement

    def _orders(
        self, placement: Placement, history: RunHistory, greetings: Mapping[int, Greeting]
    ) -> dict[int, CheckOrder]:
        before = history.placements[-2].members if len(history.placements) > 1 else ()
        kept = {member.index for member in placement.members if member in before}
        first = greetings.get(0) if self.job.preflight.gang else None
        variables = variables_of(self.job)
        return {
            member.index: CheckOrder(
                job=self.job.model_dump_json(),
                num_nodes=len(placement.members),
                slots_per_node=self.job.engine.slots_per_node,
                is_new=member.index not in kept,
                gang_host=first.host if first is not None else None,
                gang_port=first.port if first is not None else 0,
                variables=variables,
                timeout_s=self.job.preflight.limit_s,
            )
            for member in placement.members
        }

    def _clocks(self, greetings: Mapping[int, Greeting]) -> Iterator[Check]:
        """Clocks beside the supervisor's: logs of several nodes are put in order by them."""
        limit_s = self.job.preflight.clock_skew_s
        for greeting in greetings.values():
            is_off = abs(greeting.clock_s) > limit_s + greeting.doubt_s
            yield Check(
                name="clock",
                node=greeting.node,
                outcome=Outcome.WARNING if is_off else Outcome.OK,
                seen=f"{greeting.clock_s:+.3f} s, known to {greeting.doubt_s:.3f} s",
                allowed=f"{limit_s:g} s",
                figures={"clock_s": greeting.clock_s},
            )
