"""The history of a run by its ledger: a pure fold over the records.

A supervisor has all knowledge of the past from here, so a supervisor that takes over knows as much
as its predecessor. Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from perdure.training.journal.attempt_view import AttemptView, InProcessRecovery, Pause
from perdure.training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptEventRecorded,
    AttemptStarted,
    CheckpointRecorded,
    DataReady,
    DecisionMade,
    FirstStep,
    NodeRefused,
    NodeReleased,
    PlacementCreated,
    ResumeChosen,
    RunCreated,
    RunEnded,
    RungFailed,
    RunReopened,
    SupervisorAcquired,
)
from perdure.training.recovery.faults import LOSSES, FaultClass
from perdure.training.recovery.protocol import RecoveryBegan
from perdure.training.recovery.rungs import Decision, Recovery


@dataclass(frozen=True, slots=True)
class Isolation:
    """A node that must stay out of placements.

    Attributes:
        why: the fault that it is taken to have caused, or the check that it failed.
        at_s: begin of the isolation.
        fault_class: class of that fault; None: there was none.
    """

    node: str
    why: str
    at_s: float
    fault_class: FaultClass | None = None


@dataclass(slots=True)
class RunHistory:
    """The past of a run.

    Attributes:
        epoch: epoch of the newest supervisor, 0 before the first.
        flow_runs: ids of the flow runs that supervised it, in the order of their first times.
        job: the job document at the run's creation, None for an empty ledger.
        placements: every placement, oldest first.
        attempts: every attempt, oldest first.
        ended: end of the run, None while it lasts.
        budgets_from: index of the first attempt that counts: the user who starts an ended run
            again has seen the attempts before it.
        updated_s: time of the newest record.
        advanced_s: time of the newest record that a mere start would not have written.
        unattended: intervals from the last record of a supervisor to the next supervisor.
        ends: times of all ends of the run.
        isolations: nodes that decisions isolated; a node may be there several times.
        refusals: nodes that failed their checks, since the last end of the run.
        released: time of the last release by a user, by node.
        waits: intervals of waits for free nodes.
    """

    epoch: int = 0
    job: dict[str, Any] | None = None
    created_s: float = 0.0
    supervisor: SupervisorAcquired | None = None
    flow_runs: list[str] = field(default_factory=list)
    data: list[DataReady] = field(default_factory=list)
    placements: list[PlacementCreated] = field(default_factory=list)
    attempts: list[AttemptView] = field(default_factory=list)
    checkpoints: list[CheckpointRecorded] = field(default_factory=list)
    ended: RunEnded | None = None
    budgets_from: int = 0
    cwd: str | None = None
    isolations: list[Isolation] = field(default_factory=list)
    refusals: list[NodeRefused] = field(default_factory=list)
    released: dict[str, float] = field(default_factory=dict)
    updated_s: float = 0.0
    advanced_s: float = 0.0
    unattended: list[tuple[float, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def committed_step(self) -> int:
        """Newest committed step, 0 for none."""
        return max((checkpoint.step for checkpoint in self.checkpoints), default=0)

    @property
    def saved_steps(self) -> frozenset[int]:
        """Steps with a checkpoint on record, without those that a command could not load."""
        unreadable = {view.unreadable_step for view in self.attempts}
        return frozenset(saved.step for saved in self.checkpoints if saved.step not in unreadable)

    @property
    def placement(self) -> PlacementCreated | None:
        """The placement in effect."""
        return self.placements[-1] if self.placements else None

    @property
    def open_attempt(self) -> AttemptView | None:
        """The attempt that was started and has not ended, if any."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.ended is None else None

    @property
    def is_command(self) -> bool:
        """Whether the training program is a command."""
        return bool(((self.job or {}).get("worker") or {}).get("command"))

    @property
    def is_launcher(self) -> bool:
        """Whether that command is started once per node, and starts its ranks itself."""
        per = ((self.job or {}).get("worker") or {}).get("per", "node")
        return self.is_command and per == "node"

    @property
    def ended_well(self) -> bool:
        """Whether the run reached its target."""
        return self.ended is not None and self.ended.outcome == "completed"

    @property
    def pending_decision(self) -> Decision | None:
        """The newest decision when nothing was started after it."""
        return self.attempts[-1].decision if self.attempts else None

    @property
    def isolated(self) -> tuple[str, ...]:
        """Nodes that decisions or failed checks keep out of placements, in that order."""
        return tuple(isolation.node for isolation in self.isolated_nodes)

    @property
    def isolated_nodes(self) -> list[Isolation]:
        """The first isolation of each of those nodes, with its reason."""
        refused = (
            Isolation(refusal.node, f"failed its checks: {refusal.why}", refusal.at_s)
            for refusal in self.refusals
        )
        first_of: dict[str, Isolation] = {}
        for isolation in (*self.isolations, *refused):
            first_of.setdefault(isolation.node, isolation)
        return list(first_of.values())

    def may_rejoin(self, node: str) -> bool:
        """Whether a node is isolated for nothing but its loss, and for the first time.

        Once it is back, it is a spare; a node that is lost again and again is for a person.
        """
        isolations = [isolation for isolation in self.isolations if isolation.node == node]
        return (
            bool(isolations)
            and all(isolation.fault_class in LOSSES for isolation in isolations)
            and node not in self.refused
            and node not in self.released
        )

    @property
    def refused(self) -> tuple[str, ...]:
        """Nodes that no policy lets back in: they failed their checks."""
        return tuple(dict.fromkeys(refusal.node for refusal in self.refusals))

    @property
    def undecided_attempt(self) -> AttemptView | None:
        """The newest attempt when it failed and the ladder has not been asked, or not again."""
        last = self.attempts[-1] if len(self.attempts) > self.budgets_from else None
        if last is None or last.ended is None or last.ended.fault is None:
            return None
        return last if last.decision is None else None

    @property
    def restarts_on_schedule(self) -> bool:
        """Whether the newest attempt ended only for the next attempt."""
        last = self.attempts[-1] if len(self.attempts) > self.budgets_from else None
        return last is not None and last.ended is not None and last.ended.outcome == "restarted"

    @property
    def unclosed_attempt(self) -> AttemptView | None:
        """The newest attempt when it ended the run but the run's end is not on record."""
        last = self.attempts[-1] if len(self.attempts) > self.budgets_from else None
        if last is None or last.ended is None:
            return None
        return last if last.ended.outcome in ("completed", "stopped") else None

    @property
    def sub_healthy(self) -> list[InProcessRecovery]:
        """Recoveries that left the job of the newest placement sub-healthy, oldest first."""
        if not self.placements or self.ended is not None:
            return []
        views = self.attempts_in(self.placements[-1].placement)
        return [
            recovery for view in views for recovery in view.recoveries if recovery.is_sub_healthy
        ]

    @property
    def pause(self) -> Pause | None:
        """The pause that the run is in, None while it trains or nothing of it lives."""
        view = self.open_attempt
        return view.pause if view is not None and self.ended is None else None

    def refused_in(self, placement: int) -> frozenset[str]:
        """List the nodes of a placement that failed their checks."""
        return frozenset(r.node for r in self.refusals if r.placement == placement)

    def attempts_in(self, placement: int) -> list[AttemptView]:
        """List the attempts of a placement, oldest first."""
        return [a for a in self.attempts if a.started.placement == placement]

    def recoveries(self, *, progress_after_s: float | None = None) -> list[Recovery]:
        """List every past recovery, oldest first, with the progress that followed.

        Args:
            progress_after_s: for programs whose steps are unknown, an attempt that lasted this
                long counts as progress; None where committed steps show it.
        """
        recoveries: list[Recovery] = []
        for index, view in enumerate(self.attempts):
            if index < self.budgets_from:
                continue
            later = self._progress_after(index, progress_after_s) or self._went_on(index)
            recoveries += [
                Recovery(
                    recovery.began.fault,
                    recovery.began.decision.rung,
                    progressed=later or self._progress_within(view, recovery),
                    failed=_has_failed(view, recovery),
                    cut_short=recovery.ended is not None and recovery.ended.cut_short,
                )
                for recovery in view.recoveries
            ]
            if view.ended is None or view.ended.fault is None:
                continue
            fault = view.fault or view.ended.fault
            recoveries += [
                Recovery(fault, r, progressed=False, failed=True) for r in view.failed_rungs
            ]
            if view.decision is not None:
                recoveries.append(Recovery(fault, view.decision.rung, progressed=later))
        # A released node begins anew.
        return [
            recovery
            for recovery in recoveries
            if recovery.fault.at_s >= self._released_s(recovery.fault.node)
        ]

    def _released_s(self, node: str | None) -> float:
        return self.released.get(node, float("-inf")) if node is not None else float("-inf")

    def mtbf_s(self, expected_s: float) -> float:
        """Measure the mean seconds between failures that cost steps.

        The expectation counts like a failure after that time (the mean of a gamma prior of shape
        1), so a single early fault does not make a run save all the time, and after many failures
        the expectation does not matter.

        Args:
            expected_s: the expectation in the job.
        """
        ended = [view.ended for view in self.attempts if view.ended is not None]
        lived_s = sum(end.duration_s for end in ended)
        return (expected_s + lived_s) / (1 + sum(end.is_fault for end in ended))

    def _progress_within(self, view: AttemptView, recovery: InProcessRecovery) -> bool:
        """Whether its own attempt committed a step that was trained after the recovery.

        Steps decide, not times: a save from before the fault may be committed after it, and a save
        at the end of life holds nothing new.
        """
        ended = recovery.ended
        if ended is None or not ended.succeeded or ended.step is None:
            return False
        return any(
            (checkpoint.placement, checkpoint.attempt) == view.key and checkpoint.step > ended.step
            for checkpoint in self.checkpoints
        )

    def _went_on(self, index: int) -> bool:
        """Whether a program that had left to be started again came further the next time.

        Of a platform that took the machine, checkpoints show the progress, where they are known.
        """
        ended = self.attempts[index].ended
        if ended is None or ended.fault is None or ended.to_step is None:
            return False
        is_by_platform = ended.fault.fault_class is FaultClass.PREEMPTED and not self.checkpoints
        if not is_by_platform and ended.fault.fault_class is not FaultClass.RESTART_REQUESTED:
            return False
        later = (view.ended for view in self.attempts[index + 1 :])
        return any(end is not None and (end.to_step or 0) > ended.to_step for end in later)

    def _step_to_exceed(self, view: AttemptView) -> int:
        """Return the step that a checkpoint of an attempt must exceed for progress."""
        if not self.is_command:
            return view.from_step
        # A program that does not resume saves the same steps again each time.
        earlier = (
            checkpoint.step
            for checkpoint in self.checkpoints
            if (checkpoint.placement, checkpoint.attempt) < view.key
        )
        return max(earlier, default=0)

    def _progress_after(self, index: int, progress_after_s: float | None) -> bool:
        later = self.attempts[index + 1 :]
        if progress_after_s is not None:
            return any(
                a.ended is not None and a.ended.duration_s >= progress_after_s for a in later
            )
        # A step with which an attempt began, and which it saved again at its end, is not new.
        began_at = {a.key: self._step_to_exceed(a) for a in later}
        return any(
            checkpoint.step
            > began_at.get((checkpoint.placement, checkpoint.attempt), checkpoint.step)
            for checkpoint in self.checkpoints
        )


