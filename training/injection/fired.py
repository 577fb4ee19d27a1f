"""What the faults of a job leave behind when they fire; apart, so that a reader loads no torch."""

from __future__ import annotations

import json
from pathlib import Path

from storage.objects import ObjectStore


def fired_prefix(run_id: str) -> str:
    """Where the faults of a run leave word in its store: an object each time, its time inside."""
    return f"runs/{run_id}/drills/"


def fired_at_s(store: ObjectStore, run_id: str) -> dict[int, list[float]]:
    """When each fault of a job fired, by its index among them; seconds since the epoch."""
    fired: dict[int, list[float]] = {}
    for info in store.list(fired_prefix(run_id)):
        at_s = float(json.loads(store.get(info.key))["at_s"])
        fired.setdefault(number_of(info.key), []).append(at_s)
    return fired


def number_of(key: str) -> int:
    """The index of the fault that an object tells of."""
    return int(key.rpartition("/")[2].partition("-")[0])


def fired_path(folder: Path, number: int) -> Path:
    """Where a fault of a job leaves word that it fired: one JSON line each time."""
    return folder / f"drill-{number}.jsonl"
