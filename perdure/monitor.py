"""The state of a run, from its ledger, its store and its agents on this machine.

Nothing is taken or changed: the run may be supervised by another process, or by none. Times are
seconds since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from perdure.runs import OpenAttempt
from perdure.storage.checkpoint import Tier
from perdure.training.engines.base import Snapshot
from perdure.training.files import home_folder
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.steps import kept_of
from perdure.training.journal.time_account import Account, SeenStep, account
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.ettr import Accountant
from perdure.training.reporting.rows import (
    alert_rows,
    attempt_rows,
    outcome_of,
    program_notices,
    recovery_facts,
)
from perdure.training.reporting.summary import abnormal_steps
from perdure.training.supervisor.checkpoints import node_tiers, program_saves, saves_are_known
from perdure.training.supervisor.evidence import newest_of, step_of
from perdure.training.supervisor.observing import AttemptSnapshot
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.store_outage import unwritable
from perdure.training.wire.agent import AgentStatus
from perdure.training.wire.requests import is_pause_wanted

CHECKPOINTS_PERIOD_S = 10.0  # listing them takes the store more than the rest together
ACCOUNT_SHARE = 0.1  # of the time, at most, goes into making accounts
_NUM_FAULTS = 5
_FAULT = TypeAdapter(Fault)
_PACE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run.

    Attributes:
        history: its ledger, with what the open attempt has logged since.
        document: the same for scripts.
        records: of every step that counts so far, by step.
    """

    history: RunHistory
    document: dict[str, Any]
    records: dict[int, StepRecord]
    account: Account


class RunMonitor:
    """Reads the state of one run, repeatedly; what was read once is not read again.

    Args:
        run: not taken by this process.
    """

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._accountant = Accountant(run.store, run.job.run_id)
        self._open_attempt = OpenAttempt(run)
        self._known_account: Account | None = None
        self._account_due_s = float("-inf")
        self._tiers: tuple[float, dict[str, Any]] = (float("-inf"), {})

    def status(self, *, now_s: float | None = None) -> Status:
        """The state of the run by now.

        Raises:
            StorageError: the store does not answer.
        """
        now_s = time.time() if now_s is None else now_s
        history = self._run.refresh()
        observer = self._open_attempt.observer(history)
        seen = observer.observe() if observer is not None else AttemptSnapshot(None)
        self._accountant.add_steps(seen.steps)
        _add_events(history, seen)
        every = self._accountant.records(history)
        newest = newest_of(seen.snapshot, now_s=now_s) if seen.snapshot is not None else None
        records, spent = kept_of(every), self._account(history, every, newest, now_s)
        document = {
            **_facts(self._run, history, records, seen.snapshot, now_s=now_s),
            "ettr": round(spent.known_ettr, 4) if spent.known_ettr is not None else None,
            "wall_s": round(spent.wall_s, 3),
            "time_s": {owner: round(s, 3) for owner, s in spent.seconds.items() if s > 0},
            "checkpoints": self._program_checkpoints(history) or self._checkpoints(now_s),
            "nodes": _nodes(history, seen.snapshot),
            "metrics_url": _metrics_url(seen.snapshot),
        }
        return Status(history, document, records, spent)

    def _account(
        self,
        history: RunHistory,
        records: Sequence[StepRecord],
        newest: SeenStep | None,
        now_s: float,
    ) -> Account:
        """The account; while a run of many steps goes on, perhaps an older one."""
        known = self._known_account
        if known is not None and history.ended is None and now_s < self._account_due_s:
            return known
        began_s = time.monotonic()
        made = self._known_account = account(history, records, now_s=now_s, newest=newest)
        self._account_due_s = now_s + (time.monotonic() - began_s) / ACCOUNT_SHARE
        return made

    def _program_checkpoints(self, history: RunHistory) -> dict[str, Any]:
        """Of a command that says where it saves: how many are there, and the newest."""
        if self._run.job.worker.checkpoints is None:
            return {}
        kept = [one for one in program_saves(history) if one.is_kept is not False]
        newest = max((one.step for one in kept), default=None)
        return {"program": {"newest": newest, "count": len(kept)}}

    def _checkpoints(self, now_s: float) -> dict[str, Any]:
        """Per tier how many checkpoints it holds, and the newest."""
        listed_s, known = self._tiers
        if now_s - listed_s < CHECKPOINTS_PERIOD_S:
            return known
        on_nodes = node_tiers(home_folder(), self._run.job.run_id)
        steps: dict[str, list[int]] = {tier.value: [] for tier in Tier}
        in_store = {step.step: step.tiers({}) for step in self._run.checkpoints.list_steps()}
        for step in sorted({*in_store, *on_nodes}):
            for tier in (*on_nodes.get(step, ()), *in_store.get(step, ())):
                steps[tier].append(step)
        found = {
            tier: {"newest": held[-1] if held else None, "count": len(held)}
            for tier, held in steps.items()
        }
        self._tiers = (now_s, found)
        return found


