"""Step records: one JSON line per completed step, written by the first rank.

The local file is followed live by the agent; the store gets the same lines before the
checkpoint that covers them is committed, so that every kept step is on record however the
attempt ends. Into the local file the checkpoint server also writes which checkpoints are committed,
and the coordinator its notes. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from storage.objects import ObjectInfo, ObjectStore
from training.journal.events import NOTE, NOTE_KINDS, AnyNote


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


@dataclass(frozen=True, slots=True)
class Live:
    """What lines of a local file tell, each kind in the order of its lines.

    Attributes:
        steps: completed steps; one that was done again is there again.
        checkpoints: steps whose checkpoints were committed.
        notes: of the coordinator.
    """

    steps: tuple[StepRecord, ...] = ()
    checkpoints: tuple[int, ...] = ()
    notes: tuple[AnyNote, ...] = ()


class MetricsLog:
    """Writes the step records of an attempt.

    Attributes:
        last_step: the step of the newest record, 0 before the first.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._prefix = prefix
        self._pending: list[StepRecord] = []
        self.last_step = 0

    @classmethod
    def resumed(cls, path: Path, prefix: str) -> Self:
        """Go on with the file of a first rank that is no more; a new file when there is none.

        Records beyond the newest commit that the file tells of are pending: a save that held
        them may not have come to its end, and twice in the store is no harm.

        Args:
            path: local file.
            prefix: of the records in the store.
        """
        live = parse_live(_end_last_line(path))
        # A commit is told when it is done, later than steps that it does not hold.
        committed = max(live.checkpoints, default=0)
        log = cls(path, prefix)
        for record in live.steps:
            log._remember(record)
        log._pending = [record for record in log._pending if record.step > committed]
        return log

    def step(self, record: StepRecord) -> None:
        """Record a completed step."""
        self._remember(record)
        self._file.write(json.dumps({"kind": "step", **asdict(record)}) + "\n")

    def _remember(self, record: StepRecord) -> None:
        # A recovery may have gone back: records of steps that are done again are void.
        while self._pending and self._pending[-1].step >= record.step:
            self._pending.pop()
        self._pending.append(record)
        self.last_step = record.step

    def checkpoint(self, step: int) -> None:
        """Record, for those who follow the file, that a checkpoint was committed."""
        self._file.write(json.dumps({"kind": "checkpoint", "step": step}) + "\n")

    def take(self) -> dict[str, str]:
        """The records since the last call as an object for the store: its key and its text."""
        if not self._pending:
            return {}
        first, last = self._pending[0].step, self._pending[-1].step
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in self._pending)
        self._pending = []
        return {f"{self._prefix}{first:08d}-{last:08d}.jsonl": lines}

    def close(self) -> None:
        """Close the local file."""
        self._file.close()


def metrics_prefix(run_id: str, placement: int = 0, attempt: int = 0) -> str:
    """Where the records of a run, or of one attempt, lie in the store."""
    base = f"runs/{run_id}/metrics/"
    return f"{base}p{placement:04d}-a{attempt:04d}/" if placement else base


def kept_steps(store: ObjectStore, run_id: str) -> dict[int, StepRecord]:
    """The record of every step that was kept, by step: where a step was done again, the last."""
    return kept_of(StepReader(store, run_id).read())


def kept_of(records: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """Of every step the record that was kept: where it was done again, the last."""
    kept: dict[int, StepRecord] = {}
    for record in records:
        before = kept.get(record.step)
        if before is None or _age(record) >= _age(before):
            kept[record.step] = record
    return dict(sorted(kept.items()))


class StepReader:
    """Reads every step record in the store, those of steps that were lost too.

    An object that has been read is read again only when it was written again.
    """

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._prefix = metrics_prefix(run_id)
        self._known: dict[str, ObjectInfo] = {}
        self._records: dict[tuple[int, int, int, float], StepRecord] = {}

    def read(self) -> list[StepRecord]:
        """Every record there is by now, each once."""
        for info in self._store.list(self._prefix):
            if self._known.get(info.key) == info:
                continue
            for record in _parse(self._store.get(info.key).decode().split("\n")):
                self._records[identity_of(record)] = record
            self._known[info.key] = info
        return list(self._records.values())


def identity_of(record: StepRecord) -> tuple[int, int, int, float]:
    """What tells one doing of a step from another."""
    return record.placement, record.attempt, record.step, record.at_s


def _age(record: StepRecord) -> tuple[int, int, float]:
    # Within an attempt a recovery may go back; clocks of different nodes are not compared.
    return record.placement, record.attempt, record.at_s


def parse_live(text: str) -> Live:
    """What lines of the local file tell.

    A line that is cut off, or of a kind that is not known here, tells nothing: processes are
    killed while they write, and whoever follows the file must live on.
    """
    told = list(_documents(text.split("\n")))
    return Live(
        steps=tuple(one for one in told if isinstance(one, StepRecord)),
        checkpoints=tuple(one for one in told if isinstance(one, int)),
        notes=tuple(one for one in told if not isinstance(one, (StepRecord, int))),
    )


def _parse(lines: Iterable[str]) -> Iterator[StepRecord]:
    for line in lines:
        if line:
            yield StepRecord(**json.loads(line))


def _documents(lines: Iterable[str]) -> Iterator[StepRecord | int | AnyNote]:
    for line in lines:
        # What is no JSON, misses a field, or has one too many.
        with suppress(ValueError, KeyError, TypeError):
            yield _told(json.loads(line))


def _told(document: dict[str, Any]) -> StepRecord | int | AnyNote:
    kind = document["kind"]
    if kind in NOTE_KINDS:
        return NOTE.validate_python(document)
    if kind == "checkpoint":
        return int(document["step"])
    if kind == "step":
        return StepRecord(**{k: v for k, v in document.items() if k != "kind"})
    raise ValueError(f"a line of kind {kind!r}")


def _end_last_line(path: Path) -> str:
    """The file's text; a line that its writer did not finish is ended: the next one is whole."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return text
