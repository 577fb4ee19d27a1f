"""The steps of a command, read from what it prints on this node while it runs.

A thread follows the logs of the attempt. What it finds is in the attempt's log, as the records of
a session are, and from there in the store: every minute, and when the attempt has ended. Sizes are
bytes; times are seconds since the epoch, in heartbeats nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.storage.objects import ObjectStore
from perdure.training.agent.order_job import job_of
from perdure.training.agent.storing import keep_storing
from perdure.training.health.heartbeat import Heartbeat, Phase
from perdure.training.health.program_output import LineReader, StepsShown
from perdure.training.journal import attempt_log
from perdure.training.journal.attempt_log import AttemptLog
from perdure.training.journal.events import StepRecord
from perdure.training.journal.steps import UnsavedSteps, metrics_prefix
from perdure.training.wire.agent import ShownStep, StartOrder

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
    _rest: str = ""
    _given: str = ""

    @classmethod
    def from_its_end(cls, path: Path) -> GrowingLog:
        """Follow what is written from now on."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self) -> Iterator[str]:
        """What is new."""
        text = self._read()
        if not text:
            if self._rest.startswith("\r") and self._rest != self._given:
                self._given = self._rest
                yield self._rest.lstrip("\r")
            return
        # The separators stay in front of what follows them.
        *whole, self._rest = re.split(r"(?=[\r\n])", self._rest + text)
        self._rest = self._rest[-MAX_REST_CHARS:]
        for line in whole:
            if line != self._given and line.strip():
                yield line.strip("\r\n")

    def _read(self) -> str:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size - self.offset > MAX_READ_BYTES:
                    self.offset, self._rest = size - MAX_READ_BYTES, ""
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return ""  # not there yet; one that is out of reach for a while is read later
        self.offset += len(data)
        return data.decode("utf-8", "replace")


@dataclass(slots=True)
class ShownSteps:
    """Follows the output of one attempt on this node.

    Attributes:
        steps: what was shown.
        logs: of the processes that the agent has started, stdout first.
        file: log of the attempt.
        unsaved: records that the store does not have.
    """

    steps: StepsShown
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
    def of(cls, order: StartOrder, folder: Path, paths: Sequence[Path]) -> ShownSteps | None:
        """Of an attempt that is about to start; None where its job does not ask for it.

        Args:
            order: to start it.
            folder: of the attempt.
            paths: of its output, stdout first.
        """
        job = job_of(order)
        if job.worker.progress is None:
            return None
        reader = LineReader(job.worker.progress)
        devices = order.num_nodes * order.slots_per_node
        steps = StepsShown(
            reader.read, order.placement, order.attempt, devices, target=job.target_step
        )
        prefix = metrics_prefix(job.run_id, order.placement, order.attempt)
        logs = [GrowingLog.from_its_end(path) for path in paths]
        return cls(steps, logs, folder / attempt_log.FILE_NAME, UnsavedSteps(prefix))

    def start(self, open_store: Callable[[], ObjectStore]) -> None:
        """Follow it from now on, until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()
        keep_storing(
            self.keep, open_store,
            what="step records are", every_s=KEEP_S, is_over=self._is_over,
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
