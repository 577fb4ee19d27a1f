"""How a run stands, from its ledger, its store and what its agents on this machine say.

Nothing is taken or told: the run may be supervised by another process, or by none. Times are
seconds since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from storage.checkpoint import Tier
from training.engines.base import Snapshot
from training.files import home_folder
from training.journal.accounting import account
from training.journal.events import StepRecord
from training.journal.history import AttemptView, RunHistory
from training.journal.steps import kept_of
from training.journal.wall_time import Account
from training.recovery.faults import Fault
from training.recovery.rungs import Rung
from training.supervisor.accounts import Accountant
from training.supervisor.checkpoints import node_tiers
from training.supervisor.report import alert_rows, attempt_rows, outcome_of, recovery_facts
from training.supervisor.run import Run
from training.supervisor.watch import AttemptObserver, AttemptSnapshot
from training.wire.agent import AgentStatus
from training.wire.requests import is_pause_wanted

LINES = ("run_id", "state", "step", "committed_step", "target_step", "ettr", "isolated")
CHECKPOINTS_PERIOD_S = 10.0  # listing them takes the store more than the rest together
ACCOUNT_SHARE = 0.1  # of the time, at most, goes into making accounts
_NUM_FAULTS = 5
_FAULT = TypeAdapter(Fault)
_PACE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a run.

    Attributes:
        history: what is on record, with what the living attempt has noted since.
        document: the same as a script reads it.
        records: of every step that counts so far, by step.
    """

    history: RunHistory
    document: dict[str, Any]
    records: dict[int, StepRecord]
    account: Account


