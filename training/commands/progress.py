"""What a program's output shows of its training: steps, losses, norms.

Pure: lines in, step records out. The formats that are known are in progress_formats.toml, others
are the job's own patterns. What one line shows belongs together; a loss that stands in a line
without a step is that of the newest step. Steps are completed optimizer steps, whatever number the
program prints with them; times are seconds since the epoch.

The steps of a command, read from what it prints on this node while it runs.

A thread follows the logs of the attempt. What it finds is in the attempt's log, as the records of
a session are, and from there in the store: every minute, and when the attempt has ended. Sizes are
bytes; times are seconds since the epoch, in heartbeats nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore
from perdure.training.commands.checkpoint_watch import upload_periodically
from perdure.training.config.command import ProgressKind, ProgressSpec
from perdure.training.journal import attempt_log
from perdure.training.journal.attempt_log import AttemptLog
from perdure.training.journal.events import StepRecord
from perdure.training.journal.steps import UnsavedSteps, metrics_prefix
from perdure.training.liveness.heartbeat import Heartbeat, Phase
from perdure.training.wire.agent import StartOrder
from perdure.training.wire.agent_status import ShownStep

FORMATS_FILE = "progress_formats.toml"
# Longer lines are no lines of a step, and patterns of the job may take long on them.
MAX_LINE = 4096
# How many shown steps a rank may be behind another one that prints, too.
MAX_LATE = 10
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ProgressFormat(FrozenModel):
    """How one kind of program prints its steps.

    Attributes:
        source: what prints it.
        patterns: each is searched in every line.
        counts_from: the number that it prints with the first completed step.
        example: lines, and what they show.
    """

    kind: ProgressKind
    source: str
    patterns: tuple[str, ...]
    counts_from: int = 1
    example: tuple[dict[str, Any], ...] = Field(min_length=1)


@cache
def formats() -> Mapping[ProgressKind, ProgressFormat]:
    """The formats that are known."""
    text = (resources.files("perdure.training.commands") / FORMATS_FILE).read_text("utf-8")
    entries = map(ProgressFormat.model_validate, tomllib.loads(text)["format"])
    return {entry.kind: entry for entry in entries}


class LineReader:
    """Reads lines of one format.

    Args:
        spec: of the job.
    """

    def __init__(self, spec: ProgressSpec) -> None:
        program = formats()[spec.kind] if spec.kind is not None else None
        patterns = program.patterns if program is not None else spec.patterns
        self._patterns = [re.compile(pattern) for pattern in patterns]
        counts_from = program.counts_from if program is not None else spec.counts_from
        self._offset = 1 - (1 if counts_from is None else counts_from)

    def read(self, line: str) -> dict[str, float]:
        """What a line shows, by name; nothing of most lines.

        Times are in seconds, ratios 0 to 1, and `step` counts completed steps.
        """
        if len(line) > MAX_LINE:
            return {}
        line = _COLOURS.sub("", line)
        numbers: dict[str, float] = {}
        for pattern in self._patterns:
            match = pattern.search(line)
            for name, text in match.groupdict().items() if match is not None else ():
                value = _number(text) if text is not None else None
                if value is not None:
                    numbers[name] = value
        return self._in_units(numbers) if numbers else numbers

    def _in_units(self, numbers: dict[str, float]) -> dict[str, float]:
        if {"batch", "batches", "epoch"} <= numbers.keys():
            numbers["step"] = numbers["epoch"] * numbers.pop("batches") + numbers.pop("batch")
        if "step" in numbers:
            numbers["step"] += self._offset
        if "step_ms" in numbers:
            numbers["step_s"] = numbers.pop("step_ms") / 1000.0
        if "mfu_percent" in numbers:
            numbers["mfu"] = numbers.pop("mfu_percent") / 100.0
        return numbers


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


@dataclass(slots=True)
class StepTracker:
    """The steps that the output of one attempt has shown on one node.

    Attributes:
        read: what a line shows.
        placement: of the attempt, for its records.
        attempt: likewise.
        num_devices: of all nodes together.
        step: the newest step, None before the first.
        stepped_s: when it was shown.
        stride: from one step that was shown to the next.
        target: where the program says that it ends.
        num_shown: how many different steps were shown.
    """

    read: Callable[[str], Mapping[str, float]]
    placement: int
    attempt: int
    num_devices: int
    step: int | None = None
    stepped_s: float = 0.0
    stride: int = 1
    target: int | None = None
    num_shown: int = 0
    _recorded: int = 0
    _recorded_s: float | None = None
    _lacks_loss: bool = False
    _shows_loss: bool = False

    def take(self, lines: Iterable[str], *, since_s: float, at_s: float) -> list[StepRecord]:
        """Read on. The records of steps that are new.

        Args:
            lines: what was printed since the last call; of streams whose order is not known, those
                with a step come last.
            since_s: when that was; steps of one call lie evenly between then and now.
            at_s: the time.
        """
        readings = [shown for line in lines if (shown := self.read(line))]
        self._shows_loss = self._shows_loss or any("loss" in shown for shown in readings)
        steps = [reading for reading in readings if _step(reading) is not None]
        # A line without a step was printed beside those with one, and its order among them is not
        # known: only the newest can be told to be of the newest step.
        apart = [reading for reading in readings if _step(reading) is None]
        records = []
        for number, shown in enumerate(steps, start=1):
            shown_s = since_s + (at_s - since_s) * number / len(steps)
            records += self._take_step(shown, shown_s)
        if apart and self.step is not None:
            records += self._record(apart[-1], at_s)
        return records

    def _take_step(self, shown: Mapping[str, float], at_s: float) -> list[StepRecord]:
        step = _step(shown)
        assert step is not None  # noqa: S101 asked for those with a step
        if shown.get("target", 0) > 0:
            self.target = round(shown["target"])
        if self.step is not None and step != self.step:
            if step > self.step:
                self.stride = step - self.step
            elif step > self.step - MAX_LATE * self.stride:
                return []
            else:  # its own launcher has started it again, from a checkpoint
                self._recorded, self._recorded_s = step - 1, None
        if step != self.step:
            self.step, self.stepped_s = step, at_s
            self.num_shown += 1
        return self._record(shown, self.stepped_s)

    def _record(self, shown: Mapping[str, float], at_s: float) -> list[StepRecord]:
        """Of the newest step, unless it has one already, or is to have one with its loss."""
        assert self.step is not None  # noqa: S101 set before
        has_loss = "loss" in shown
        is_due = self.step > self._recorded or (self.step == self._recorded and self._lacks_loss)
        if not is_due or (not has_loss and (self._shows_loss or self.step == self._recorded)):
            return []
        record = self._made(shown, at_s)
        self._recorded, self._recorded_s, self._lacks_loss = self.step, at_s, not has_loss
        return [record]

    def _made(self, shown: Mapping[str, float], at_s: float) -> StepRecord:
        assert self.step is not None  # noqa: S101 set before
        since = self.step - self._recorded
        took_s = shown.get("step_s")
        if took_s is None and self._recorded_s is not None and since > 0:
            took_s = max(0.0, at_s - self._recorded_s) / since
        speed = shown.get("tokens_per_s")
        if speed is None and "device_tokens_per_s" in shown:
            speed = shown["device_tokens_per_s"] * self.num_devices
        samples, epoch = shown.get("samples"), shown.get("epoch")
        return StepRecord(
            step=self.step,
            loss=shown.get("loss"),
            grad_norm=shown.get("grad_norm"),
            lr=shown.get("lr"),
            tokens_per_s=speed,
            mfu=shown.get("mfu"),
            at_s=at_s,
            step_s=took_s or 0.0,
            position=round(samples) if samples is not None else None,
            epoch=round(epoch) if epoch is not None else None,
            placement=self.placement,
            attempt=self.attempt,
        )


def _step(shown: Mapping[str, float]) -> int | None:
    step = shown.get("step")
    return round(step) if step is not None and math.isfinite(step) and step >= 0 else None


LOOK_S = 0.5
KEEP_S = 60.0
MAX_READ_BYTES = 4 << 20  # at one look; of a program that prints more, the older part is left out
MAX_REST_CHARS = 64 << 10
_log = logging.getLogger("perdure.agent")


@dataclass(slots=True)
class GrowingLog:
    """Follows one stream of a process.

    A bar that is drawn anew ends its line only with the next one: what stands still after a return
    counts as a line.

    Attributes:
        path: where it goes.
        offset: where the attempt's part of it begins.
    """

    path: Path
    offset: int
    _unfinished: str = ""
    _bar: str = ""

    @classmethod
    def from_its_end(cls, path: Path) -> GrowingLog:
        """Follow what is written from now on."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self) -> Iterator[str]:
        """What is new."""
        text = self._read()
        if not text:
            if self._unfinished.startswith("\r") and self._unfinished != self._bar:
                self._bar = self._unfinished
                yield self._unfinished.lstrip("\r")
            return
        # The separators stay in front of what follows them.
        *whole, self._unfinished = re.split(r"(?=[\r\n])", self._unfinished + text)
        self._unfinished = self._unfinished[-MAX_REST_CHARS:]
        for line in whole:
            if line != self._bar and line.strip():
                yield line.strip("\r\n")

    def _read(self) -> str:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size - self.offset > MAX_READ_BYTES:
                    self.offset, self._unfinished = size - MAX_READ_BYTES, ""
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return ""  # not there yet; one that is out of reach for a while is read later
        self.offset += len(data)
        return data.decode("utf-8", "replace")


