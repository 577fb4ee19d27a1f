"""Notes of a coordinator and the history they make, for tests of what people are shown."""

from __future__ import annotations

from training.journal.events import (
    AlertCleared,
    AlertRaised,
    CheckpointDamaged,
    HealthPoint,
    LedgerEvent,
)
from training.journal.history import AttemptView, RunHistory, replay
from training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptStarted,
    Decided,
    EventSeen,
    Member,
    Placed,
    RunCreated,
    SupervisorTook,
)
from training.recovery.decision import Decision
from training.recovery.events import LastSave, PauseBegan, PauseEnded, RecoveryBegan
from training.recovery.events import RecoveryEnded as Ended
from training.recovery.faults import Fault, FaultClass
from training.recovery.rungs import Rung

NOW = {"at_s": 0.0, "epoch": 1}
KEY = {"placement": 1, "attempt": 1}
LINK = Fault(
    fault_class=FaultClass.LINK_DOWN, at_s=10.0, evidence="EI0006", node="node-1",
    rank=3, step=14,
)  # fmt: skip
CRASH = Fault(
    fault_class=FaultClass.NATIVE_CRASH, at_s=30.0, evidence="SIGKILL", node="node-0", rank=1,
    step=40,
)  # fmt: skip
LINK_BEGAN = RecoveryBegan(
    at_s=10.0,
    number=1,
    generation=1,
    fault=LINK,
    decision=Decision(Rung.STEP_RETRY, None, "link_down is recovered"),
)
LINK_MENDED = Ended(
    at_s=10.6, number=1, generation=2, succeeded=True, step=14, repaired=(3,), duration_s=0.625
)
CRASH_BEGAN = RecoveryBegan(
    at_s=30.0, number=2, generation=2, fault=CRASH,
    decision=Decision(Rung.PROCESS_REPLACE, None, "one died", ("step_retry: switched off",)),
)  # fmt: skip
CRASH_FAILED = Ended(
    at_s=31.5, number=2, generation=2, succeeded=False, why="no replica of rank 1", duration_s=1.5
)
SAVED = LastSave(at_s=32.0, number=3, step=40, ranks=(0, 2))
STANDS = PauseBegan(at_s=20.0, number=4, step=20)
GOES_ON = PauseEnded(at_s=25.0, number=4, step=20)
DAMAGED = CheckpointDamaged(at_s=1.0, number=1, step=40, text="rank 3's file", is_repaired=False)
HOT = AlertRaised(
    at_s=40.0, number=1, point=HealthPoint.MEMORY_HIGH, text="memory at 98 %", value=98.0,
    limit=95.0, node="node-1", device=3, step=20,
)  # fmt: skip
COOLED = AlertCleared(at_s=52.5, number=1)

BEGINNING: tuple[AnyRecord, ...] = (
    SupervisorTook(**NOW, supervisor="a", host="h", pid=1),
    RunCreated(**NOW, job={}),
    Placed(
        **NOW,
        placement=1,
        members=(
            Member(index=0, node="node-0", schedule_cnt=1),
            Member(index=1, node="node-1", schedule_cnt=1),
        ),
        avoid=(),
    ),
    AttemptStarted(**NOW, **KEY, from_step=10),
)
END: tuple[AnyRecord, ...] = (
    AttemptEnded(
        **NOW, **KEY, outcome="failed", to_step=40, fault=CRASH, duration_s=5.0,
        proc_start_cnt={"node-0": 1, "node-1": 1},
    ),
    Decided(**NOW, **KEY, decision=Decision(Rung.IN_PLACE_RESTART, None, "because")),
)  # fmt: skip


def seen(*events: LedgerEvent) -> list[AnyRecord]:
    """Records of the first attempt's events."""
    return [EventSeen(**NOW, **KEY, event=event) for event in events]


def history_of(*events: LedgerEvent, ended: bool = False) -> RunHistory:
    """The history of a run of one attempt that these were noted in."""
    return replay([*BEGINNING, *seen(*events), *(END if ended else ())])


def failed(
    fault: Fault,
    decision: Decision,
    *events: LedgerEvent,
    number: int = 1,
    runners_up: tuple[Fault, ...] = (),
) -> AttemptView:
    """An attempt of the first placement that a fault ended, with the decision about it."""
    key = {"placement": 1, "attempt": number}
    ended = AttemptEnded(
        **NOW, **key, outcome="failed", to_step=fault.step, fault=fault, runners_up=runners_up,
        duration_s=5.0, proc_start_cnt={},
    )  # fmt: skip
    started = AttemptStarted(**NOW, **key, from_step=0)
    return AttemptView(started, (), ended=ended, decision=decision, events=events)
