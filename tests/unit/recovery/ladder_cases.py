"""Faults, histories and runs that the tests of the ladder share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from training.recovery.faults import Fault, FaultClass, RecoverableBy
from training.recovery.ladder import (
    Capacity,
    Decision,
    Policy,
    Recovery,
    Rung,
    Severity,
    decide,
)

ALL = frozenset(Rung)
HOUR_S = 3600.0
CHIP_CODE = "80E01801"  # level RestartBusiness
RESET_CODE = "80E18404"  # level RestartNPU
SEPARATE_CODE = "80E18402"  # level SeparateNPU
USER_CODE = "80C98002"


def fault(fault_class: FaultClass, *, at_s: float = 0.0, **where: Any) -> Fault:
    return Fault(fault_class, at_s, "evidence", **where)


def choose(
    given_fault: Fault,
    *history: Recovery,
    supported: frozenset[Rung] = ALL,
    now_s: float = 0.0,
    survivors: bool = False,
    severity: Severity | None = None,
    capacity: Capacity | None = None,
    **policy: Any,
) -> Decision:
    return decide(
        given_fault,
        now_s=now_s,
        history=history,
        supported=supported,
        policy=Policy(**policy),
        survivors=survivors,
        severity=severity,
        capacity=capacity,
    )


def after(given_fault: Fault, *rungs: Rung, progressed: bool = False) -> tuple[Recovery, ...]:
    return tuple(Recovery(given_fault, rung, progressed=progressed) for rung in rungs)


def failing(given_fault: Fault, rung: Rung) -> Recovery:
    return Recovery(given_fault, rung, progressed=False, failed=True)


CRASH = fault(FaultClass.NATIVE_CRASH, node="node-1", rank=3, device=1, code="SIGKILL", step=40)
NODE = fault(FaultClass.NODE_LOST, node="node-1", code="NODE_LOST")
HANG = fault(FaultClass.HANG, node="node-0", rank=0)
UNKNOWN = fault(FaultClass.UNKNOWN, node="node-0", rank=0)
LINK = fault(FaultClass.LINK_DOWN, node="node-0", rank=2, device=2, step=40)
UCE = fault(
    FaultClass.DEVICE_MEMORY_ERROR, node="node-0", rank=2, device=2, code=CHIP_CODE, step=40
)
ABNORMAL = fault(FaultClass.NUMERIC_ANOMALY, node="node-0", rank=2, step=40)

# The classes with the most rules come more often.
FAULTS = st.builds(
    Fault,
    st.sampled_from([*FaultClass, *[FaultClass.NUMERIC_ANOMALY, FaultClass.UNKNOWN] * 4]),
    st.just(0.0),
    st.just("evidence"),
    node=st.sampled_from(["node-0", "node-1", None]),
    rank=st.sampled_from([0, None]),
    device=st.sampled_from([0, 1, None]),
    code=st.sampled_from([None, "SIGKILL", CHIP_CODE, RESET_CODE, SEPARATE_CODE, USER_CODE]),
    step=st.sampled_from([None, 10, 20]),
    recoverable_by=st.sampled_from([None, None, *RecoverableBy]),
)
POLICY_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_restarts": st.integers(1, 6),
    "in_place": st.booleans(),
    "in_place_retries": st.integers(1, 4),
    "unconditional": st.booleans(),
    "hang": st.booleans(),
    "pod_retries": st.integers(0, 3),
    "allow_without_isolation": st.booleans(),
    "operator_retry": st.booleans(),
    "step_retry": st.booleans(),
    "process_replace": st.booleans(),
    "end_of_life_checkpoint": st.booleans(),
    "numeric_retry": st.booleans(),
    "mindcluster_frequency": st.booleans(),
}
POLICIES = st.builds(Policy, **POLICY_FIELDS)
SUPPORTED = st.one_of(st.just(ALL), st.sets(st.sampled_from(Rung)).map(frozenset))
SEVERITIES = st.sampled_from([None, *Severity])
CAPACITIES = st.one_of(
    st.none(), st.builds(Capacity, healthy=st.integers(0, 4), needed=st.integers(1, 3))
)


@dataclass(frozen=True)
class Asked:
    """One question to the ladder and its answer."""

    fault: Fault
    now_s: float
    history: tuple[Recovery, ...]
    supported: frozenset[Rung]
    policy: Policy
    survivors: bool
    severity: Severity | None
    capacity: Capacity | None
    decision: Decision

    def again(self, **other: Any) -> Decision:
        """The answer to nearly the same question."""
        words = {
            name: getattr(self, name)
            for name in (
                "now_s",
                "history",
                "supported",
                "policy",
                "survivors",
                "severity",
                "capacity",
            )
        }
        return decide(self.fault, **{**words, **other})

    @property
    def row(self) -> tuple[Recovery, ...]:
        """Recoveries since the last progress, but for those that were cut short."""
        last = max((i for i, past in enumerate(self.history) if past.progressed), default=-1)
        return tuple(past for past in self.history[last + 1 :] if not past.cut_short)


def ask(met: Fault, history: tuple[Recovery, ...], **words: Any) -> Asked:
    """Ask the ladder and keep the question with its answer."""
    decision = decide(met, history=history, **words)
    return Asked(fault=met, history=history, decision=decision, **words)


@st.composite
def runs(draw: st.DrawFn) -> list[Asked]:
    """A run of up to a dozen faults, few of them different, each answered as the ladder says."""
    words = {"policy": draw(POLICIES), "supported": draw(SUPPORTED)}
    pool = draw(st.lists(FAULTS, min_size=1, max_size=3))
    history: tuple[Recovery, ...] = ()
    asked: list[Asked] = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, 12))):
        now_s += draw(st.sampled_from([60.0, 9 * HOUR_S]))
        met = replace(draw(st.sampled_from(pool)), at_s=now_s)
        situation = {
            "now_s": now_s,
            "survivors": draw(st.booleans()),
            "severity": draw(SEVERITIES),
            "capacity": draw(CAPACITIES),
        }
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
        severity=draw(SEVERITIES),
        capacity=draw(CAPACITIES),
    )
