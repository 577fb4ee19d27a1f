"""Step records: one JSON line per completed step, written by the first rank.

The local file is followed live by the agent; the store gets the same lines before the
checkpoint that covers them is committed, so that every kept step is on record however the
attempt ends. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed step.

    Attributes:
        step: completed optimizer steps, this one included.
        loss: mean over the global batch; JSON keeps every digit of it.
        grad_norm: before clipping.
        tokens_per_s: of all ranks together.
        mfu: model FLOP/s over peak FLOP/s, 0 to 1; None when the program does not say.
        at_s: when it was completed, seconds since the epoch.
        step_s: how long it took.
        position: global samples consumed.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    at_s: float
    step_s: float
    position: int
    epoch: int
    placement: int
    attempt: int


class MetricsLog:
    """Writes the step records of an attempt."""

    def __init__(self, path: Path, store: ObjectStore, prefix: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._store = store
        self._prefix = prefix
        self._pending: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        """Record a completed step."""
        self._pending.append(record)
        self._file.write(json.dumps({"kind": "step", **asdict(record)}) + "\n")

    def checkpoint(self, step: int) -> None:
        """Record, for those who follow the file, that a checkpoint was committed."""
        self._file.write(json.dumps({"kind": "checkpoint", "step": step}) + "\n")

    def flush(self) -> None:
        """Put the records since the last flush into the store."""
        if not self._pending:
            return
        first, last = self._pending[0].step, self._pending[-1].step
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in self._pending)
        self._store.put(f"{self._prefix}{first:08d}-{last:08d}.jsonl", lines.encode())
        self._pending = []

    def close(self) -> None:
        """Close the local file."""
        self._file.close()


def metrics_prefix(run_id: str, placement: int = 0, attempt: int = 0) -> str:
    """Where the records of a run, or of one attempt, lie in the store."""
    base = f"runs/{run_id}/metrics/"
    return f"{base}p{placement:04d}-a{attempt:04d}/" if placement else base


def kept_steps(store: ObjectStore, run_id: str) -> dict[int, StepRecord]:
    """The record of every step that was kept, by step: where a step was done again, the last."""
    kept: dict[int, StepRecord] = {}
    for info in store.list(metrics_prefix(run_id)):
        for record in _parse(store.get(info.key).decode().splitlines()):
            before = kept.get(record.step)
            attempt = (record.placement, record.attempt)
            if before is None or attempt >= (before.placement, before.attempt):
                kept[record.step] = record
    return dict(sorted(kept.items()))


def _parse(lines: Iterable[str]) -> Iterator[StepRecord]:
    for line in lines:
        yield StepRecord(**json.loads(line))


def parse_live(text: str) -> tuple[list[StepRecord], list[int]]:
    """The step records and the committed checkpoints in lines of the local file."""
    documents: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    steps = [
        StepRecord(**{k: v for k, v in d.items() if k != "kind"})
        for d in documents
        if d["kind"] == "step"
    ]
    return steps, [d["step"] for d in documents if d["kind"] == "checkpoint"]
