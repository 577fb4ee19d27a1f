"""The steps of a command, read from its output on this node: steps, losses, norms.

A thread follows the logs of the attempt. It writes the same records as a session into the attempt's
log, and from there into the store: every minute, and when the attempt has ended. The formats of
known programs are in progress_formats.toml, others are the job's own patterns. Numbers in a line
belong together; a loss in a line without a step belongs to the newest step.

Steps are completed optimizer steps, whatever number the program prints with them. Sizes are bytes;
times are seconds since the epoch, in heartbeats nanoseconds of CLOCK_MONOTONIC.
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
# Longer lines show no step, and patterns of the job may take long on them.
MAX_LINE = 4096
# How many shown steps a rank may be behind another rank that prints.
MAX_LATE = 10
POLL_S = 0.5
UPLOAD_S = 60.0
MAX_READ_BYTES = 4 << 20  # at one poll; the older part of longer output is skipped
MAX_UNFINISHED_CHARS = 64 << 10
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_log = logging.getLogger("perdure.agent")


class ProgressFormat(FrozenModel):
    """Format in which one kind of program prints its steps.

    Attributes:
        source: program that prints it.
        patterns: patterns that are searched in every line.
        counts_from: number that the program prints with the first completed step.
        epochs_from: number that the program prints for the first epoch.
        example: lines, and what they show.
    """

    kind: ProgressKind
    source: str
    patterns: tuple[str, ...]
    counts_from: int = 1
    epochs_from: int = 0
    example: tuple[dict[str, Any], ...] = Field(min_length=1)


@cache
def formats() -> Mapping[ProgressKind, ProgressFormat]:
    """Read the formats of known programs."""
    text = (resources.files("perdure.training.commands") / FORMATS_FILE).read_text("utf-8")
    entries = map(ProgressFormat.model_validate, tomllib.loads(text)["format"])
    return {entry.kind: entry for entry in entries}


class LineReader:
    """Reader of lines in one format, as the job names it."""

    def __init__(self, spec: ProgressSpec) -> None:
        program = formats()[spec.kind] if spec.kind is not None else None
        patterns = program.patterns if program is not None else spec.patterns
        self._patterns = [re.compile(pattern) for pattern in patterns]
        counts_from = program.counts_from if program is not None else spec.counts_from
        self._offset = 1 - (1 if counts_from is None else counts_from)
        self._epochs_from = program.epochs_from if program is not None else 0
        self._steps_per_epoch = spec.steps_per_epoch
        self._epoch = 0.0
        self._last_batch = 0.0

    def read(self, line: str) -> dict[str, float]:
        """Return the numbers that a line shows, by name; most lines show none.

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
        if {"batch", "epoch"} <= numbers.keys():
            batch, epoch = numbers.pop("batch"), numbers["epoch"] - self._epochs_from
            batches = numbers.pop("batches", None) or self._count_batches(epoch, batch)
            if batches is None and epoch:
                return {}  # the length of an epoch is not known yet
            numbers["step"] = epoch * (batches or 0) + batch
            if batches is not None and "epochs" in numbers:
                numbers["target"] = numbers["epochs"] * batches
        numbers.pop("epochs", None)
        if "step" in numbers:
            numbers["step"] += self._offset
        if "step_ms" in numbers:
            numbers["step_s"] = numbers.pop("step_ms") / 1000.0
        if "mfu_percent" in numbers:
            numbers["mfu"] = numbers.pop("mfu_percent") / 100.0
        return numbers

    def _count_batches(self, epoch: float, batch: float) -> float | None:
        """Return the steps of an epoch, where no line has them: the last step of one that ended."""
        if self._steps_per_epoch is None and epoch > self._epoch and self._last_batch:
            self._steps_per_epoch = round(self._last_batch)
        if epoch >= self._epoch:
            self._last_batch = batch if epoch > self._epoch else max(batch, self._last_batch)
            self._epoch = epoch
        return self._steps_per_epoch


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


