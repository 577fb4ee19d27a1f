"""Records and events of runs, from which tests of what is shown of a run make its history."""

from __future__ import annotations

from typing import Any

from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import (
    AlertCleared,
    AlertKind,
    AlertRaised,
    BatchSkipped,
    CheckpointDamaged,
    LedgerEvent,
    ProgramNotice,
)
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptEventRecorded,
    AttemptStarted,
    DecisionMade,
    FirstStep,
    Member,
    PlacementCreated,
    RunCreated,
    SupervisorAcquired,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import LastSave, PauseBegan, PauseEnded, RecoveryBegan
from perdure.training.recovery.protocol import RecoveryEnded as Ended
from perdure.training.recovery.repair import SkippedBatch
from perdure.training.recovery.rungs import Decision, Rung

NOW: dict[str, Any] = {"at_s": 0.0, "epoch": 1}
LINK = Fault(
    fault_class=FaultClass.LINK_DOWN, at_s=10.0, evidence="EI0006", node="node-1",
    rank=3, step=14,
)  # fmt: skip
CRASH = Fault(
    fault_class=FaultClass.NATIVE_CRASH, at_s=30.0, evidence="SIGKILL", node="node-0", rank=1,
    step=40,
)  # fmt: skip


def reason_of(fault: Fault, rung: Rung) -> str:
    """As the ladder words it where no cheaper rung was passed over."""
    return f"{fault.fault_class} at {fault.where}: {rung}"


def began(number: int, rung: Rung = Rung.STEP_RETRY, fault: Fault = LINK) -> RecoveryBegan:
    """The beginning of a recovery inside the processes, in a generation of its number."""
    return RecoveryBegan(
        at_s=fault.at_s, number=number, generation=number, fault=fault,
        decision=Decision(rung, None, reason_of(fault, rung)),
    )  # fmt: skip


def ended(number: int, step: int | None = 14, **changes: Any) -> Ended:
    """The end of a recovery, which succeeded and took a second."""
    fields: dict[str, Any] = {"at_s": LINK.at_s + 1.0, "succeeded": True, **changes}
    return Ended(number=number, generation=number + 1, step=step, **fields)


LINK_BEGAN = began(1)
LINK_RECOVERED = ended(1, at_s=10.6, repaired=(3,), duration_s=0.625)
CRASH_BEGAN = RecoveryBegan(
    at_s=30.0, number=2, generation=2, fault=CRASH,
    decision=Decision(Rung.PROCESS_REPLACE, None, "one died", ("step_retry: switched off",)),
)  # fmt: skip
CRASH_FAILED = ended(
    2, None, at_s=31.5, succeeded=False, why="no replica of rank 1", duration_s=1.5
)
SAVED = LastSave(at_s=32.0, number=3, step=40, ranks=(0, 2))
STANDS = PauseBegan(at_s=20.0, number=4, step=20)
GOES_ON = PauseEnded(at_s=25.0, number=4, step=20)
DAMAGED = CheckpointDamaged(at_s=1.0, number=1, step=40, text="rank 3's file", is_repaired=False)
SKIPPED = BatchSkipped(
    at_s=1.75, number=104,
    batch=SkippedBatch(step=13, start=96, stop=104, loss=4.5, grad_norm=None),
)  # fmt: skip
NOTICED = ProgramNotice(at_s=1.5, number=1, text="divides twice")
HOT = AlertRaised(
    at_s=40.0, number=1, point=AlertKind.MEMORY_HIGH, text="memory at 98 %", value=98.0,
    limit=95.0, node="node-1", device=3, step=20,
)  # fmt: skip
COOLED = AlertCleared(at_s=52.5, number=1)


def placed(number: int = 1, num_nodes: int = 2, *, at_s: float = 0.0) -> PlacementCreated:
    """A placement on the first nodes."""
    members = tuple(Member(index=n, node=f"node-{n}", schedule_cnt=1) for n in range(num_nodes))
    return PlacementCreated(at_s=at_s, epoch=1, placement=number, members=members, avoid=())


def started(attempt: int = 1, from_step: int = 10, *, at_s: float = 0.0) -> AttemptStarted:
    return AttemptStarted(at_s=at_s, epoch=1, placement=1, attempt=attempt, from_step=from_step)


def stepped(attempt: int, step: int, at_s: float = 0.0) -> FirstStep:
    return FirstStep(at_s=at_s, epoch=1, placement=1, attempt=attempt, step=step, stepped_s=at_s)


def over(attempt: int = 1, outcome: str = "failed", **changes: Any) -> AttemptEnded:
    """The end of an attempt, by a crash where it failed."""
    fields: dict[str, Any] = {
        **NOW, "to_step": 40, "fault": CRASH if outcome == "failed" else None, "duration_s": 5.0,
        "proc_start_cnt": {"node-0": 1, "node-1": 1},
    }  # fmt: skip
    return AttemptEnded(placement=1, attempt=attempt, outcome=outcome, **{**fields, **changes})


def decided(
    attempt: int = 1, rung: Rung = Rung.IN_PLACE_RESTART, isolate: str | None = None
) -> DecisionMade:
    decision = Decision(rung, isolate, reason_of(CRASH, rung))
    return DecisionMade(**NOW, placement=1, attempt=attempt, decision=decision)


def seen(*events: LedgerEvent, attempt: int = 1) -> list[AnyRecord]:
    """Records of an attempt's events."""
    return [
        AttemptEventRecorded(at_s=event.at_s, epoch=1, placement=1, attempt=attempt, event=event)
        for event in events
    ]


TAKEN = SupervisorAcquired(**NOW, supervisor="a", host="h", pid=1)
BEGINNING: tuple[AnyRecord, ...] = (TAKEN, RunCreated(**NOW, job={}), placed(), started())
END: tuple[AnyRecord, ...] = (over(), decided())


def history_of(*events: LedgerEvent, has_ended: bool = False) -> RunHistory:
    """The history of a run of one attempt that these were noted in."""
    return replay([*BEGINNING, *seen(*events), *(END if has_ended else ())])


def failed(
    fault: Fault,
    decision: Decision,
    *events: LedgerEvent,
    number: int = 1,
    runners_up: tuple[Fault, ...] = (),
) -> AttemptView:
    """An attempt of the first placement that a fault ended, with the decision about it."""
    end = over(number, to_step=fault.step, fault=fault, runners_up=runners_up, proc_start_cnt={})
    return AttemptView(started(number, 0), (), ended=end, decision=decision, events=events)
