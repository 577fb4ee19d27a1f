"""A monitor of a run: reads its ledger, its store and its agents on this machine.

It changes nothing, so another process may supervise the run meanwhile, or none. Times are seconds
since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.run_status import (
    HeldCheckpoints,
    NodeStatus,
    PauseStatus,
    RankFacts,
    RecentFault,
    RestoredState,
    RunState,
    RunStatus,
)
from perdure.runs import OpenAttempt
from perdure.storage.checkpoint import Tier
from perdure.training.engines.base import Snapshot
from perdure.training.files import home_folder
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.steps import drop_lost_steps
from perdure.training.journal.time_account import Account, SeenStep, account_time
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.recovery.faults import Fault
from perdure.training.reporting.ettr import Accountant
from perdure.training.reporting.facts import FaultFacts, RecoveryFacts
from perdure.training.reporting.rows import alert_rows, attempt_rows, program_notices
from perdure.training.reporting.summary import abnormal_steps
from perdure.training.supervisor.checkpoints import node_tiers, program_saves, saves_are_known
from perdure.training.supervisor.evidence import newest_of, step_of
from perdure.training.supervisor.exit_zero import shown_target
from perdure.training.supervisor.job_registry import job_path
from perdure.training.supervisor.observing import AttemptSnapshot
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.store_outage import read_outage, unwritable
from perdure.training.supervisor.waiting import wait_of
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.requests import is_pause_wanted
from perdure.training.wire.store_wait import Waiter, read_wait

CHECKPOINTS_PERIOD_S = 10.0  # listing them takes the store more than the rest together
ACCOUNT_SHARE = 0.1  # of the time, at most, goes into making accounts
_NUM_FAULTS = 5
_PACE_STEPS = 50


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run at one moment.

    Attributes:
        status: the state for scripts.
        history: its ledger, and the events that the open attempt has logged since.
        records: step records that count so far, by step.
        account: the wall time by category.
    """

    status: RunStatus
    history: RunHistory
    records: dict[int, StepRecord]
    account: Account