@dataclass(slots=True)
class StepFollower:
    """Follows the output of one attempt on this node.

    Attributes:
        steps: what was shown.
        logs: of the processes that the agent has started, stdout first.
        file: log of the attempt.
        unsaved: records that the store does not have.
    """

    steps: StepTracker
    logs: Sequence[GrowingLog]
    file: Path
    unsaved: UnsavedSteps
    _looked_s: float = field(default_factory=time.time)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _keeping: threading.Lock = field(default_factory=threading.Lock)
    _pending: dict[str, str] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _log: AttemptLog | None = None

    @classmethod
    def of(cls, order: StartOrder, folder: Path, paths: Sequence[Path]) -> StepFollower | None:
        """Of an attempt that is about to start; None where its job does not ask for it.

        Args:
            order: to start it.
            folder: of the attempt.
            paths: of its output, stdout first.
        """
        job = order.job
        if job.worker.progress is None:
            return None
        reader = LineReader(job.worker.progress)
        devices = order.num_nodes * order.slots_per_node
        steps = StepTracker(
            reader.read, order.placement, order.attempt, devices, target=job.target_step
        )
        prefix = metrics_prefix(job.run_id, order.placement, order.attempt)
        logs = [GrowingLog.from_its_end(path) for path in paths]
        return cls(steps, logs, folder / attempt_log.FILE_NAME, UnsavedSteps(prefix))

    def start(self, open_store: Callable[[], ObjectStore]) -> None:
        """Follow it from now on, until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()
        upload_periodically(
            self.keep, open_store,
            subject="step records are", every_s=KEEP_S, is_over=self._is_over,
        )  # fmt: skip

    def finish(self) -> None:
        """Read what was printed last, once; nothing is printed any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.look()
            self.look()  # a bar that stands still by now

    def look(self) -> None:
        """Read on."""
        with self._lock:
            # A step that one stream shows, and the loss that another one does, are of one moment.
            lines = [line for log in self.logs for line in log.lines()]
            since_s, self._looked_s = self._looked_s, time.time()
            for record in self.steps.take(lines, since_s=since_s, at_s=self._looked_s):
                self.unsaved.add(record)
                self._put_on_record(record)

    def _put_on_record(self, record: StepRecord) -> None:
        try:
            self._log = self._log or AttemptLog(self.file)
            self._log.append(record)
        except OSError as error:  # the run goes on without
            _log.warning(f"step {record.step} is not on record: {error}")

    def keep(self, store: ObjectStore) -> None:
        """Put records into the store that it does not have.

        Raises:
            StorageError: it is away; they are put again the next time.
        """
        with self._keeping:
            with self._lock:
                self._pending |= self.unsaved.take()
                pending = dict(self._pending)
            for key, text in pending.items():
                store.put(key, text.encode())
                with self._lock:
                    del self._pending[key]

    @property
    def newest(self) -> ShownStep | None:
        """The newest step; None before the first."""
        step = self.steps.step
        if step is None:
            return None
        age_s = max(0.0, time.time() - self.steps.stepped_s)
        return ShownStep(step=step, age_s=age_s, target=self.steps.target)

    def beat(self) -> Heartbeat | None:
        """The heartbeat that the output stands for; None before two steps, which give a pace."""
        step, target = self.steps.step, self.steps.target
        if step is None or self.steps.num_shown < 2:
            return None
        is_done = target is not None and step >= target
        age_ns = round(max(0.0, time.time() - self.steps.stepped_s) * 1e9)
        at_ns = time.monotonic_ns() - age_ns
        phase = Phase.DONE if is_done else Phase.STEP
        return Heartbeat(
            0, phase, 0, step, 0, 0, beat_ns=at_ns, stepped_ns=at_ns, stride=self.steps.stride
        )

    def _follow(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look()
