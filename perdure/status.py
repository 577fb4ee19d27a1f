"""How a run stands, from its ledger and its store alone."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from storage.objects import ObjectStore
from training.control import is_pause_wanted
from training.job import Job
from training.ledger import Ledger
from training.policy.history import RunHistory
from training.runtime.metrics import kept_steps
from training.supervisor.report import attempt_rows, effective_ratio, recovery_facts

LINES = ("run_id", "state", "committed_step", "target_step", "ettr", "isolated")


def status_of(job: Job, store: ObjectStore) -> tuple[RunHistory, dict[str, Any]]:
    """What is on record, and the same as a script reads it."""
    history = Ledger(store, job.run_id).read()
    kept = kept_steps(store, job.run_id)
    recoveries = _recoveries(history)
    pause = history.pause
    document = {
        "run_id": job.run_id,
        "state": _state(history),
        "committed_step": history.committed_step,
        "target_step": None if job.worker.is_command else job.steps,
        "ettr": round(effective_ratio(history, kept, now_s=time.time()), 4),
        "isolated": list(history.isolated),
        "pause_wanted": is_pause_wanted(store, job.run_id),
        "pause": pause.began.model_dump(include={"at_s", "step"}) if pause is not None else None,
        "attempts": [asdict(row) for row in attempt_rows(history)],
        "recoveries": recoveries,
        "fault": last_fault(history),
    }
    return history, document


def person_lines(document: dict[str, Any]) -> list[str]:
    """The same for a person, without the attempts and the last fault."""
    lines = [f"{name}: {document[name]}" for name in LINES]
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
    return faults[-1].model_dump(mode="json", exclude_defaults=True) if faults else None


def _state(history: RunHistory) -> str:
    if history.ended is not None:
        return history.ended.outcome
    return "paused" if history.pause is not None else "running"


def _recoveries(history: RunHistory) -> list[dict[str, Any]]:
    return [recovery_facts(view, mending) for view in history.attempts for mending in view.mendings]


def _how_on(document: dict[str, Any]) -> str:
    return f"; `perdure resume {document['run_id']}` has it go on"