def replay(records: Sequence[AnyRecord]) -> RunHistory:
    """Fold the records of a ledger, in order, into the run's history."""
    history = RunHistory()
    for record in records:
        history.epoch = max(history.epoch, record.epoch)
        _apply(history, record)
        _keep_time(history, record)
    return history


def _keep_time(history: RunHistory, record: AnyRecord) -> None:
    match record:
        case SupervisorAcquired() if history.job is not None:
            history.unattended.append((history.updated_s, record.at_s))
        case PlacementCreated() | RungFailed() if record.waited_s > 0:
            history.waits.append((record.at_s - record.waited_s, record.at_s))
        case RunEnded():
            history.ends.append(record.at_s)
    # A user's record does not show that a supervisor lived.
    if not isinstance(record, NodeReleased | RunReopened):
        history.updated_s = record.at_s
    if not _is_of_every_start(record):
        history.advanced_s = record.at_s


def _is_of_every_start(record: AnyRecord) -> bool:
    """Whether a supervisor writes the record at each of its starts."""
    return isinstance(record, SupervisorAcquired) or (
        isinstance(record, DataReady) and record.skipped
    )


def _apply(history: RunHistory, record: AnyRecord) -> None:
    match record:
        case RunCreated():
            history.job, history.created_s = record.job, record.at_s
            history.cwd = record.cwd
        case SupervisorAcquired():
            _take_over(history, record)
        case DataReady():
            history.data.append(record)
        case PlacementCreated():
            _place(history, record)
        case NodeRefused() | NodeReleased():
            _update_isolation(history, record)
        case AttemptStarted():
            history.ended = None  # a completed run may be given a larger target
            history.attempts.append(AttemptView(record, history.placements[-1].members))
        case (
            ResumeChosen()
            | FirstStep()
            | AttemptEnded()
            | DecisionMade()
            | RungFailed()
            | AttemptEventRecorded()
        ):
            _update_attempt(history, record)
        case CheckpointRecorded():
            history.checkpoints.append(record)
        case RunEnded() | RunReopened():
            _end_or_reopen(history, record)
        case _:
            assert_never(record)