def _add_events(history: RunHistory, seen: AttemptSnapshot) -> None:
    """Add what the open attempt has logged and no supervisor has recorded yet."""
    view = history.open_attempt
    if view is None:
        return
    known = {(event.kind, event.number) for event in view.events}
    fresh = [event for event in seen.events if (event.kind, event.number) not in known]
    history.attempts[-1] = replace(view, events=(*view.events, *fresh))


def _facts(
    run: RunHandle,
    history: RunHistory,
    records: dict[int, StepRecord],
    seen: Snapshot | None,
    *,
    now_s: float,
) -> dict[str, Any]:
    """What the ledger shows; of a command, what heartbeats and output do."""
    job, pause = run.job, history.pause
    target = job.target_step
    last = records[max(records)] if records else None
    newest = newest_of(seen, now_s=now_s) if seen is not None else None
    last_s = last.at_s if last is not None else newest.at_s if newest is not None else None
    abnormal = abnormal_steps(history)
    is_supervised = history.ended is None and run.ledger.is_supervised()
    return {
        "run_id": job.run_id,
        "state": _state(history),
        "ledger_unwritable": unwritable(run.ledger, run.home, now_s=now_s),
        "supervised": is_supervised,
        "step": _step(history, last) if not job.worker.is_command else _command_step(history, seen),
        "committed_step": history.committed_step if saves_are_known(job) else None,
        "target_step": target,
        "eta_s": _eta_s(history, records, target),
        "tokens_per_s": last.tokens_per_s if last is not None else None,
        "loss": _number_of(last.loss if last is not None else None),
        "grad_norm": _number_of(last.grad_norm if last is not None else None),
        "lr": last.lr if last is not None else None,
        "last_step_age_s": round(now_s - last_s, 1) if last_s is not None else None,
        "isolated": list(history.isolated),
        "sub_healthy": len(history.sub_healthy),
        "pause_wanted": is_pause_wanted(run.store, job.run_id),
        "pause": pause.began.model_dump(include={"at_s", "step"}) if pause is not None else None,
        "attempts": [asdict(row) for row in attempt_rows(history)],
        "abnormal": asdict(abnormal) if abnormal is not None else None,
        "notices": program_notices(history),
        "recoveries": [recovery_facts(v, one) for v in history.attempts for one in v.recoveries],
        "restored": _restored(history),
        "fault": _last_fault(history),
        "faults": _last_faults(history),
        "alerts": [asdict(row) for row in alert_rows(history)],
    }


