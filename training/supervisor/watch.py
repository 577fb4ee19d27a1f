"""Watching one attempt from outside, until no process of it is left.

The watcher decides nothing about recovery: it notices the first failure, lets the others
report theirs, has everything stopped, and hands the evidence on. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from perdure.training.diagnosis.evidence import Evidence, NodeOutput, SilentRank, SlowNode
from perdure.training.engines.base import Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import MoveFailed
from perdure.training.journal.attempt_log import Follower
from perdure.training.journal.events import CheckpointCommitted, Event, LedgerEvent, StepRecord
from perdure.training.journal.time_account import SeenStep
from perdure.training.recovery.protocol import AttemptGivenUp, RecoveryBegan, RecoveryEnded
from perdure.training.supervisor.evidence import (
    coordinators_lost,
    ends_of,
    logs_by_rank,
    newest_of,
    outputs_of,
    progress_of,
    silent_of,
    step_of,
)
from perdure.training.supervisor.exit_zero import CommandExitCheck, is_done, was_stopped
from perdure.training.wire.agent import NodeLog
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    SavedCheckpoint,
    WorkerStatus,
)

Statuses = Collection[AgentStatus]
HeldUpBy = SlowNode | SilentRank

SETTLE_S = 1.0  # survivors saw a death over gloo within 34 ms
HANG_GRACE_S = 3.0  # ModelArts ends what hangs by force, too; it only needs time to print
STOP_MARGIN_S = 20.0


class EndKind(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    RESTARTED = "restarted"


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt, with what a diagnosis needs.

    Attributes:
        stepped_s: when the last step that was seen was completed.
        stacks: the stack of every thread of the workers, when one of them was silent.
        lived_s: when the last of its processes ended; None where no agent has told.
        notes: what a user has to know about a good end.
    """

    kind: EndKind
    evidence: Evidence
    proc_start_cnt: dict[str, int]
    last_step: int | None
    stepped_s: float | None = None
    stacks: tuple[tuple[str, NodeLog], ...] = ()
    lived_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Progress:
    """What the watcher has seen so far; handed to `on_progress` at every poll."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    steps: Sequence[StepRecord] = ()
    checkpoints: Sequence[int] = ()
    saved: Sequence[SavedCheckpoint] = ()
    events: Sequence[LedgerEvent] = ()
    last: StepRecord | None = None
    _given_up: AttemptGivenUp | None = None
    _recovering: dict[int, RecoveryBegan] = field(default_factory=dict)
    _known_step: int | None = None
    _known_saves: set[tuple[int, str]] = field(default_factory=set)

    def begin_log(self) -> None:
        """Another log begins, with records of steps that are known already."""
        self._known_step = self.last.step if self.last is not None else None

    def take(self, events: Iterable[Event]) -> None:
        """Sort what is new in the attempt log."""
        steps: list[StepRecord] = []
        checkpoints: list[int] = []
        others: list[LedgerEvent] = []
        for event in events:
            match event:
                case StepRecord():
                    if self._known_step is None or event.step > self._known_step:
                        self._known_step = None
                        steps.append(event)
                case CheckpointCommitted():
                    checkpoints.append(event.step)
                case _:
                    others.append(event)
        self.steps, self.checkpoints, self.events = steps, checkpoints, others
        self.last = steps[-1] if steps else self.last
        for event in others:
            match event:
                case RecoveryBegan():
                    self._recovering[event.number] = event
                case RecoveryEnded():
                    self._recovering.pop(event.number, None)
                case AttemptGivenUp() if self._given_up is None:
                    self._given_up = event

    def take_saves(self) -> None:
        """Note what commands have saved since the last look."""
        told = [one for status in self.snapshot.agents.values() for one in status.saved]
        fresh = {(one.step, one.path): one for one in told}
        self.saved = [fresh[key] for key in sorted(fresh.keys() - self._known_saves)]
        self._known_saves.update(fresh)
        self.checkpoints = [*self.checkpoints, *sorted({one.step for one in self.saved})]

    @property
    def given_up(self) -> AttemptGivenUp | None:
        """The fault for which the processes end, by the coordinator; None when it gave none.

        Where a recovery has begun and nothing came of it, an agent could not do its part.
        """
        if self._given_up is not None or not self._recovering:
            return self._given_up
        one = max(self._recovering.values(), key=lambda began: began.number)
        why = f"{one.decision.rung} did not come to its end"
        return AttemptGivenUp(at_s=one.at_s, number=one.number, fault=one.fault, why=why)

    @property
    def has_given_up(self) -> bool:
        """Whether the coordinator has said that nothing inside the processes helps."""
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
    def trains(self) -> bool:
        """Whether processes run on every member, have completed a step, and nothing is mended."""
        is_command = any(one.is_command for one in self.snapshot.agents.values())
        has_begun = self.last is not None or is_command  # whose steps may be nowhere to be seen
        return self.is_running and has_begun and not self._recovering and not self.has_given_up

    @property
    def is_running(self) -> bool:
        """Whether processes run on every member."""
        agents = self.snapshot.agents.values()
        return bool(agents) and all(status.state is AgentState.RUNNING for status in agents)


@dataclass(frozen=True, slots=True)
class _Noticed:
    """The first failure, and the state of the attempt then."""

    at_s: float
    snapshot: Snapshot
    refusal: str | None = None
    slow: SlowNode | None = None
    stacks: tuple[tuple[str, NodeLog], ...] = ()
    given_up: AttemptGivenUp | None = None
    silent: tuple[SilentRank, ...] = ()


@dataclass(frozen=True, slots=True)
class Grace:
    """How long processes get to end before they are ended by force.

    Attributes:
        request_s: to save, when the run is stopped on request.
        failover_s: for the others when one has failed; below 0 none of them is ended by force,
            unless they live on for `hang_limit_s` or a stop is wanted.
        hang_limit_s: see failover_s.
    """

    request_s: float
    failover_s: float
    hang_limit_s: float


class AttemptWatch:
    """Watches the attempt that `fleet` is running.

    Args:
        fleet: where the attempt runs.
        grace: time that processes get to end.
        started_s: when the attempt was, seconds since the epoch.
        start_timeout_s: limit for bringing the data to a node and starting its processes.
        stop_wanted: asked at every poll.
        restart_wanted: asked at every poll whether it ends to be started anew.
        on_progress: called at every poll with what is new.
        held_up_by: asked at every poll for what holds the others up although nothing has failed: a
            node that is to be left, or a rank that is left behind.
        command_ends: judges commands that exit with 0; None: for a session.
        moving: asked at every poll for the nodes whose loss, or start, is seen to inside the
            attempt; it may take as long as a container needs to start. May raise MoveFailed.
    """

    def __init__(  # noqa: PLR0913 what an attempt is watched for
        self,
        fleet: Fleet,
        *,
        grace: Grace,
        started_s: float,
        start_timeout_s: float,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
        restart_wanted: Callable[[], bool] = lambda: False,
        held_up_by: Callable[[Statuses], HeldUpBy | None] = lambda _statuses: None,
        command_ends: CommandExitCheck | None = None,
        moving: Callable[[Snapshot, Progress], frozenset[str]] = lambda _look, _seen: frozenset(),
    ) -> None:
        self._fleet = fleet
        self._grace = grace
        self._started_s = started_s
        self._start_timeout_s = start_timeout_s
        self._stop_wanted = stop_wanted
        self._restart_wanted = restart_wanted
        self._on_progress = on_progress
        self._held_up_by = held_up_by
        self._command_ends = command_ends
        self._moving = moving
        self._log, self._log_of = Follower(fleet.metrics), ""
        self._progress = Progress()
        self._proc_start_cnt: dict[str, int] = {}

    def run(self) -> AttemptEnd:  # noqa: PLR0911 one for each way to end
        """Watch to the end; every process of the attempt is gone when this returns."""
        began_s = time.monotonic()
        while True:
            snapshot = self._observe()
            try:
                moving = self._moving(snapshot, self._progress)
            except MoveFailed:
                return self.wind_up()
            # A fault comes before a request to stop: else nobody would learn of it.
            wanted = self._wanted_end()
            if wanted is not None and not has_failure(snapshot, moving):
                self._fleet.stop(self._grace.request_s)
                final = self._await_end(self._grace.request_s)
                kind = EndKind.COMPLETED if self._is_completed(final) else wanted
                return self._end(kind, final)
            if self._command_ends is not None and self._command_ends.bad:
                return self.wind_up()
            if _all_done(snapshot):
                return self._end(EndKind.COMPLETED, snapshot)
            starting = [node for node in _starting(snapshot) if node not in moving]
            if starting and time.monotonic() - began_s > self._start_timeout_s:
                text = f"{', '.join(starting)} did not start within {self._start_timeout_s:g} s"
                return self.wind_up(refusal=text)
            if has_failure(snapshot, moving) or (snapshot.is_over and not starting):
                return self.wind_up()
            culprit = self._held_up_by(snapshot.agents.values())
            if culprit is not None:
                return self.wind_up(culprit=culprit)
            time.sleep(self._fleet.poll_s)

    def _wanted_end(self) -> EndKind | None:
        if self._stop_wanted():
            return EndKind.STOPPED
        return EndKind.RESTARTED if self._restart_wanted() else None

    def _is_completed(self, final: Snapshot) -> bool:
        """Whether an attempt that was stopped on request had come to its target before."""
        if self._command_ends is not None and (self._command_ends.bad or was_stopped(final)):
            return False
        return _all_done(final)

    def wind_up(self, *, refusal: str | None = None, culprit: HeldUpBy | None = None) -> AttemptEnd:
        """After the first failure: let the others report, stop them, look once more.

        Args:
            refusal: why processes could not be started, when that is the failure.
            culprit: what holds the others up, when nothing else has happened.
        """
        at_s = time.time()
        time.sleep(SETTLE_S)
        failed = self._observe()
        # What the coordinator notes later is the work of the order to stop.
        given_up = self._progress.given_up
        silent = tuple(silent_of(failed.agents.values()))
        silent = silent or ((culprit,) if isinstance(culprit, SilentRank) else ())
        slow = culprit if isinstance(culprit, SlowNode) else None
        # Before the order to stop, which would change them.
        stacks = tuple(self._fleet.stacks()) if silent else ()
        # Ranks that are merely slow can save together; peers of a dead one cannot.
        grace_s = self._grace.request_s if slow is not None else self._grace.failover_s
        grace_s = HANG_GRACE_S if silent else grace_s
        self._fleet.stop(grace_s)
        final = self._await_end(grace_s) if grace_s >= 0 else self._await_unforced_end()
        lost = tuple(dict.fromkeys((*failed.lost, *final.lost, *_not_over(final))))
        noticed = _Noticed(at_s, failed, refusal, slow, stacks, given_up, silent)
        return self._end(EndKind.FAILED, Snapshot(final.agents, lost), noticed)

    def _await_end(self, grace_s: float) -> Snapshot:
        deadline_s = time.monotonic() + grace_s + STOP_MARGIN_S
        snapshot = self._observe()
        while not snapshot.is_over and time.monotonic() < deadline_s:
            time.sleep(self._fleet.poll_s)
            snapshot = self._observe()
        return snapshot

    def _await_unforced_end(self) -> Snapshot:
        """Wait for processes that end by themselves, until that is a hang."""
        deadline_s = time.monotonic() + self._grace.hang_limit_s
        snapshot = self._observe()
        while not snapshot.is_over and time.monotonic() < deadline_s and not self._stop_wanted():
            time.sleep(self._fleet.poll_s)
            snapshot = self._observe()
        if snapshot.is_over:
            return snapshot
        grace_s = self._grace.request_s if self._stop_wanted() else HANG_GRACE_S
        self._fleet.stop(grace_s)
        return self._await_end(grace_s)

    def _observe(self) -> Snapshot:
        self._read_log()
        progress = self._progress
        progress.snapshot = self._fleet.poll()
        for status in progress.snapshot.agents.values():
            self._proc_start_cnt[status.node] = status.proc_start_cnt
        progress.take_saves()
        self._judge_ends(progress.snapshot)
        self._on_progress(progress)
        return progress.snapshot

    def _outputs(self) -> tuple[NodeOutput, ...]:
        return tuple(outputs_of(self._fleet, started_s=self._started_s))

    def _judge_ends(self, snapshot: Snapshot) -> None:
        """See whether commands that exited with 0 have ended well."""
        ends = self._command_ends
        if ends is None:
            return
        ends.note(snapshot)
        fresh = ends.fresh(snapshot)
        if fresh:
            ends.judge(fresh, logs_by_rank(self._fleet), is_last=_all_done(snapshot))

    def _read_log(self) -> bool:
        """Read on in the attempt log. Whether there was more of it."""
        first = self._fleet.first_container
        if first != self._log_of:  # the first node was lost: another log begins on another one
            self._log, self._log_of = Follower(self._fleet.metrics), first
            self._progress.begin_log()
        events, progress = self._log.read(), self._progress
        progress.take(events or ())
        return events is not None

    def _read_log_to_its_end(self) -> None:
        """Read what the processes wrote last, which the decision about their end needs."""
        while self._read_log():
            self._on_progress(self._progress)

    def _end(
        self, kind: EndKind, snapshot: Snapshot, noticed: _Noticed | None = None
    ) -> AttemptEnd:
        self._read_log_to_its_end()
        noticed = noticed or _Noticed(time.time(), snapshot)
        logs = logs_by_rank(self._fleet) if kind is EndKind.FAILED else {}
        last, seen = self._progress.last, newest_of(snapshot, now_s=time.time())
        step = step_of(snapshot, last)
        statuses = list(snapshot.agents.values())
        evidence = Evidence(
            at_s=noticed.at_s,
            step=step,
            workers=tuple(ends_of(statuses, logs, self._command_ends)),
            lost_nodes=snapshot.lost,
            losses=self._fleet.losses(snapshot.lost) if kind is EndKind.FAILED else (),
            silent=noticed.silent,
            staging_errors={s.node: s.staging_error for s in statuses if s.staging_error},
            oom_nodes=tuple(s.node for s in statuses if s.oom_kills),
            refusal=noticed.refusal,
            outputs=self._outputs() if kind is EndKind.FAILED else (),
            rank_progress=tuple(progress_of(noticed.snapshot.agents.values())),
            slow=noticed.slow,
            given_up=noticed.given_up,
            coordinator=next(coordinators_lost(statuses), None),
        )
        return AttemptEnd(
            kind,
            evidence,
            dict(self._proc_start_cnt),
            step,
            last.at_s if last is not None else seen.at_s if seen is not None else None,
            noticed.stacks,
            max((w.ended_s for s in statuses for w in s.workers if w.ended_s), default=None),
            self._notes(kind),
        )

    def _notes(self, kind: EndKind) -> tuple[str, ...]:
        ends = self._command_ends
        return tuple(ends.notes) if ends is not None and kind is EndKind.COMPLETED else ()


def _all_done(snapshot: Snapshot) -> bool:
    if snapshot.lost or snapshot.unanswered or not snapshot.agents:
        return False
    return all(
        status.is_over and status.workers and all(is_done(worker) for worker in status.workers)
        for status in snapshot.agents.values()
    )


def _starting(snapshot: Snapshot) -> list[str]:
    """Nodes that have not begun, so that `over` does not mean the end yet."""
    waiting = (AgentState.IDLE, AgentState.STAGING)
    return [status.node for status in snapshot.agents.values() if status.state in waiting]


def _not_over(snapshot: Snapshot) -> list[str]:
    """Nodes whose processes did not end when ordered: they count as lost."""
    alive = [status.node for status in snapshot.agents.values() if not status.is_over]
    return [*alive, *snapshot.unanswered]


def has_failure(snapshot: Snapshot, moving: Collection[str] = ()) -> bool:
    """Whether something of an attempt was lost, hangs or ended other than well.

    Args:
        snapshot: of its members.
        moving: nodes whose loss is seen to already.
    """
    return any(node not in moving for node in snapshot.lost) or any(
        status.coordinator_end is not None
        or (status.hang is not None and status.hang.ends_attempt)
        or status.staging_error is not None
        or any(_failed(worker) for worker in status.workers)
        for status in snapshot.agents.values()
    )


def _failed(worker: WorkerStatus) -> bool:
    return worker.exit_code is not None and not is_done(worker)
