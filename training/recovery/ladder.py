"""The recovery ladder: which rung answers a fault, and when to climb to the next.

Pure functions over frozen records: no clock, no torch, and nothing read but the tables that
come with the package. Flow, coordinator and simulator call the same `decide`: the coordinator
while processes of the attempt live on, the flow once they have ended. Times are seconds, budgets
are counts of recoveries in a row without progress, where the policy has it so; progress is a
checkpoint committed after the recovery.

Around it: rungs.py has the tables, the policy and the answer, guards.py why a rung does not
answer, ends.py when none but stop can help, ladder_rules.py the rules in words, chips.py the
fault codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from perdure.training.recovery.blame import suspicion_of_node, too_often
from perdure.training.recovery.ends import ENDS, hung_before
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass
from perdure.training.recovery.guards import (
    SETTINGS,
    SWITCHED_OFF,
    UNSUPPORTED,
    LadderInput,
    is_accepted,
    refusal,
    rungs_for,
)
from perdure.training.recovery.ladder_rules import RULES
from perdure.training.recovery.protocol import RecoveryBegan, WorkerFault, WorkerFaultKind
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    ISOLATES,
    LADDER,
    RUNGS,
    Capacity,
    Decision,
    Policy,
    Recovery,
    RestartCount,
    Rung,
)

UNWRITABLE_ADVICE = "make room there or have the folder mended, then start the run again"


def decide(  # noqa: PLR0913 all that an answer may depend on
    fault: Fault,
    *,
    now_s: float,
    history: Sequence[Recovery],
    supported: frozenset[Rung],
    policy: Policy,
    survivors: bool = False,
    capacity: Capacity | None = None,
    no_replica: str | None = None,
    no_replica_of_node: str | None = None,
) -> Decision:
    """Choose the cheapest rung that is supported and within its budget.

    Args:
        fault: what is to be answered.
        now_s: seconds since the epoch, for rules with a window.
        history: every past recovery of the run, oldest first.
        supported: rungs that the engine and the run's depth can do; STOP always counts as one.
        policy: the job's restart policy.
        survivors: whether processes of the attempt live on. Rungs inside the processes and the
            end-of-life checkpoint need some; a caller that asks after the end has none.
        capacity: nodes there are: with how many others a node is compared, and what the reason
            of a decision that isolates says; None: unknown.
        no_replica: why no other rank has the state of the one at fault, None when one may:
            rungs that would copy it are not tried.
        no_replica_of_node: why no other node has the state of one of its node's ranks.
    """
    if fault.is_doubtful:
        fault = fault.of_class(FaultClass.UNKNOWN)
    streak = _recoveries_since_progress(history)
    num_nodes = capacity.needed if capacity is not None else None
    case = LadderInput(
        fault,
        streak,
        _without_cut_short(history) if policy.count is RestartCount.EVER else streak,
        policy,
        too_often(fault, now_s=now_s, history=history, policy=policy),
        suspicion_of_node(fault, now_s=now_s, history=history, policy=policy, num_nodes=num_nodes),
        survivors,
        no_replica,
        no_replica_of_node,
        hung_before(fault, history=history, streak=streak),
    )
    return _climb(case, supported, capacity)


def _climb(case: LadderInput, supported: frozenset[Rung], capacity: Capacity | None) -> Decision:
    fault = case.fault
    if Rung.STEP_RETRY in supported and is_accepted(case):
        reason = f"{fault.fault_class}: step {fault.step} is abnormal again, accepted and recorded"
        return Decision(Rung.STEP_RETRY, None, reason, accept_abnormal=True)
    skipped: list[tuple[Rung, str]] = []
    ends = _has_nowhere_to_go(case, capacity) or any(ends_run(case) for ends_run in ENDS)
    for rung in (Rung.STOP,) if ends else rungs_for(case):
        is_supported = rung in supported or rung is Rung.STOP
        why_not = refusal(rung, case) if is_supported else UNSUPPORTED
        if why_not is None:
            return _decision(rung, case, skipped, capacity)
        skipped.append((rung, why_not))
    raise AssertionError(f"the ladder of {fault.fault_class} does not end in stop")


def _has_nowhere_to_go(case: LadderInput, capacity: Capacity | None) -> bool:
    """Whether the only nodes there are include one that takes no files."""
    if capacity is None or capacity.healthy is None or capacity.is_estimate:
        return False
    return case.fault.is_of_unwritable_node and capacity.healthy <= capacity.needed


def _decision(
    rung: Rung, case: LadderInput, skipped: Sequence[tuple[Rung, str]], capacity: Capacity | None
) -> Decision:
    isolates = rung in ISOLATES and case.may_isolate
    return Decision(
        rung,
        isolate=case.fault.node if isolates else None,
        reason=_reason(rung, case, skipped) + (_spare_text(capacity) if isolates else ""),
        skipped=tuple(f"{passed}: {why}" for passed, why in skipped),
        end_of_life_checkpoint=_saves_first(rung, case),
        sub_healthy=rung is Rung.OPERATOR_RETRY,
    )


def _saves_first(rung: Rung, case: LadderInput) -> bool:
    """Whether the survivors commit what they hold before their processes are lost."""
    return (
        case.survivors
        and case.policy.end_of_life_checkpoint
        and rung not in IN_PROCESS
        and TRAITS[case.fault.fault_class].is_worth_saving
    )


def _recoveries_since_progress(history: Sequence[Recovery]) -> Sequence[Recovery]:
    """What was tried after the last recovery that was followed by progress."""
    for index in range(len(history) - 1, -1, -1):
        if history[index].progressed:
            history = history[index + 1 :]
            break
    return _without_cut_short(history)


def _without_cut_short(history: Sequence[Recovery]) -> Sequence[Recovery]:
    return [past for past in history if not past.cut_short]


def _reason(rung: Rung, case: LadderInput, skipped: Sequence[tuple[Rung, str]]) -> str:
    fault = case.fault
    end = next((text for ends_run, text in ENDS.items() if ends_run(case)), None)
    if end is not None:
        return f"{fault.fault_class}{end(fault)}"
    if rung is Rung.STOP and fault.is_of_unwritable_node:
        why = "; ".join(f"{r}: {why}" for r, why in skipped if why != SWITCHED_OFF)
        where = f" ({why})" if why else ", and no other node is free"
        return f"{fault.fault_class}: {fault.evidence}{where}; {UNWRITABLE_ADVICE}"
    if LADDER[fault.fault_class] == (Rung.STOP,):
        return f"{fault.fault_class} is for the user to fix"
    passed = [f"{r}: {why}" for r, why in skipped if not (r in IN_PROCESS and why in SETTINGS)]
    why = f" ({'; '.join(passed)})" if passed else ""
    return f"{fault.fault_class} at {fault.where}: {rung}{why}"


def _spare_text(capacity: Capacity | None) -> str:
    if capacity is None or capacity.healthy is None:
        return ""
    if capacity.healthy > capacity.needed:
        return ""
    left = max(0, capacity.healthy - 1)
    return f"; no healthy spare: {left} of {capacity.needed} nodes left without it"


def ladder_markdown() -> str:
    """The ladder as Markdown tables: the rungs, the classes with their rungs, the rules."""
    lines = [
        "| rung | source name | what is lost | who acts | Prefect sees |",
        "|---|---|---|---|---|",
    ]
    for rung, row in RUNGS.items():
        lines.append(
            f"| `{rung}` | {row.source_name} | {row.lost} | {row.who_acts} | {row.scope} |"
        )
    lines += ["", "| fault class | rungs, in order |", "|---|---|"]
    for fault_class, rungs in LADDER.items():
        lines.append(f"| `{fault_class}` | {' -> '.join(f'`{rung}`' for rung in rungs)} |")
    lines += ["", "| rule | meaning | source |", "|---|---|---|"]
    for name, rule in RULES.items():
        lines.append(f"| {name.replace('_', ' ')} | {rule.sentence} | {rule.source} |")
    return "\n".join(lines)


CLASS_OF: Mapping[WorkerFaultKind, FaultClass] = {
    WorkerFaultKind.CONNECTION: FaultClass.LINK_DOWN,
    WorkerFaultKind.LINK: FaultClass.LINK_DOWN,
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
        num_nodes: that the job runs on, None: unknown.
        num_earlier: recoveries of the past that are of other attempts; None: all.
    """

    policy: Policy
    supported: frozenset[Rung]
    past: list[Recovery] = field(default_factory=list)
    num_nodes: int | None = None
    num_earlier: int | None = None

    def __post_init__(self) -> None:
        """Take what is known at first for that of other attempts."""
        if self.num_earlier is None:
            self.num_earlier = len(self.past)

    def decide(
        self,
        fault: Fault,
        *,
        now_s: float,
        is_dead: bool = False,
        is_finite: bool = True,
        can_reconnect: bool = True,
        no_replica: str | None = None,
        no_replica_of_node: str | None = None,
    ) -> Decision:
        """The cheapest rung that answers the fault while processes live.

        Args:
            fault: what is to be answered.
            now_s: the time.
            is_dead: the process that it is about has ended, and can do nothing again.
            is_finite: loss and norm are numbers; nothing else is ever accepted.
            can_reconnect: the operations that were cut short are kept, and no rank has left the
                step.
            no_replica: why no other rank has the state of the one at fault, None when one may.
            no_replica_of_node: why no other node has the state of one of its node's ranks.
        """
        lacking = frozenset() if can_reconnect else frozenset({Rung.OPERATOR_RETRY})
        lacking |= _NEEDS_THE_PROCESS if is_dead else frozenset()
        ask = partial(
            self._ask,
            fault,
            now_s=now_s,
            lacking=lacking,
            no_replica=no_replica,
            no_replica_of_node=no_replica_of_node,
        )
        decision = ask()
        if decision.accept_abnormal and not is_finite:
            self.began(fault, decision.rung)
            self.failed(fault)
            decision = ask()
        return decision

    def _ask(
        self,
        fault: Fault,
        *,
        now_s: float,
        lacking: frozenset[Rung],
        no_replica: str | None,
        no_replica_of_node: str | None,
    ) -> Decision:
        return decide(
            fault,
            now_s=now_s,
            history=self.past,
            supported=self.supported - lacking,
            policy=self.policy,
            survivors=True,
            capacity=Capacity(None, self.num_nodes) if self.num_nodes is not None else None,
            no_replica=no_replica,
            no_replica_of_node=no_replica_of_node,
        )

    def began(self, fault: Fault, rung: Rung) -> None:
        """A recovery starts."""
        self.past.append(Recovery(fault, rung, progressed=False))

    def resumed(self, began: RecoveryBegan) -> None:
        """One goes on that began before; it may be among those of the past already."""
        if self.past and self.past[-1].fault == began.fault:
            self.past.pop()
        self.began(began.fault, began.decision.rung)

    def failed(self, fault: Fault) -> None:
        """The newest recovery that answers this very fault failed."""
        numbers = (n for n, recovery in enumerate(self.past) if recovery.fault == fault)
        number = max(numbers, default=-1)
        self.past[number] = replace(self.past[number], failed=True)

    def corrected(self, fault: Fault, corrected: Fault) -> None:
        """More is known of a fault that a recovery answers."""
        self.past = [
            replace(recovery, fault=corrected) if recovery.fault == fault else recovery
            for recovery in self.past
        ]

    def committed(self, step: int) -> None:
        """A checkpoint was committed: recoveries before its step was trained are free.

        Decided by steps: a save from before a fault may be committed after it. The attempts before
        this one may have been further; whatever this one commits is new.
        """
        num_earlier = self.num_earlier or 0
        for number, recovery in enumerate(self.past):
            is_older = recovery.fault.step is None or recovery.fault.step < step
            if number < num_earlier or is_older:
                self.past[number] = replace(recovery, progressed=True)


def fault_of_report(report: WorkerFault, *, reported_by: int, nodes: Mapping[int, str]) -> Fault:
    """The fault that a living worker reports.

    Args:
        report: all ranks report an abnormal step, which one of them made, or none.
        reported_by: global rank.
        nodes: by rank, its node.
    """
    is_numeric = report.kind is WorkerFaultKind.NUMERIC
    # A connection breaks, too, when the process at its other end dies.
    is_bare = report.kind is WorkerFaultKind.CONNECTION and report.code is None
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
        hardware_fault=False if is_bare else None,
    )


def device_of(rank: int | None, nodes: Mapping[int, str]) -> int | None:
    """Which device of its node a rank computes on, None where its node is not known.

    Args:
        rank: global rank, None for none in particular.
        nodes: by rank, its node.
    """
    if rank is None or rank not in nodes:
        return None
    return sorted(other for other, node in nodes.items() if node == nodes[rank]).index(rank)