@dataclass(slots=True)
class StepTracker:
    """The steps that the output of one attempt has shown on one node.

    Attributes:
        read: returns the numbers that a line shows.
        num_devices: devices of all nodes together.
        step: the newest step, None before the first.
        stepped_s: when that step was shown.
        alive_s: when another bar, such as an evaluation's, went on; 0: never.
        stride: steps from one that was shown to the next.
        target: last step, as the program prints it.
        num_shown: how many different steps were shown.
        first: the first step with a record, None before it.
    """

    read: Callable[[str], Mapping[str, float]]
    placement: int
    attempt: int
    num_devices: int
    step: int | None = None
    stepped_s: float = 0.0
    alive_s: float = 0.0
    stride: int = 1
    target: int | None = None
    num_shown: int = 0
    first: StepRecord | None = None
    _recorded: int = 0
    _recorded_s: float | None = None
    _lacks_loss: bool = False
    _shows_loss: bool = False
    _printed_target: int | None = None
    _other_step: int | None = None

    def take(self, lines: Iterable[str], *, since_s: float, at_s: float) -> list[StepRecord]:
        """Read new lines. Returns the records of new steps.

        Args:
            lines: lines since the last call, whose order among several streams is not known.
            since_s: when the last call was; steps of this call lie evenly between then and now.
            at_s: the time.
        """
        shown_lines = [shown for line in lines if (shown := self.read(line))]
        readings = [shown for shown in shown_lines if not self._is_of_other_bar(shown)]
        other_steps = [_step(shown) for shown in shown_lines if self._is_of_other_bar(shown)]
        if other_steps and other_steps[-1] != self._other_step:
            self._other_step, self.alive_s = other_steps[-1], at_s
        self._shows_loss = self._shows_loss or any("loss" in shown for shown in readings)
        steps = [(s, reading) for reading in readings if (s := _step(reading)) is not None]
        # The order of lines with and without a step is not known: only the newest line without a
        # step belongs to the newest step for sure.
        apart = [reading for reading in readings if _step(reading) is None]
        records = []
        for number, (step, shown) in enumerate(steps, start=1):
            shown_s = since_s + (at_s - since_s) * number / len(steps)
            records += self._take_step(step, shown, shown_s)
        if apart and self.step is not None:
            records += self._record(self.step, apart[-1], at_s)
        return records

    def _take_step(self, step: int, shown: Mapping[str, float], at_s: float) -> list[StepRecord]:
        if shown.get("target", 0) > 0:
            target = round(shown["target"])
            if self._printed_target not in (None, target):  # the one before was another bar
                self.step, self.stride = None, 1
                self._recorded, self._recorded_s = step - 1, None
            self.target = self._printed_target = target
        if self.step is not None and step != self.step:
            if step > self.step:
                self.stride = step - self.step
            elif step > self.step - MAX_LATE * self.stride:
                return []
            else:  # its own launcher has restarted it from a checkpoint
                self._recorded, self._recorded_s = step - 1, None
        if step != self.step:
            self.step, self.stepped_s = step, at_s
            self.num_shown += 1
        return self._record(step, shown, self.stepped_s)

    def _is_of_other_bar(self, shown: Mapping[str, float]) -> bool:
        """Whether a reading is of another bar, such as an evaluation's between two steps."""
        target, previous = shown.get("target"), self._printed_target
        if target is None or previous is None or round(target) == previous:
            return False
        is_whole = self.step is not None and self.step >= previous
        return not is_whole or (self._shows_loss and target < previous)

    def _record(self, step: int, shown: Mapping[str, float], at_s: float) -> list[StepRecord]:
        """Record the newest step, unless it has a record, or its loss is still to come."""
        has_loss = "loss" in shown
        is_due = step > self._recorded or (step == self._recorded and self._lacks_loss)
        if not is_due or (not has_loss and (self._shows_loss or step == self._recorded)):
            return []
        record = self._new_record(step, shown, at_s)
        self.first = self.first or record
        self._recorded, self._recorded_s, self._lacks_loss = step, at_s, not has_loss
        return [record]

    def _new_record(self, step: int, shown: Mapping[str, float], at_s: float) -> StepRecord:
        since = step - self._recorded
        took_s = shown.get("step_s")
        if took_s is None and self._recorded_s is not None and since > 0:
            took_s = max(0.0, at_s - self._recorded_s) / since
        speed = shown.get("tokens_per_s")
        if speed is None and "device_tokens_per_s" in shown:
            speed = shown["device_tokens_per_s"] * self.num_devices
        samples, epoch = shown.get("samples"), shown.get("epoch")
        return StepRecord(
            step=step,
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


@dataclass(slots=True)
class GrowingLog:
    """Follower of one stream of a process.

    A bar that is drawn anew ends its line only with the next one: text that stands still after a
    return counts as a line.

    Attributes:
        path: file of the log.
        offset: bytes that were read already, or belong to earlier attempts.
    """

    path: Path
    offset: int
    _unfinished: str = ""
    _bar: str = ""

    @classmethod
    def from_its_end(cls, path: Path) -> GrowingLog:
        """Follow a log from its current end."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self) -> Iterator[str]:
        """Yield new lines."""
        text = self._read()
        if not text:
            if self._unfinished.startswith("\r") and self._unfinished != self._bar:
                self._bar = self._unfinished
                yield self._unfinished.lstrip("\r")
            return
        # The separators stay in front of what follows them.
        *whole, self._unfinished = re.split(r"(?=[\r\n])", self._unfinished + text)
        self._unfinished = self._unfinished[-MAX_UNFINISHED_CHARS:]
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
            return ""  # missing yet, or out of reach for a while
        self.offset += len(data)
        return data.decode("utf-8", "replace")


@dataclass(slots=True)
class StepFollower:
    """Follower of the output of one attempt on this node.

    Attributes:
        steps: steps that were shown.
        logs: output of the processes that the agent has started, stdout first.
        file: log of the attempt.
        unsaved: records that the store does not have.
    """

    steps: StepTracker
    logs: list[GrowingLog]
    file: Path
    unsaved: UnsavedSteps
    _polled_s: float = field(default_factory=time.time)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _upload_lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: dict[str, str] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _log: AttemptLog | None = None

    @classmethod
    def of(cls, order: StartOrder, folder: Path, paths: Sequence[Path]) -> StepFollower | None:
        """Follow an attempt that is about to start; None where its job does not ask for it.

        Args:
            order: order to start the attempt.
            folder: folder of the attempt.
            paths: logs of its output, stdout first.
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

    def follow(self, path: Path | None) -> None:
        """Follow one more log from its beginning, such as that of a rank; again: nothing."""
        if path is not None and all(log.path != path for log in self.logs):
            with self._lock:
                self.logs.append(GrowingLog(path, 0))

    def start(self, open_store: Callable[[], ObjectStore]) -> None:
        """Follow the output until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()
        upload_periodically(
            self.upload, open_store,
            subject="step records are", every_s=UPLOAD_S, is_over=self._is_over,
        )  # fmt: skip

    def finish(self) -> None:
        """Read the output to its end, once: no process prints any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.poll()
            self.poll()  # a bar that stands still by now

    def poll(self) -> None:
        """Read new lines, and record the steps in them."""
        with self._lock:
            # The step in one stream and the loss in another belong to the same moment.
            lines = [line for log in self.logs for line in log.lines()]
            since_s, self._polled_s = self._polled_s, time.time()
            for record in self.steps.take(lines, since_s=since_s, at_s=self._polled_s):
                self.unsaved.add(record)
                self._append_to_log(record)

    def _append_to_log(self, record: StepRecord) -> None:
        try:
            self._log = self._log or AttemptLog(self.file)
            self._log.append(record)
        except OSError as error:  # the run continues without the record
            _log.warning(f"the attempt's log does not take step {record.step}: {error}")

    def upload(self, store: ObjectStore) -> None:
        """Put the records into the store that it lacks.

        Raises:
            StorageError: the store does not answer; the next call puts them.
        """
        with self._upload_lock:
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
        now_s, first = time.time(), self.steps.first
        return ShownStep(
            step=step,
            age_s=max(0.0, now_s - self.steps.stepped_s),
            target=self.steps.target,
            first_step=first.step if first is not None else None,
            first_age_s=max(0.0, now_s - first.at_s) if first is not None else 0.0,
        )

    def beat(self) -> Heartbeat | None:
        """Derive a heartbeat from the output; None before two steps, which give a pace."""
        step, target = self.steps.step, self.steps.target
        if step is None or self.steps.num_shown < 2:
            return None
        is_done = target is not None and step >= target
        now_s, now_ns = time.time(), time.monotonic_ns()
        at_ns, alive_ns = (
            now_ns - round(max(0.0, now_s - at_s) * 1e9)
            for at_s in (self.steps.stepped_s, max(self.steps.stepped_s, self.steps.alive_s))
        )
        phase = Phase.DONE if is_done else Phase.STEP
        return Heartbeat(
            0, phase, 0, step, 0, 0, beat_ns=alive_ns, stepped_ns=at_ns, stride=self.steps.stride
        )

    def _follow(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.poll()
