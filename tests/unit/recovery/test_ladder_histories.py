"""Random runs and random histories: no rule of the ladder is ever broken."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.recovery.chips import Severity
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy
from perdure.training.recovery.ladder_rules import RULES
from perdure.training.recovery.rungs import (
    LADDER,
    RUNGS,
    Capacity,
    Policy,
    Recovery,
    RestartCount,
    Rung,
)
from tests.unit.recovery import ladder_invariants
from tests.unit.recovery.ladder_invariants import (
    CHIP_CODE,
    HOUR_S,
    IN_PROCESS,
    ISOLATING,
    ORDER,
    RESCHEDULING,
    RESET_CODE,
    SEPARATE_CODE,
    USER_CODE,
    Asked,
    ask,
    is_no_nodes,
)

INVARIANTS: Mapping[str, Callable[[Asked], bool]] = {
    name: getattr(ladder_invariants, name) for name in RULES
}
ALL = frozenset(Rung)
NODES = ("node-0", "node-1", "node-2")
PLAIN = (
    FaultClass.NATIVE_CRASH,
    FaultClass.LINK_DOWN,
    FaultClass.NODE_LOST,
    FaultClass.HANG,
    FaultClass.UNKNOWN,
)

# The classes with the most rules come more often.
FAULTS = st.builds(
    Fault,
    st.sampled_from([*FaultClass, *[FaultClass.NUMERIC_ANOMALY, FaultClass.UNKNOWN] * 4]),
    st.just(0.0),
    st.just("evidence"),
    node=st.sampled_from([*NODES, None]),
    rank=st.sampled_from([0, None]),
    device=st.sampled_from([0, 1, None]),
    code=st.sampled_from([None, "SIGKILL", CHIP_CODE, RESET_CODE, SEPARATE_CODE, USER_CODE]),
    step=st.sampled_from([None, 10, 20]),
    recoverable_by=st.sampled_from([None, None, *RecoverableBy]),
    severity=st.sampled_from([None, None, *Severity]),
    hardware_fault=st.sampled_from([None, None, True, False]),
    num_other_nodes=st.sampled_from([0, 0, 2]),
    frame=st.sampled_from([None, None, "main (train.py)"]),
)
# Of these one that failed shows that there is no other node.
MOVING = frozenset(ISOLATING) - {Rung.NODE_REPLACE}
POLICY_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_restarts": st.integers(0, 6),
    "count": st.sampled_from(RestartCount),
    "in_place": st.booleans(),
    "in_place_retries": st.integers(1, 4),
    "unconditional": st.booleans(),
    "hang": st.booleans(),
    "pod_retries": st.integers(0, 3),
    "allow_without_isolation": st.booleans(),
    "operator_retry": st.booleans(),
    "memory_retry": st.booleans(),
    "collective_retry": st.booleans(),
    "process_replace": st.booleans(),
    "process_in_place": st.booleans(),
    "node_replace": st.booleans(),
    "pod_before_in_place": st.booleans(),
    "end_of_life_checkpoint": st.booleans(),
    "numeric_retry": st.booleans(),
    "mindcluster_frequency": st.booleans(),
}
POLICIES = st.builds(Policy, **POLICY_FIELDS)
SUPPORTED = st.one_of(st.just(ALL), st.sets(st.sampled_from(Rung)).map(frozenset))
REPLICAS = st.sampled_from([None, "no replica: 4 / 4 = 1"])
CAPACITIES = st.one_of(
    st.none(),
    st.builds(Capacity, healthy=st.one_of(st.none(), st.integers(0, 9)), needed=st.integers(1, 9)),
)


@st.composite
def runs(draw: st.DrawFn) -> list[Asked]:
    """A run of up to a dozen faults, few of them different, each answered by the ladder."""
    pool = draw(st.lists(FAULTS, min_size=1, max_size=3))
    return _answered(
        draw,
        st.sampled_from(pool),
        st.fixed_dictionaries({"capacity": CAPACITIES, "no_replica": REPLICAS}),
        most=12,
        policy=draw(POLICIES),
        supported=draw(SUPPORTED),
    )


@st.composite
def plain_runs(draw: st.DrawFn) -> list[Asked]:
    """Longer runs, of faults without a code in one step each, where every rung is supported."""
    fields = {"max_restarts": st.integers(1, 5), "in_place_retries": st.integers(1, 3)}
    fields |= {name: POLICY_FIELDS[name] for name in ("pod_retries", "allow_without_isolation")}
    policy = draw(st.builds(Policy, operator_retry=st.just(True), **fields))
    plain = st.builds(
        Fault,
        st.sampled_from(PLAIN),
        st.just(0.0),
        st.just("evidence"),
        node=st.sampled_from(NODES),
        rank=st.just(0),
    )
    nothing = st.just({"capacity": None, "no_replica": None})
    return _answered(draw, plain, nothing, most=40, fresh_steps=True, policy=policy, supported=ALL)


def _answered(
    draw: st.DrawFn,
    faults: st.SearchStrategy[Fault],
    situations: st.SearchStrategy[dict[str, Any]],
    *,
    most: int,
    fresh_steps: bool = False,
    **words: Any,
) -> list[Asked]:
    history: tuple[Recovery, ...] = ()
    asked: list[Asked] = []
    now_s = 0.0
    for number in range(draw(st.integers(1, most))):
        now_s += draw(st.sampled_from([60.0, 9 * HOUR_S]))
        met = replace(draw(faults), at_s=now_s)
        if fresh_steps:
            met = replace(met, step=number)
        situation = {**draw(situations), "now_s": now_s, "survivors": draw(st.booleans())}
        asked.append(ask(met, history, **words, **situation))
        rung = asked[-1].decision.rung
        if rung is Rung.STOP:
            break
        outcome = draw(st.sampled_from(["again", "again", "failed", "progressed"]))
        history += (Recovery(met, rung, outcome == "progressed", failed=outcome == "failed"),)
    return asked


@st.composite
def any_question(draw: st.DrawFn) -> Asked:
    """A question after any history at all, also one that no ladder would have led to."""
    pool = draw(st.lists(FAULTS, min_size=1, max_size=3))
    past = st.builds(
        Recovery,
        st.sampled_from(pool),
        st.sampled_from(Rung),
        st.sampled_from([False, False, True]),
        failed=st.sampled_from([False, False, True]),
        cut_short=st.sampled_from([False, False, True]),
    )
    return ask(
        draw(st.sampled_from(pool)),
        tuple(draw(st.lists(past, max_size=8))),
        now_s=draw(st.sampled_from([0.0, 25 * HOUR_S])),
        policy=draw(POLICIES),
        supported=draw(SUPPORTED),
        survivors=draw(st.booleans()),
        capacity=draw(CAPACITIES),
        no_replica=draw(REPLICAS),
    )


@settings(max_examples=400)
@given(runs())
def test_no_run_breaks_a_rule(asked_in_a_run):
    for asked in asked_in_a_run:
        assert [name for name, holds in INVARIANTS.items() if not holds(asked)] == [], asked


@settings(max_examples=400)
@given(runs())
def test_no_reason_claims_an_isolation_or_a_failure_that_the_run_has_not_had(asked_in_a_run):
    isolated: set[str | None] = set()
    for asked in asked_in_a_run:
        claims = " ".join(asked.decision.skipped)
        assert "isolated already" not in claims or asked.fault.node in isolated, asked
        isolated.add(asked.decision.isolate)


@settings(max_examples=600)
@given(any_question())
def test_no_history_breaks_a_rule(asked):
    assert [name for name, holds in INVARIANTS.items() if not holds(asked)] == []


def cheapest_with_a_budget(asked: Asked) -> Rung:
    """A model of the ladder for plain faults, which counts and knows no guard."""
    row, policy, key = asked.row, asked.policy, (asked.fault.fault_class, asked.fault.node)
    same = [p for p in row if (p.fault.fault_class, p.fault.node) == key]
    floor = max((ORDER.index(p.rung) for p in same), default=0)
    tried = Counter(p.rung for p in row)  # failed or not
    done = Counter(p.rung for p in row if not p.failed or p.rung is Rung.JOB_RESCHEDULE)
    broken = {p.rung for p in row if p.failed and p.fault.node == key[1]}
    broken_here = {p.rung for p in same if p.failed}
    since = itertools.takewhile(is_no_nodes, reversed(row))
    in_a_row = sum(
        p.rung is Rung.JOB_RESCHEDULE and not p.failed and p.fault.fault_class is key[0]
        for p in since
    )

    may_stay = Rung.IN_PLACE_RESTART in LADDER[asked.fault.fault_class]

    def may(rung: Rung) -> bool:  # noqa: PLR0911 one for each thing that it counts
        budget = RUNGS[rung].budget
        if ORDER.index(rung) < floor or (budget is not None and tried[rung] >= budget(policy)):
            return False
        if rung is Rung.NODE_REPLACE and (not broken.isdisjoint(MOVING) or may_stay):
            return False
        if rung in IN_PROCESS:
            return asked.survivors and rung not in broken_here
        if rung in RESCHEDULING and sum(done[r] for r in RESCHEDULING) >= policy.max_restarts:
            return False
        if rung is Rung.JOB_RESCHEDULE_ISOLATED:
            return broken.isdisjoint(MOVING)
        if rung is Rung.JOB_RESCHEDULE:
            lacks = Rung.JOB_RESCHEDULE_ISOLATED in broken or broken >= {
                Rung.POD_RESCHEDULE,
                Rung.JOB_RESCHEDULE,
            }
            return in_a_row < 3 and (policy.allow_without_isolation or not lacks)
        return rung not in broken

    return next((rung for rung in LADDER[key[0]][:-1] if may(rung)), Rung.STOP)


@settings(max_examples=300)
@given(plain_runs())
def test_a_plain_fault_is_answered_by_the_cheapest_rung_with_a_budget(asked_in_a_run):
    for asked in asked_in_a_run:
        assert asked.decision.rung is cheapest_with_a_budget(asked), asked


@given(st.data(), POLICIES, SUPPORTED)
def test_a_run_without_progress_always_stops_in_a_bounded_number_of_decisions(
    data, policy, supported
):
    history: tuple[Recovery, ...] = ()
    for count in itertools.count():
        asked = ask(
            data.draw(FAULTS),
            history,
            now_s=0.0,
            supported=supported,
            policy=policy,
            survivors=data.draw(st.booleans()),
            capacity=data.draw(CAPACITIES),
            no_replica=data.draw(REPLICAS),
        )
        rung = asked.decision.rung
        if rung is Rung.STOP:
            break
        history += (Recovery(asked.fault, rung, False, failed=data.draw(st.booleans())),)
        assert count < most_decisions(policy)


@pytest.mark.parametrize("survivors", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("fault_class", FaultClass)
def test_the_same_fault_again_and_again_stops_in_a_bounded_number_of_decisions(
    fault_class, fails, survivors
):
    policy = Policy(operator_retry=True, numeric_retry=True, pod_retries=9, max_restarts=9)
    met = Fault(fault_class, 0.0, "evidence", node="node-0", rank=0)
    history: tuple[Recovery, ...] = ()
    words = {"supported": frozenset(Rung), "policy": policy, "survivors": survivors}
    words |= {"capacity": None, "no_replica": None}
    for _ in range(most_decisions(policy) + 1):
        asked = ask(met, history, now_s=0.0, **words)
        if asked.decision.rung is Rung.STOP:
            return
        history += (Recovery(met, asked.decision.rung, False, failed=fails),)
    pytest.fail("it never stops")


def most_decisions(policy: Policy) -> int:
    """The longest row: every budget used up, and what may fail besides once for each node."""
    accepted = 3  # an abnormal step may be, after each retry
    stays = [row for rung, row in RUNGS.items() if rung not in RESCHEDULING]
    budgets = sum(row.budget(policy) for row in stays if row.budget is not None)
    nodes = len(NODES) + 1  # and none in particular
    return accepted + budgets + policy.max_restarts + len(RESCHEDULING) * nodes


@given(any_question())
def test_the_same_question_has_the_same_answer(asked):
    assert asked.again() == asked.decision
