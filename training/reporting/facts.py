"""Facts of a run as documents: faults, decisions, recoveries and alerts, for events and scripts.

Each model is made from the ledger in one place, and every reader (events, `perdure status --json`,
terminals) takes it from here. Times are seconds since the epoch, durations seconds, steps
completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.journal.attempt_view import AttemptView, InProcessRecovery
from perdure.training.journal.events import AlertCleared, AlertKind, AlertRaised
from perdure.training.recovery.fault_names import name_fault
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.rows import outcome_of

ENDED_ATTEMPT = "ended the attempt"


class EventFacts(FrozenModel):
    """Facts that an event of the run carries."""

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of the event."""
        return self.model_dump(mode="json")


class FaultFacts(EventFacts):
    """A fault of an attempt, with the answer to it."""

    NOT_IN_EVENT: ClassVar = frozenset({"at_s", "where", "rung", "outcome"})

    at_s: float = Field(description="time of the first symptom")
    fault_class: FaultClass
    name: str = Field("", description="of the class in plain words")
    name_zh: str = Field("", description="of the class in Chinese")
    title: str = Field("", description="of the code in its code book; empty if it has none")
    evidence: str
    where: str = Field(description="rank and node, for people")
    node: str | None
    rank: int | None
    device: int | None
    code: str | None
    step: int | None = Field(description="last completed step; null if unknown")
    recoverable_by: RecoverableBy | None
    user_fault: bool | None
    hardware_fault: bool | None
    placement: int
    attempt: int
    rung: Rung | None = Field(None, description="recovery action; null while undecided")
    outcome: str = Field("", description="result of the recovery, or that the attempt ended")

    @classmethod
    def of(
        cls, view: AttemptView, fault: Fault, *, rung: Rung | None = None, outcome: str = ""
    ) -> Self:
        """The facts of a fault in this attempt."""
        placement, attempt = view.key
        name = name_fault(fault)
        return cls(
            name=name.english,
            name_zh=name.chinese,
            title=name.title,
            at_s=fault.at_s,
            placement=placement,
            attempt=attempt,
            fault_class=fault.fault_class,
            evidence=fault.evidence,
            where=fault.where,
            node=fault.node,
            rank=fault.rank,
            device=fault.device,
            code=fault.code,
            step=fault.step,
            recoverable_by=fault.recoverable_by,
            user_fault=fault.user_fault,
            hardware_fault=fault.hardware_fault,
            rung=rung,
            outcome=outcome,
        )

    @classmethod
    def of_attempt(cls, view: AttemptView) -> Iterator[Self]:
        """The faults inside the processes of an attempt in order, then the one that ended it."""
        for recovery in view.recoveries:
            began, outcome = recovery.began, outcome_of(view, recovery)
            yield cls.of(view, began.fault, rung=began.decision.rung, outcome=outcome)
        if view.ended is not None and view.ended.fault is not None:
            rung = view.decision.rung if view.decision is not None else None
            yield cls.of(view, view.ended.fault, rung=rung, outcome=ENDED_ATTEMPT)

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of the event `perdure.fault`; the answer is an event of its own."""
        return self.model_dump(mode="json", exclude=set(self.NOT_IN_EVENT))


class DecisionFacts(EventFacts):
    """The decision about an attempt that failed."""

    fault_class: FaultClass
    node: str | None
    step: int | None
    recoverable_by: RecoverableBy | None
    rung: Rung
    reason: str
    isolate: str | None
    placement: int
    attempt: int

    @classmethod
    def of(cls, view: AttemptView) -> Self:
        """The decision about a failed attempt."""
        assert view.ended is not None  # noqa: S101 the caller knows that it failed
        assert view.ended.fault is not None  # noqa: S101 a failed attempt has a fault
        assert view.decision is not None  # noqa: S101 the caller knows that it was decided
        fault, decision, (placement, attempt) = view.ended.fault, view.decision, view.key
        return cls(
            fault_class=fault.fault_class,
            node=fault.node,
            step=fault.step,
            recoverable_by=fault.recoverable_by,
            rung=decision.rung,
            reason=decision.reason,
            isolate=decision.isolate,
            placement=placement,
            attempt=attempt,
        )


class RecoveryFacts(EventFacts):
    """A recovery inside the processes of an attempt."""

    placement: int
    attempt: int
    number: int = Field(description="number of the recovery in its attempt, from 1")
    generation: int = Field(description="generation of process groups that the fault ended")
    fault_class: FaultClass
    evidence: str
    node: str | None
    rank: int | None
    rung: Rung
    reason: str
    step: int | None = Field(description="completed steps that training continues from")
    steps_lost: int | None = Field(description="completed steps that are repeated")
    duration_s: float | None
    replaced: tuple[int, ...] = Field(description="ranks that got a new process")
    repaired: tuple[int, ...] = Field(description="ranks whose state came from a replica")
    succeeded: bool
    sub_healthy: bool = Field(description="whether its success leaves the run sub-healthy")
    outcome: str
    why: str = Field(description="why it failed; empty otherwise")

    @classmethod
    def of(cls, view: AttemptView, recovery: InProcessRecovery) -> Self:
        """The facts of a recovery in this attempt."""
        began, ended = recovery.began, recovery.ended
        fault, (placement, attempt) = began.fault, view.key
        return cls(
            placement=placement,
            attempt=attempt,
            number=began.number,
            generation=began.generation,
            fault_class=fault.fault_class,
            evidence=fault.evidence,
            node=fault.node,
            rank=fault.rank,
            rung=began.decision.rung,
            reason=began.decision.reason,
            step=ended.step if ended is not None and ended.step is not None else fault.step,
            steps_lost=ended.steps_lost if ended is not None else None,
            duration_s=round(ended.duration_s, 2) if ended is not None else None,
            replaced=ended.replaced if ended is not None else (),
            repaired=ended.repaired if ended is not None else (),
            succeeded=recovery.succeeded,
            sub_healthy=began.decision.sub_healthy,
            outcome=outcome_of(view, recovery),
            why=ended.why if ended is not None else "",
        )


class AlertFacts(EventFacts):
    """An alert when it was raised or cleared; without its cause where the ledger lacks that."""

    at_s: float
    number: int
    point: AlertKind | None = None
    text: str = ""
    value: float = 0.0
    limit: float = 0.0
    node: str | None = None
    rank: int | None = None
    device: int | None = None
    step: int | None = None
    placement: int
    attempt: int

    @classmethod
    def of(cls, view: AttemptView, event: AlertRaised | AlertCleared) -> Self:
        """The facts of an alert in this attempt."""
        placement, attempt = view.key
        raised = next((a.began for a in view.alerts if a.began.number == event.number), None)
        exclude = {"kind", "number", "at_s"}
        cause = raised.model_dump(exclude=exclude) if raised is not None else {}
        return cls(
            at_s=event.at_s, number=event.number, placement=placement, attempt=attempt, **cause
        )

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of the events `perdure.alert` and `perdure.alert_cleared`."""
        return self.model_dump(mode="json", exclude_unset=True)
