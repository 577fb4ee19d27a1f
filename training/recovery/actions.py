"""What an attempt orders and records, in the order in which it is to be carried out.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import (
    AttemptGivenUp,
    LastSave,
    LastSaved,
    RecoveryBegan,
    RecoveryEnded,
    RecoveryEvent,
    ToMember,
)
from perdure.training.recovery.repair import RankReport, RepairMode, RepairPlan, steps_lost
from perdure.training.recovery.rungs import Decision


@dataclass(frozen=True, slots=True)
class ToRank:
    """A message for one worker."""

    rank: int
    message: ToMember


@dataclass(frozen=True, slots=True)
class ToAgent:
    """A message for the agent of a rank's node; `rank` None: for every agent."""

    rank: int | None
    message: ToMember


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event for the attempt's log, to be written before the actions after it."""

    event: RecoveryEvent


@dataclass(frozen=True, slots=True)
class AbnormalNorm:
    """A step is abnormal: its norm at first sight, then also that after its repetition."""

    step: int
    norms: tuple[float, ...]


Action = ToRank | ToAgent | LogEvent | AbnormalNorm


@dataclass(slots=True)
class Outbox:
    """Actions of one stimulus in their order, and the numbers of what is recorded.

    Attributes:
        actions: that have not been taken yet.
        last_number: of a recovery, pause or last save.
    """

    actions: list[Action] = field(default_factory=list)
    last_number: int = 0

    def add(self, action: Action) -> None:
        """Put one more action after the others."""
        self.actions.append(action)

    def record(self, event: RecoveryEvent) -> None:
        """Put one more event for the log after the other actions."""
        self.add(LogEvent(event))

    def record_end(self, fault: Fault, why: str, *, now_s: float) -> None:
        """Record the fault for which all processes end: what becomes of them may hide it."""
        number = self.next_number()
        self.record(AttemptGivenUp(at_s=now_s, number=number, fault=fault, why=why))

    def record_save_failed(self, why: str, *, now_s: float) -> None:
        """Record that the end-of-life checkpoint was not written."""
        number = self.next_number()
        self.record(LastSave(at_s=now_s, number=number, step=None, why=why))

    def resume(self, began: RecoveryBegan) -> None:
        """Record once more what began elsewhere; what is recorded next has a later number."""
        self.last_number = began.number
        self.record(began)

    def next_number(self) -> int:
        """Of a recovery, pause or last save, from 1."""
        self.last_number += 1
        return self.last_number

    def take(self) -> list[Action]:
        """All actions; each is handed out once."""
        actions, self.actions = self.actions, []
        return actions


@dataclass(slots=True)
class Recoveries:
    """Recoveries that have begun and not ended; a fault in the middle of one begins another.

    Attributes:
        open: in the order in which they began.
    """

    open: list[RecoveryBegan] = field(default_factory=list)

    @property
    def newest_fault(self) -> Fault:
        """What the last one that began answers."""
        return self.open[-1].fault

    def is_moving(self, node: str) -> bool:
        """Whether one is open that leaves this node."""
        return any(began.moved and began.fault.node == node for began in self.open)

    @property
    def newest_replaced(self) -> frozenset[int]:
        """Ranks that get a new process by the last one that began."""
        return self.open[-1].replaced

    def move_to_newest(self, rank: int) -> None:
        """Count what was to replace a rank as the newest: it fails, and cuts the others short."""
        self.open.sort(key=lambda began: rank in began.replaced)  # stable: the others as they were

    def begin(self, began: RecoveryBegan) -> None:
        """Add one whose decision is about to be carried out."""
        self.open.append(began)

    def locate(self, step: int) -> list[tuple[Fault, Fault]]:
        """Put deaths at the step in which they happened; a dead rank itself reported none.

        Args:
            step: that the slowest of the others has completed.

        Returns:
            The faults whose step is now known, each as it was and as it is.
        """
        corrections = []
        for index, began in enumerate(self.open):
            # An abnormal step was reported with its number; since then ranks may have gone back.
            is_known = began.fault.fault_class is FaultClass.NUMERIC_ANOMALY
            if began.replaced and not is_known and began.fault.step != step:
                fault = replace(began.fault, step=step)
                self.open[index] = began.model_copy(update={"fault": fault})
                corrections.append((began.fault, fault))
        return corrections

    def end(
        self,
        plan: RepairPlan | None,
        reports: Mapping[int, RankReport],
        *,
        generation: int,
        now_s: float,
        why_not: str | None = None,
    ) -> list[RecoveryEnded]:
        """Close all of them: together they have led to one plan, or to none.

        Args:
            plan: that was carried out, None without one.
            reports: that it was made from, by rank.
            generation: that training goes on in.
            now_s: when.
            why_not: why training does not go on, None when it does.
        """
        closed, self.open = self.open, []
        replaced = {rank for began in closed for rank in began.replaced}
        moved = {move.target for move in plan.moves} if plan is not None else set()
        return [
            RecoveryEnded(
                at_s=now_s,
                number=began.number,
                generation=generation,
                succeeded=why_not is None,
                why=why_not or "",
                step=plan.step if plan is not None else None,
                replaced=tuple(sorted(began.replaced)),
                repaired=tuple(sorted(moved - replaced)),
                steps_lost=steps_lost(reports, plan) if plan is not None else 0,
                duration_s=now_s - began.fault.at_s,
                cut_short=why_not is not None and began is not closed[-1],
            )
            for began in closed
        ]


def merge_modes(unfinished: RepairMode, requested: RepairMode) -> RepairMode:
    """What a generation is for that begins before all ranks train in the one before.

    A rank that went back to a snapshot, or accepted a gradient, has another state than those
    that have not yet: all carry out what was decided. Only the end of the processes comes before
    it.

    Args:
        unfinished: what the generation before was for; TRAIN when all ranks train.
        requested: what the fault asks for that cut it short.
    """
    if requested is RepairMode.LAST_SAVE or unfinished is RepairMode.TRAIN:
        return requested
    return unfinished


def mode_of(decision: Decision, fault: Fault) -> RepairMode:
    """What the generation is for that a decision begins."""
    if decision.accept_abnormal:
        return RepairMode.ACCEPT
    is_numeric = fault.fault_class is FaultClass.NUMERIC_ANOMALY
    return RepairMode.ROLL_BACK if is_numeric else RepairMode.TRAIN


def last_save_of(
    plan: RepairPlan,
    saved: Mapping[int, LastSaved],
    dead: Collection[int],
    *,
    outbox: Outbox,
    now_s: float,
) -> LastSave | None:
    """What became of the end-of-life checkpoint, None while the survivors write it.

    Args:
        plan: that names the savers.
        saved: what ranks have reported, by rank.
        dead: ranks whose processes have ended.
        outbox: gives the event its number.
        now_s: when.
    """
    savers = set(plan.savers)
    problems = [report.problem for report in saved.values() if report.problem]
    problems += [f"rank {rank} ended while it saved" for rank in sorted(savers & set(dead))
                 if rank not in saved]  # fmt: skip
    if not problems and not savers <= set(saved):
        return None
    return LastSave(
        at_s=now_s,
        number=outbox.next_number(),
        step=None if problems else plan.step,
        ranks=tuple(sorted(savers)),
        why=problems[0] if problems else "",
    )
