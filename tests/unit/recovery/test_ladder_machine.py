"""The ladder against a small model of its budgets, driven through random lives of a run.

The model keeps counters and forgets them on progress; it never looks at a history.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from training.recovery.faults import Fault, FaultClass
from training.recovery.ladder import Policy, Recovery, Rung, decide

NODES = ("node-0", "node-1")
RESCHEDULED = (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE)


class Model:
    """What is left of every budget, and how high each fault has climbed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.progress()

    def progress(self) -> None:
        self.left = {
            Rung.OPERATOR_RETRY: 3,
            Rung.STEP_RETRY: 3,
            Rung.PROCESS_REPLACE: 3,
            Rung.IN_PLACE_RESTART: self.policy.in_place_retries,
            Rung.HANG_RESTART: 3,
            Rung.POD_RESCHEDULE: self.policy.pod_retries,
        }
        self.restarts = self.policy.max_restarts
        self.floor: Counter[tuple[FaultClass, str]] = Counter()
        self.broken: set[tuple[Rung, tuple[FaultClass, str] | None]] = set()
        self.in_a_row: Counter[FaultClass] = Counter()

    def expected(self, fault_class: FaultClass, node: str, *, survivors: bool) -> Rung:
        tried = {
            FaultClass.NATIVE_CRASH: (2, 3, 5, 6, 7),
            FaultClass.LINK_DOWN: (0, 1, 3, 5, 6, 7),
            FaultClass.NODE_LOST: (5, 6, 7),
            FaultClass.HANG: (4,),
            FaultClass.UNKNOWN: (3, 7),
        }[fault_class]
        for cost in tried:
            if self._may(list(Rung)[cost], (fault_class, node), survivors=survivors):
                return list(Rung)[cost]
        return Rung.STOP

    def _may(self, rung: Rung, key: tuple[FaultClass, str], *, survivors: bool) -> bool:
        inside = rung in (Rung.OPERATOR_RETRY, Rung.STEP_RETRY, Rung.PROCESS_REPLACE)
        if self.floor[key] > list(Rung).index(rung) or self.left.get(rung, 1) <= 0:
            return False
        if inside:
            return survivors and (rung, key) not in self.broken
        if rung in RESCHEDULED and self.restarts <= 0:
            return False
        return self._may_still(rung, key)

    def _may_still(self, rung: Rung, key: tuple[FaultClass, str]) -> bool:
        no_pod, no_spare, no_place = (
            (other, None) in self.broken
            for other in (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE)
        )
        if rung is Rung.JOB_RESCHEDULE_ISOLATED:
            return not (no_pod or no_spare)
        if rung is Rung.JOB_RESCHEDULE:
            lacking = no_spare or (no_pod and no_place)
            return self.in_a_row[key[0]] < 3 and (
                self.policy.allow_without_isolation or not lacking
            )
        return (rung, None) not in self.broken

    def carry_out(self, rung: Rung, key: tuple[FaultClass, str], *, failed: bool) -> None:
        inside = rung in (Rung.OPERATOR_RETRY, Rung.STEP_RETRY, Rung.PROCESS_REPLACE)
        self.floor[key] = max(self.floor[key], list(Rung).index(rung))
        if failed and rung is not Rung.HANG_RESTART:
            self.broken.add((rung, key if inside else None))
        if rung in self.left and (not failed or inside or rung is Rung.HANG_RESTART):
            self.left[rung] -= 1
        if rung in RESCHEDULED and (not failed or rung is Rung.JOB_RESCHEDULE):
            self.restarts -= 1
        if key[0] in (FaultClass.NODE_LOST, FaultClass.LINK_DOWN):
            self.in_a_row.clear()
        elif rung is Rung.JOB_RESCHEDULE and not failed:
            self.in_a_row[key[0]] += 1


class Ladder(RuleBasedStateMachine):
    """A run that meets faults, recovers or not, and sometimes gets on."""

    @initialize(
        policy=st.builds(
            Policy,
            max_restarts=st.integers(1, 5),
            in_place_retries=st.integers(1, 3),
            pod_retries=st.integers(0, 2),
            allow_without_isolation=st.booleans(),
            operator_retry=st.just(True),
        )
    )
    def begin(self, policy: Policy) -> None:
        self.policy = policy
        self.model = Model(policy)
        self.history: list[Recovery] = []
        self.step = 0

    @rule(
        fault_class=st.sampled_from(
            [
                FaultClass.NATIVE_CRASH,
                FaultClass.LINK_DOWN,
                FaultClass.NODE_LOST,
                FaultClass.HANG,
                FaultClass.UNKNOWN,
            ]
        ),
        node=st.sampled_from(NODES),
        survivors=st.booleans(),
        outcome=st.sampled_from(["again", "again", "failed", "progressed"]),
    )
    def meet(self, fault_class: FaultClass, node: str, outcome: str, **words: Any) -> None:
        self.step += 1
        met = Fault(fault_class, 0.0, "evidence", node=node, rank=0, step=self.step)
        decision = decide(
            met,
            now_s=0.0,
            history=self.history,
            supported=frozenset(Rung),
            policy=self.policy,
            **words,
        )
        assert decision.rung is self.model.expected(fault_class, node, **words)
        if decision.rung is Rung.STOP:
            self.history, self.model = [], Model(self.policy)  # a person starts it again
            return
        failed, progressed = outcome == "failed", outcome == "progressed"
        self.history.append(Recovery(met, decision.rung, progressed, failed=failed))
        self.model.carry_out(decision.rung, (fault_class, node), failed=failed)
        if progressed:
            self.model.progress()


TestLadder = Ladder.TestCase
TestLadder.settings = settings(max_examples=150, stateful_step_count=40)