def _place(history: RunHistory, record: PlacementCreated) -> None:
    # A second try, the engine's choice of nodes, or a moved member: the placement is the same.
    if history.placement is not None and history.placement.placement == record.placement:
        history.placements.pop()
    history.placements.append(record)
    view = history.open_attempt
    if view is not None and view.started.placement == record.placement:
        history.attempts[-1] = replace(view, members=record.members)


def _take_over(history: RunHistory, record: SupervisorAcquired) -> None:
    history.supervisor = record
    if record.flow_run is not None and record.flow_run not in history.flow_runs:
        history.flow_runs.append(record.flow_run)
    if history.ended is not None:
        history.refusals.clear()  # the user has seen them, and they are checked again
    if not history.ended_well:  # failed or cancelled: a new start continues it
        history.ended = None


def _end_or_reopen(history: RunHistory, record: RunEnded | RunReopened) -> None:
    if isinstance(record, RunReopened):
        history.ended = None
    else:
        history.ended, history.budgets_from = record, len(history.attempts)


def _update_isolation(history: RunHistory, record: NodeRefused | NodeReleased) -> None:
    if isinstance(record, NodeRefused):
        history.refusals.append(record)
        return
    history.released[record.node] = record.at_s
    history.isolations = [
        isolation for isolation in history.isolations if isolation.node != record.node
    ]
    history.refusals = [refusal for refusal in history.refusals if refusal.node != record.node]