class Looker:
    """Looks at one run, again and again; what has been read is not read again.

    Args:
        run: not taken by this process.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._accountant = Accountant(run.store, run.job.run_id)
        self._observer: tuple[tuple[int, int], AttemptObserver] | None = None
        self._known_account: Account | None = None
        self._account_due_s = float("-inf")
        self._tiers: tuple[float, dict[str, Any]] = (float("-inf"), {})

    def look(self, *, now_s: float | None = None) -> Status:
        """How the run stands.

        Raises:
            StorageError: the store does not answer.
        """
        now_s = time.time() if now_s is None else now_s
        history = self._run.refresh()
        sight = self._sight(history)
        self._accountant.saw(sight.steps)
        _add_events(history, sight)
        every = self._accountant.records(history)
        records, told = kept_of(every), self._account(history, every, now_s)
        document = {
            **_facts(self._run, history, records, now_s=now_s),
            "ettr": round(told.ettr, 4),
            "wall_s": round(told.wall_s, 3),
            "time_s": {owner: round(s, 3) for owner, s in told.seconds.items() if s > 0},
            "checkpoints": self._checkpoints(now_s),
            "nodes": _nodes(history, sight.snapshot),
            "metrics_url": _metrics_url(sight.snapshot),
        }
        return Status(history, document, records, told)

    def _sight(self, history: RunHistory) -> AttemptSnapshot:
        view = history.open_attempt
        if view is None or history.ended is not None:
            return AttemptSnapshot(None)
        if self._observer is None or self._observer[0] != view.key:
            observer = self._run.observer()
            if observer is None:
                return AttemptSnapshot(None)
            self._observer = (view.key, observer)
        return self._observer[1].look()

    def _account(self, history: RunHistory, records: Sequence[StepRecord], now_s: float) -> Account:
        """The account; of a run of many steps an older one while it goes on."""
        known = self._known_account
        if known is not None and history.ended is None and now_s < self._account_due_s:
            return known
        began_s = time.monotonic()
        told = self._known_account = account(history, records, now_s=now_s)
        self._account_due_s = now_s + (time.monotonic() - began_s) / ACCOUNT_SHARE
        return told

    def _checkpoints(self, now_s: float) -> dict[str, Any]:
        """Per tier how many checkpoints it holds, and the newest."""
        looked_s, known = self._tiers
        if now_s - looked_s < CHECKPOINTS_PERIOD_S:
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


def _add_events(history: RunHistory, sight: AttemptSnapshot) -> None:
    """What the living attempt noted and nobody has put on record yet."""
    view = history.open_attempt
    if view is None:
        return
    known = {(event.kind, event.number) for event in view.events}
    fresh = [event for event in sight.events if (event.kind, event.number) not in known]
    history.attempts[-1] = replace(view, events=(*view.events, *fresh))


def _facts(
    run: Run, history: RunHistory, records: dict[int, StepRecord], *, now_s: float
) -> dict[str, Any]:
    """What does not depend on a look at agents."""
    job, pause = run.job, history.pause
    target = None if job.worker.is_command else job.steps
    last = records[max(records)] if records else None
    step = max(last.step if last is not None else 0, history.committed_step)
    is_supervised = history.ended is None and run.ledger.is_supervised()
    return {
        "run_id": job.run_id,
        "state": _state(history),
        "supervised": is_supervised,
        "step": step,
        "committed_step": history.committed_step,
        "target_step": target,
        "eta_s": _eta_s(history, records, target),
        "tokens_per_s": last.tokens_per_s if last is not None else None,
        "loss": last.loss if last is not None else None,
        "last_step_age_s": round(now_s - last.at_s, 1) if last is not None else None,
        "isolated": list(history.isolated),
        "sub_healthy": len(history.sub_healthy),
        "pause_wanted": is_pause_wanted(run.store, job.run_id),
        "pause": pause.began.model_dump(include={"at_s", "step"}) if pause is not None else None,
        "attempts": [asdict(row) for row in attempt_rows(history)],
        "recoveries": _recoveries(history),
        "fault": last_fault(history),
        "faults": last_faults(history),
        "alerts": [asdict(row) for row in alert_rows(history)],
    }


def _eta_s(history: RunHistory, records: dict[int, StepRecord], target: int | None) -> float | None:
    """Until the target at the pace of the newest steps, saves included; None without a pace."""
    newest = list(records.values())[-_PACE_STEPS:]
    if target is None or history.ended is not None or not newest:
        return None
    attempt = (newest[-1].placement, newest[-1].attempt)
    own = [one for one in newest if (one.placement, one.attempt) == attempt]
    first, last = own[0], own[-1]
    pace_s = (last.at_s - first.at_s + first.step_s) / len(own)
    return round(max(0, target - last.step) * pace_s, 1)


def _metrics_url(snapshot: Snapshot | None) -> str | None:
    """Where the living attempt answers Prometheus."""
    agents = snapshot.agents.values() if snapshot is not None else ()
    return next((status.metrics_url for status in agents if status.metrics_url), None)


def _nodes(history: RunHistory, snapshot: Snapshot | None) -> list[dict[str, Any]]:
    """The nodes that the run stands on; without an answer only their names are known."""
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
            {
                "rank": worker.rank,
                "step": worker.step,
                "phase": worker.phase,
                "exit_code": worker.exit_code,
            }
            for worker in status.workers
        ],
        "sample": status.sample.model_dump(mode="json") if status.sample is not None else None,
    }


def _health(status: AgentStatus) -> str:
    """What is wrong with a node, "ok" when nothing is known to be."""
    wrong = []
    if status.hang is not None:
        wrong.append(f"rank {status.hang.rank} silent for {status.hang.silent_s:.0f} s")
    if status.staging_error is not None:
        wrong.append(status.staging_error)
    if status.oom_kills:
        wrong.append(f"{status.oom_kills} killed for want of memory")
    devices = status.sample.devices if status.sample is not None else ()
    for device in devices:
        if not device.is_healthy:
            link = "link down" if device.link_is_up is False else device.health
            wrong.append(f"device {device.index}: {link}")
    return "; ".join(wrong) or "ok"


def person_lines(document: dict[str, Any]) -> list[str]:
    """The same for a person, without tables."""
    return [*(f"{name}: {document[name]}" for name in LINES), *notices(document)]


def notices(document: dict[str, Any]) -> list[str]:
    """What a person should know beyond the numbers."""
    lines = []
    if document["state"] == "running" and not document["supervised"]:
        lines.append("nobody supervises it; `perdure run` with its job file takes it up again")
    if document["sub_healthy"]:
        lines.append(
            f"sub-healthy: links broke {document['sub_healthy']} times under collectives, which "
            "were done again; look at the network between its nodes"
        )
    if document["pause"] is not None:
        lines.append(f"paused at step {document['pause']['step']}{_how_on(document)}")
    elif document["pause_wanted"]:
        lines.append(f"asked to pause{_how_on(document)}")
    recoveries = document["recoveries"]
    if recoveries:
        last = recoveries[-1]
        went = f"{last['fault_class']} -> {last['rung']}: {last['outcome']}"
        lines.append(f"recoveries inside the processes: {len(recoveries)}, the last: {went}")
    return lines


def last_fault(history: RunHistory) -> dict[str, Any] | None:
    """The newest fault that ended an attempt, without the fields that say nothing."""
    faults = [a.ended.fault for a in history.attempts if a.ended is not None and a.ended.fault]
    return _FAULT.dump_python(faults[-1], mode="json", exclude_defaults=True) if faults else None


def last_faults(history: RunHistory, limit: int = _NUM_FAULTS) -> list[dict[str, Any]]:
    """The newest faults and what was done about each, newest first."""
    found = [fault for view in history.attempts for fault in _faults_of(view)]
    return sorted(found, key=lambda fault: -fault["at_s"])[:limit]


def _faults_of(view: AttemptView) -> list[dict[str, Any]]:
    found = [
        _fault_told(
            view, recovery.began.fault, recovery.began.decision.rung, outcome_of(view, recovery)
        )
        for recovery in view.recoveries
    ]
    fault = view.ended.fault if view.ended is not None else None
    if fault is not None:
        rung = view.decision.rung if view.decision is not None else None
        found.append(_fault_told(view, fault, rung, "ended the attempt"))
    return found


def _fault_told(view: AttemptView, fault: Fault, rung: Rung | None, outcome: str) -> dict[str, Any]:
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


def _recoveries(history: RunHistory) -> list[dict[str, Any]]:
    return [
        recovery_facts(view, recovery) for view in history.attempts for recovery in view.recoveries
    ]


def _how_on(document: dict[str, Any]) -> str:
    return f"; `perdure resume {document['run_id']}` has it go on"
