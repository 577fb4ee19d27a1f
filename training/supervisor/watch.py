"""An attempt as its supervisor sees it: its progress, the answers of its watchers, and its end.

Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from perdure.training.diagnosis.evidence import Evidence, SilentRank, SlowNode, SmallWorld
from perdure.training.engines.base import Snapshot
from perdure.training.journal.events import CheckpointCommitted, Event, LedgerEvent, StepRecord
from perdure.training.journal.time_account import SeenStep
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import AttemptGivenUp, RecoveryBegan, RecoveryEnded
from perdure.training.supervisor.evidence import first_of, newest_of
from perdure.training.wire.agent import NodeLog
from perdure.training.wire.agent_status import AgentState, SavedCheckpoint


class EndKind(StrEnum):
    """The ways in which an attempt ends."""

    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    ENDED_FROM_OUTSIDE = "ended from outside"


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """The start of an attempt that is watched.

    Attributes:
        key: placement and attempt; an agent may still report an earlier attempt.
        at_s: seconds since the epoch.
        factor: times the limit of a start.
    """

    key: tuple[int, int]
    at_s: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt, with what a diagnosis needs.

    Attributes:
        stepped_s: when the last known step was completed.
        stacks: the stack of every thread of the workers, where a rank was silent.
        lived_s: when the last of its processes ended; None where no agent has reported it.
        notes: for the user, about a good end.
        shown_target: last step of the training, as the output of a command has it.
        done_step: target, where it was reached and its checkpoint is complete; else None.
    """

    kind: EndKind
    evidence: Evidence
    proc_start_cnt: dict[str, int]
    last_step: int | None
    stepped_s: float | None = None
    stacks: tuple[tuple[str, NodeLog], ...] = ()
    lived_s: float | None = None
    notes: tuple[str, ...] = ()
    shown_target: int | None = None
    done_step: int | None = None


@dataclass(slots=True)
class Progress:
    """The progress of an attempt so far; its watchers get it at every poll.

    Attributes:
        snapshot: of its members.
        at_s: when they were polled, seconds since the epoch.
        steps: completed since the poll before.
        checkpoints: steps that were committed since.
        saved: checkpoints that commands have saved since.
        events: of its coordinator since.
        last: the newest step on record.
        chips: faults that chips have reported in this attempt.
        platform_reports: codes that the platform reports of its chips now.
    """

    snapshot: Snapshot = field(default_factory=Snapshot)
    at_s: float = 0.0
    steps: Sequence[StepRecord] = ()
    checkpoints: Sequence[int] = ()
    saved: Sequence[SavedCheckpoint] = ()
    events: Sequence[LedgerEvent] = ()
    last: StepRecord | None = None
    chips: Sequence[Fault] = ()
    platform_reports: Sequence[ChipReport] = ()
    _given_up: AttemptGivenUp | None = None
    _recovering: dict[int, RecoveryBegan] = field(default_factory=dict)
    _skipped_to_step: int | None = None
    _noted_saves: set[tuple[int, str]] = field(default_factory=set)

    def begin_log(self) -> None:
        """Skip the steps that are known already: another log begins with records of them."""
        self._skipped_to_step = self.last.step if self.last is not None else None

    def take(self, events: Iterable[Event]) -> None:
        """Sort the new events of the attempt log."""
        steps: list[StepRecord] = []
        checkpoints: list[int] = []
        ledger_events: list[LedgerEvent] = []
        for event in events:
            match event:
                case StepRecord():
                    if self._skipped_to_step is None or event.step > self._skipped_to_step:
                        self._skipped_to_step = None
                        steps.append(event)
                case CheckpointCommitted():
                    checkpoints.append(event.step)
                case _:
                    ledger_events.append(event)
        self.steps, self.checkpoints, self.events = steps, checkpoints, ledger_events
        self.last = steps[-1] if steps else self.last
        for event in ledger_events:
            match event:
                case RecoveryBegan():
                    self._recovering[event.number] = event
                case RecoveryEnded():
                    self._recovering.pop(event.number, None)
                case AttemptGivenUp() if self._given_up is None:
                    self._given_up = event

    def take_snapshot(self, snapshot: Snapshot, *, at_s: float) -> None:
        """Note the newest poll, and the checkpoints that commands have saved since the last."""
        self.snapshot, self.at_s = snapshot, at_s
        reported = [save for status in snapshot.agents.values() for save in status.saved]
        saves = {(save.step, save.path): save for save in reported}
        self.saved = [saves[key] for key in sorted(saves.keys() - self._noted_saves)]
        self._noted_saves.update(saves)
        self.checkpoints = [*self.checkpoints, *sorted({save.step for save in self.saved})]

    @property
    def given_up(self) -> AttemptGivenUp | None:
        """The coordinator's reason why the processes end; None when it gave none.

        Where a recovery has begun and not ended, an agent could not do its part.
        """
        if self._given_up is not None or not self._recovering:
            return self._given_up
        newest = max(self._recovering.values(), key=lambda began: began.number)
        why = f"{newest.decision.rung} did not come to its end"
        return AttemptGivenUp(at_s=newest.at_s, number=newest.number, fault=newest.fault, why=why)

    @property
    def has_given_up(self) -> bool:
        """Whether the coordinator has reported that nothing inside the processes helps."""
        return self._given_up is not None

    @property
    def open_recoveries(self) -> Sequence[RecoveryBegan]:
        """Recoveries inside the processes that have begun and not ended."""
        return list(self._recovering.values())

    @property
    def command_step(self) -> SeenStep | None:
        """The newest step of a command in this attempt, by its heartbeats or its output."""
        return newest_of(self.snapshot, now_s=time.time())

    @property
    def first_step(self) -> StepRecord | SeenStep | None:
        """The first step of this attempt: by its log, or while that is not read by its output."""
        if self.steps:
            return self.steps[0]
        return first_of(self.snapshot, now_s=time.time())

    @property
    def trains(self) -> bool:
        """Whether processes run on every member, have completed a step, and none recovers."""
        is_command = any(status.is_command for status in self.snapshot.agents.values())
        has_begun = self.last is not None or is_command  # whose steps may be nowhere to be seen
        return self.is_running and has_begun and not self._recovering and not self.has_given_up

    @property
    def is_running(self) -> bool:
        """Whether processes run on every member."""
        agents = self.snapshot.agents.values()
        return bool(agents) and all(status.state is AgentState.RUNNING for status in agents)


Culprit = SlowNode | SilentRank | SmallWorld | Fault


@dataclass(frozen=True, slots=True)
class WatchResult:
    """The answer of a watcher to one poll.

    Attributes:
        end: FAILED: something is wrong that no agent reports as a failure; RESTARTED: the attempt
            is to end well and to be started anew.
        is_fault: whether FAILED comes before a request to stop or restart.
        culprit: holds the others up, or is no gang, although nothing has failed; or it is the
            fault of a chip whose process has not failed yet.
        answered_nodes: nodes whose loss, or start, is answered inside the attempt.
    """

    end: EndKind | None = None
    is_fault: bool = False
    culprit: Culprit | None = None
    answered_nodes: frozenset[str] = frozenset()


def first_culprit(results: Iterable[WatchResult], end: EndKind | None) -> Culprit | None:
    """Return what a watcher with this result blames: another watcher's is not why it ends."""
    return next((r.culprit for r in results if r.end is end and r.culprit is not None), None)


class AttemptWatcher(Protocol):
    """Watches one attempt for one thing."""

    def check(self, progress: Progress) -> WatchResult | None:
        """Judge the attempt by its newest poll; None: nothing is to be done about it."""