def _update_attempt(
    history: RunHistory,
    record: ResumeChosen
    | FirstStep
    | AttemptEnded
    | DecisionMade
    | RungFailed
    | AttemptEventRecorded,
) -> None:
    key = (record.placement, record.attempt)
    index = next((i for i, view in enumerate(history.attempts) if view.key == key), None)
    if index is None:
        return
    view = history.attempts[index]
    match record:
        case ResumeChosen():
            view = replace(view, resume=record)
        case FirstStep():
            view = replace(view, first_step=record)
        case AttemptEnded():
            view = replace(view, ended=record)
        case DecisionMade():
            view = replace(view, decision=record.decision)
            if record.decision.isolate is not None:
                history.isolations.append(_isolation(view, record.decision, record.at_s))
        case RungFailed():
            # The decision is superseded: the ladder is asked again.
            view = replace(view, failed_rungs=(*view.failed_rungs, record.rung), decision=None)
        case AttemptEventRecorded():
            view = replace(view, events=(*view.events, record.event))
            _isolate_within(history, record)
    history.attempts[index] = view


def _isolate_within(history: RunHistory, record: AttemptEventRecorded) -> None:
    """Isolate a node that was evacuated while the attempt continued."""
    event = record.event
    if isinstance(event, RecoveryBegan) and event.decision.isolate is not None:
        why = f"{event.fault.fault_class}: {event.fault.evidence}"
        history.isolations.append(
            Isolation(event.decision.isolate, why, record.at_s, event.fault.fault_class)
        )


def _isolation(view: AttemptView, decision: Decision, at_s: float) -> Isolation:
    """The isolation by the decision about an attempt that has ended."""
    node, fault = str(decision.isolate), view.ended.fault if view.ended is not None else None
    if fault is None:
        return Isolation(node, decision.reason, at_s)
    healed = f"; {view.healed.text}" if view.healed is not None else ""
    why = f"{fault.fault_class}: {fault.evidence}{healed}"
    return Isolation(node, why, at_s, fault.fault_class)


def _has_failed(view: AttemptView, recovery: InProcessRecovery) -> bool:
    """Whether a recovery inside the processes failed, or its attempt ended before it did."""
    if recovery.ended is not None:
        return not recovery.ended.succeeded
    return view.ended is not None and view.ended.outcome != "completed"