class RunMonitor:
    """Reads the state of one run repeatedly, and each record of it once.

    Args:
        run: a run that another process may supervise.
    """

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._accountant = Accountant(run.store, run.job.run_id)
        self._open_attempt = OpenAttempt(run)
        self._last_account: Account | None = None
        self._account_due_s = float("-inf")
        self._tiers: tuple[float, dict[str, HeldCheckpoints]] = (float("-inf"), {})

    def snapshot(self, *, now_s: float | None = None) -> RunSnapshot:
        """Read the present state of the run.

        Raises:
            StorageError: the store does not answer.
        """
        now_s = time.time() if now_s is None else now_s
        history = self._run.refresh()
        observer = self._open_attempt.observer(history)
        attempt = observer.observe() if observer is not None else AttemptSnapshot(None)
        self._accountant.add_steps(attempt.steps)
        _add_events(history, attempt)
        records = self._accountant.records(history)
        agents = attempt.snapshot
        newest = newest_of(agents, now_s=now_s) if agents is not None else None
        account = self._account(history, records, newest, now_s)
        kept_records = drop_lost_steps(records)
        status = self._status(history, kept_records, account, agents, now_s=now_s)
        return RunSnapshot(status, history, kept_records, account)

    def _status(
        self,
        history: RunHistory,
        records: dict[int, StepRecord],
        account: Account,
        agents: Snapshot | None,
        *,
        now_s: float,
    ) -> RunStatus:
        """The facts from the ledger; of a command, those that heartbeats and output show."""
        run, job, pause = self._run, self._run.job, history.pause
        target_step = job.target_step or shown_target(history, agents)
        last = records[max(records)] if records else None
        is_supervised = history.ended is None and run.ledger.is_supervised()
        return RunStatus(
            run_id=job.run_id,
            state=_state(history),
            ledger_unwritable=unwritable(run.ledger, run.home, now_s=now_s),
            supervised=is_supervised,
            step=_command_step(history, agents) if job.worker.is_command else _step(history, last),
            committed_step=history.committed_step if saves_are_known(job) else None,
            target_step=target_step,
            eta_s=_eta_s(history, records, target_step),
            tokens_per_s=last.tokens_per_s if last is not None else None,
            loss=_finite(last.loss if last is not None else None),
            grad_norm=_finite(last.grad_norm if last is not None else None),
            lr=last.lr if last is not None else None,
            last_step_age_s=_last_step_age_s(last, agents, now_s),
            isolated=tuple(history.isolated),
            sub_healthy=len(history.sub_healthy),
            pause_wanted=is_pause_wanted(run.store, job.run_id),
            pause=PauseStatus(at_s=pause.began.at_s, step=pause.began.step) if pause else None,
            waits=_waits(run, history, agents, is_supervised=is_supervised),
            attempts=tuple(attempt_rows(history)),
            abnormal=abnormal_steps(history),
            notices=tuple(program_notices(history)),
            recoveries=_recoveries(history),
            restored=_restored(history),
            fault=_last_fault(history),
            faults=_recent_faults(history),
            alerts=tuple(alert_rows(history)),
            ettr=round(account.known_ettr, 4) if account.known_ettr is not None else None,
            wall_s=round(account.wall_s, 3),
            time_s={owner: round(s, 3) for owner, s in account.seconds.items() if s > 0},
            checkpoints=self._program_checkpoints(history) or self._checkpoints(now_s),
            nodes=_nodes(history, agents),
            metrics_url=_metrics_url(agents),
        )

    def _account(
        self,
        history: RunHistory,
        records: Sequence[StepRecord],
        newest: SeenStep | None,
        now_s: float,
    ) -> Account:
        """The account of the wall time; that of a long run may be a little old."""
        last = self._last_account
        if last is not None and history.ended is None and now_s < self._account_due_s:
            return last
        began_s = time.monotonic()
        fresh = self._last_account = account_time(history, records, now_s=now_s, newest=newest)
        self._account_due_s = now_s + (time.monotonic() - began_s) / ACCOUNT_SHARE
        return fresh

    def _program_checkpoints(self, history: RunHistory) -> dict[str, HeldCheckpoints]:
        """The checkpoints of a command whose job says where it saves them."""
        if self._run.job.worker.checkpoints is None:
            return {}
        steps = [save.step for save in program_saves(history) if save.is_kept is not False]
        held = HeldCheckpoints(newest=max(steps, default=None), count=len(steps))
        return {"program": held}

    def _checkpoints(self, now_s: float) -> dict[str, HeldCheckpoints]:
        """The checkpoints that each tier holds."""
        listed_s, listed = self._tiers
        if now_s - listed_s < CHECKPOINTS_PERIOD_S:
            return listed
        on_nodes = node_tiers(home_folder(), self._run.job.run_id)
        steps: dict[str, list[int]] = {tier.value: [] for tier in Tier}
        in_store = {step.step: step.tiers({}) for step in self._run.checkpoints.list_steps()}
        for step in sorted({*in_store, *on_nodes}):
            for tier in (*on_nodes.get(step, ()), *in_store.get(step, ())):
                steps[tier].append(step)
        tiers = {
            tier: HeldCheckpoints(newest=held[-1] if held else None, count=len(held))
            for tier, held in steps.items()
        }
        self._tiers = (now_s, tiers)
        return tiers


def _waits(
    run: RunHandle, history: RunHistory, agents: Snapshot | None, *, is_supervised: bool
) -> Wait | None:
    """The wait of a run that goes on: for its store, a person, a free node, or a supervisor."""
    folder = job_path(run.home, run.job.run_id).parent
    starts = read_wait(folder, by=Waiter.STARTER)
    if starts is not None and starts.kind is WaitKind.SERVER and is_supervised:
        starts = None  # another process waits, and the run does not need it
    if history.ended is not None:
        return starts
    outage = read_outage(run.home, run.job.run_id)
    if outage is not None:
        return outage.wait
    lease = run.ledger.lease() if is_supervised else None
    elsewhere = lease.wait if lease is not None else None
    return wait_of(history, agents) or read_wait(folder) or elsewhere or starts


def _add_events(history: RunHistory, attempt: AttemptSnapshot) -> None:
    """Add events that the open attempt has logged and no supervisor has recorded yet."""
    view = history.open_attempt
    if view is None:
        return
    recorded = {(event.kind, event.number) for event in view.events}
    fresh = [event for event in attempt.events if (event.kind, event.number) not in recorded]
    history.attempts[-1] = replace(view, events=(*view.events, *fresh))


def _finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def _step(history: RunHistory, last: StepRecord | None) -> int:
    """The newest step; records above the newest commit are lost with their attempt."""
    return max(last.step if last is not None else 0, history.committed_step)


def _command_step(history: RunHistory, snapshot: Snapshot | None) -> int | None:
    """The newest step of a command; None where neither heartbeats nor output show any."""
    step = step_of(snapshot, None) if snapshot is not None else None
    if step is not None:
        return step
    ends = [view.ended.to_step for view in history.attempts if view.ended is not None]
    return next((step for step in reversed(ends) if step is not None), None)


