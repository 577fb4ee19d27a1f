"""Chooses rungs while processes of the attempt live: the ladder, and what it has to remember.

Pure: the clock is passed in. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from training.recovery.decision import Decision, Recovery
from training.recovery.faults import Fault, FaultClass
from training.recovery.ladder import decide
from training.recovery.protocol import WorkerFault, WorkerFaultKind
from training.recovery.rungs import Policy, Rung

CLASS_OF: Mapping[WorkerFaultKind, FaultClass] = {
    WorkerFaultKind.CONNECTION: FaultClass.LINK_DOWN,
    WorkerFaultKind.COLLECTIVE: FaultClass.COLLECTIVE_TIMEOUT,
    WorkerFaultKind.MEMORY: FaultClass.DEVICE_MEMORY_ERROR,
    WorkerFaultKind.NUMERIC: FaultClass.NUMERIC_ANOMALY,
    WorkerFaultKind.REPAIR: FaultClass.COLLECTIVE_TIMEOUT,
}


_NEEDS_THE_PROCESS = frozenset({Rung.OPERATOR_RETRY, Rung.STEP_RETRY})


@dataclass(slots=True)
class InProcessDecider:
    """Chooses what answers faults that processes of the attempt outlive.

    Attributes:
        policy: of the job.
        supported: rungs that engine and program can do.
        past: recoveries of the run so far, oldest first.
    """

    policy: Policy
    supported: frozenset[Rung]
    past: list[Recovery] = field(default_factory=list)
    _num_before: int = field(init=False)

    def __post_init__(self) -> None:
        """What is known at first is of other attempts."""
        self._num_before = len(self.past)

    def decide(
        self,
        fault: Fault,
        *,
        now_s: float,
        is_dead: bool = False,
        is_finite: bool = True,
        can_reconnect: bool = True,
    ) -> Decision:
        """The cheapest rung that answers the fault while processes live.

        Args:
            fault: what is to be answered.
            now_s: the time.
            is_dead: the process that it is about has ended, and can do nothing again.
            is_finite: loss and norm are numbers; nothing else is ever accepted.
            can_reconnect: the operations that were cut short are kept, and no rank has left the
                step.
        """
        lacking = frozenset() if can_reconnect else frozenset({Rung.OPERATOR_RETRY})
        lacking |= _NEEDS_THE_PROCESS if is_dead else frozenset()
        decision = self._ask(fault, now_s=now_s, lacking=lacking)
        if decision.accept_abnormal and not is_finite:
            self.began(fault, decision.rung)
            self.failed()
            decision = self._ask(fault, now_s=now_s, lacking=lacking)
        return decision

    def _ask(self, fault: Fault, *, now_s: float, lacking: frozenset[Rung]) -> Decision:
        return decide(
            fault,
            now_s=now_s,
            history=self.past,
            supported=self.supported - lacking,
            policy=self.policy,
            survivors=True,
        )

    def began(self, fault: Fault, rung: Rung) -> None:
        """A recovery starts."""
        self.past.append(Recovery(fault, rung, progressed=False))

    def failed(self) -> None:
        """The last recovery failed."""
        self.past[-1] = replace(self.past[-1], failed=True)

    def corrected(self, was: Fault, fault: Fault) -> None:
        """More is known of a fault that a recovery answers."""
        self.past = [replace(one, fault=fault) if one.fault is was else one for one in self.past]

    def committed(self, step: int) -> None:
        """A checkpoint was committed: recoveries before its step was trained are free.

        Decided by steps: a save from before a fault may be committed after it. The attempts before
        this one may have been further; whatever this one commits is new.
        """
        for number, one in enumerate(self.past):
            is_older = one.fault.step is None or one.fault.step < step
            if number < self._num_before or is_older:
                self.past[number] = replace(one, progressed=True)


def fault_of_report(report: WorkerFault, *, reported_by: int, nodes: Mapping[int, str]) -> Fault:
    """The fault that a living worker reports.

    Args:
        report: all ranks report an abnormal step, which one of them made, or none.
        reported_by: global rank.
        nodes: by rank, its node.
    """
    is_numeric = report.kind is WorkerFaultKind.NUMERIC
    rank = report.culprit if is_numeric else reported_by
    return Fault(
        CLASS_OF[report.kind],
        report.at_s,
        report.text,
        node=nodes.get(rank) if rank is not None else None,
        rank=rank,
        device=device_of(rank, nodes),
        code=report.code,
        step=report.step,
    )


def device_of(rank: int | None, nodes: Mapping[int, str]) -> int | None:
    """Which device of its node a rank computes on, None where its node is not known.

    Args:
        rank: global rank, None for none in particular.
        nodes: by rank, its node.
    """
    if rank is None or rank not in nodes:
        return None
    return sorted(one for one, node in nodes.items() if node == nodes[rank]).index(rank)