def _number_of(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _step(history: RunHistory, last: StepRecord | None) -> int:
    """The newest step; records above the newest commit are lost with their attempt."""
    return max(last.step if last is not None else 0, history.committed_step)


def _command_step(history: RunHistory, snapshot: Snapshot | None) -> int | None:
    """The newest step of a command; None where neither heartbeats nor output show one."""
    step = step_of(snapshot, None) if snapshot is not None else None
    if step is not None:
        return step
    ends = [view.ended.to_step for view in history.attempts if view.ended is not None]
    return next((one for one in reversed(ends) if one is not None), None)


def _eta_s(history: RunHistory, records: dict[int, StepRecord], target: int | None) -> float | None:
    """Until the target at the pace of the newest steps, saves included; None without a pace."""
    newest = list(records.values())[-_PACE_STEPS:]
    if target is None or history.ended is not None or not newest:
        return None
    attempt = (newest[-1].placement, newest[-1].attempt)
    # The downtime before a restart is no part of the pace.
    own = [one for one in newest if (one.placement, one.attempt) == attempt]
    first, last = own[0], own[-1]
    pace_s = (last.at_s - first.at_s + first.step_s) / (last.step - first.step + 1)
    return round(max(0, target - last.step) * pace_s, 1)


def _metrics_url(snapshot: Snapshot | None) -> str | None:
    """Where the open attempt answers Prometheus."""
    agents = snapshot.agents.values() if snapshot is not None else ()
    return next((status.metrics_url for status in agents if status.metrics_url), None)


def _nodes(history: RunHistory, snapshot: Snapshot | None) -> list[dict[str, Any]]:
    """The nodes of the run; without an answer only their names are known."""
    view = history.open_attempt
    if history.ended is not None or history.placement is None:
        return []
    if snapshot is None or view is None:
        return [{"node": m.node, "state": None} for m in history.placement.members]
    answered = [_node(status) for status in snapshot.agents.values()]
    lost = [{"node": node, "state": "lost", "health": "lost"} for node in snapshot.lost]
    busy = [{"node": n, "state": None, "health": "no answer"} for n in snapshot.unanswered]
    return [*answered, *lost, *busy]


def _node(status: AgentStatus) -> dict[str, Any]:
    return {
        "node": status.node,
        "state": status.state.value,
        "health": _health(status),
        "ranks": [
            worker.model_dump(include={"rank", "local_rank", "pid", "step", "phase", "exit_code"})
            for worker in status.known_ranks
        ],
        "shown_step": status.shown.step if status.shown is not None else None,
        "sample": status.sample.model_dump(mode="json") if status.sample is not None else None,
    }


def _health(status: AgentStatus) -> str:
    """What is wrong with a node, "ok" when nothing is known to be."""
    wrong = []
    if status.hang is not None:
        who = f"rank {status.hang.rank}" if status.hang.rank is not None else "the command"
        wrong.append(f"{who} silent for {status.hang.silent_s:.0f} s")
    if status.staging_error is not None:
        wrong.append(status.staging_error)
    if status.oom_kills:
        wrong.append(f"{status.oom_kills} killed because memory ran out")
    devices = status.sample.devices if status.sample is not None else ()
    for device in devices:
        if not device.is_healthy:
            link = "link down" if device.link_is_up is False else None
            seen = ", ".join(filter(None, (device.health if device.is_ill else None, link)))
            wrong.append(f"device {device.index}: {seen}")
    return "; ".join(wrong) or "ok"


def _last_fault(history: RunHistory) -> dict[str, Any] | None:
    """The newest fault that ended an attempt, without the fields that have their defaults."""
    faults = [a.ended.fault for a in history.attempts if a.ended is not None and a.ended.fault]
    return _FAULT.dump_python(faults[-1], mode="json", exclude_defaults=True) if faults else None


def _restored(history: RunHistory) -> list[dict[str, Any]]:
    """Where the attempts got their state from, oldest first."""
    return [
        {
            "attempt": "{}.{}".format(*view.key),
            **place.model_dump(mode="json", exclude={"kind", "number"}),
            "text": place.text,
        }
        for view in history.attempts
        if (place := view.restored) is not None
    ]


def _last_faults(history: RunHistory) -> list[dict[str, Any]]:
    """The newest faults and what was done about each, newest first."""
    found = [fault for view in history.attempts for fault in _faults_of(view)]
    return sorted(found, key=lambda fault: -fault["at_s"])[:_NUM_FAULTS]


def _faults_of(view: AttemptView) -> list[dict[str, Any]]:
    found = [
        _fault_facts(view, one.began.fault, one.began.decision.rung, outcome_of(view, one))
        for one in view.recoveries
    ]
    fault = view.ended.fault if view.ended is not None else None
    if fault is not None:
        rung = view.decision.rung if view.decision is not None else None
        found.append(_fault_facts(view, fault, rung, "ended the attempt"))
    return found


def _fault_facts(
    view: AttemptView, fault: Fault, rung: Rung | None, outcome: str
) -> dict[str, Any]:
    return {
        "at_s": fault.at_s,
        "attempt": "{}.{}".format(*view.key),
        "fault_class": fault.fault_class.value,
        "where": fault.where,
        "step": fault.step,
        "evidence": fault.evidence,
        "rung": rung.value if rung is not None else None,
        "outcome": outcome,
    }


def _state(history: RunHistory) -> str:
    if history.ended is not None:
        return history.ended.outcome
    if history.job is None:
        return "not started"
    return "paused" if history.pause is not None else "running"