def _last_step_age_s(
    last: StepRecord | None, agents: Snapshot | None, now_s: float
) -> float | None:
    """The time since the newest step; of a command, since its heartbeat or output showed it."""
    newest = newest_of(agents, now_s=now_s) if agents is not None and last is None else None
    step = last or newest
    return round(max(0.0, now_s - step.at_s), 1) if step is not None else None


def _eta_s(history: RunHistory, records: dict[int, StepRecord], target: int | None) -> float | None:
    """The time to the target at the pace of the newest steps, saves included."""
    newest = list(records.values())[-_PACE_STEPS:]
    if target is None or history.open_attempt is None or not newest:
        return None
    attempt = (newest[-1].placement, newest[-1].attempt)
    # The downtime before a restart is no part of the pace.
    steps = [record for record in newest if (record.placement, record.attempt) == attempt]
    first, last = steps[0], steps[-1]
    pace_s = (last.at_s - first.at_s + first.step_s) / (last.step - first.step + 1)
    return round(max(0, target - last.step) * pace_s, 1)


def _metrics_url(snapshot: Snapshot | None) -> str | None:
    """The address at which the open attempt serves Prometheus metrics."""
    agents = snapshot.agents.values() if snapshot is not None else ()
    return next((status.metrics_url for status in agents if status.metrics_url), None)


def _nodes(history: RunHistory, snapshot: Snapshot | None) -> tuple[NodeStatus, ...]:
    """The nodes of the run; without an answer only their names are known."""
    view = history.open_attempt
    if history.ended is not None or history.placement is None:
        return ()
    if snapshot is None or view is None:
        return tuple(NodeStatus(node=m.node, state=None) for m in history.placement.members)
    return (
        *(_node(status) for status in snapshot.agents.values()),
        *(NodeStatus(node=node, state="lost", health="lost") for node in snapshot.lost),
        *(NodeStatus(node=n, state=None, health="no answer") for n in snapshot.unanswered),
    )


def _node(status: AgentStatus) -> NodeStatus:
    return NodeStatus(
        node=status.node,
        state=status.state,
        health=_health(status),
        ranks=tuple(map(RankFacts.of, status.known_ranks)),
        shown_step=status.shown.step if status.shown is not None else None,
        sample=status.sample,
    )


def _health(status: AgentStatus) -> str:
    """The problems of a node, or "ok" when none is known."""
    problems = []
    if status.hang is not None:
        process = f"rank {status.hang.rank}" if status.hang.rank is not None else "the command"
        problems.append(f"{process} silent for {status.hang.silent_s:.0f} s")
    if status.staging_error is not None:
        problems.append(status.staging_error)
    if status.oom_kills:
        problems.append(f"{status.oom_kills} killed because memory ran out")
    devices = status.sample.devices if status.sample is not None else ()
    for device in devices:
        if not device.is_healthy:
            link = "link down" if device.link_is_up is False else None
            symptoms = ", ".join(filter(None, (device.health if device.is_ill else None, link)))
            problems.append(f"device {device.index}: {symptoms}")
    return "; ".join(problems) or "ok"


def _last_fault(history: RunHistory) -> Fault | None:
    """The newest fault that ended an attempt."""
    faults = [a.ended.fault for a in history.attempts if a.ended is not None and a.ended.fault]
    return faults[-1] if faults else None


def _recoveries(history: RunHistory) -> tuple[RecoveryFacts, ...]:
    """The recoveries inside the processes of all attempts, oldest first."""
    return tuple(
        RecoveryFacts.of(view, recovery)
        for view in history.attempts
        for recovery in view.recoveries
    )


def _restored(history: RunHistory) -> tuple[RestoredState, ...]:
    """The states that attempts began with, oldest first."""
    return tuple(
        RestoredState.of(view, event)
        for view in history.attempts
        if (event := view.restored) is not None
    )


def _recent_faults(history: RunHistory) -> tuple[RecentFault, ...]:
    """The newest faults and the answer to each, newest first."""
    faults = [facts for view in history.attempts for facts in FaultFacts.of_attempt(view)]
    newest = sorted(faults, key=lambda facts: -facts.at_s)[:_NUM_FAULTS]
    return tuple(map(RecentFault.of, newest))


def _state(history: RunHistory) -> RunState:
    if history.ended is not None:
        return RunState(history.ended.outcome)
    if history.job is None:
        return RunState.NOT_STARTED
    return RunState.PAUSED if history.pause is not None else RunState.RUNNING
