"""Records of completed steps that the first rank writes: the attempt's log, and event files.

The event files are TensorBoard's: optional, and never a fault. One folder per run; a later attempt
continues in it, and `purge_step` voids the records of steps that are executed again.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from perdure.training.journal.attempt_log import AttemptLog, Follower
from perdure.training.journal.events import (
    STEP,
    BatchSkipped,
    CheckpointCommitted,
    ProgramNotice,
    StepRecord,
)
from perdure.training.journal.steps import UnsavedSteps, metrics_prefix
from perdure.training.recovery.repair import SkippedBatch, Vote
from perdure.training.runtime.context import WorkerContext

_log = logging.getLogger("perdure.runtime")

FLUSH_S = 10
KEPT = 4096  # records, about 2 MiB; enough from one save to the next
SCALARS: Sequence[tuple[str, Callable[[StepRecord], float | None]]] = (
    ("loss", lambda record: record.loss),
    ("grad_norm", lambda record: record.grad_norm),
    ("learning_rate", lambda record: record.lr),
    ("tokens_per_second", lambda record: record.tokens_per_s),
    ("mfu", lambda record: record.mfu),
    ("step_time_s", lambda record: record.step_s),
)


class DataPosition(Protocol):
    """Where a program is in its data; its loader knows."""

    @property
    def position(self) -> int:
        """Number of samples handed out."""

    @property
    def epoch(self) -> int:
        """Number of whole passes over the data."""


class StepRecords:
    """Records of completed steps; the first rank puts them on record.

    The others keep the newest in memory, for a first rank that is lost with its node. A save takes
    the records since the previous one into the store. They stay unsaved until it has
    succeeded: a save that a fault cuts short is done again.

    Args:
        context: rank, job and folders of this process.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._steps = UnsavedSteps(
            metrics_prefix(context.job.run_id, context.placement, context.attempt)
        )
        self._unsaved: dict[str, str] = {}
        self._recent: deque[StepRecord] = deque(maxlen=KEPT)
        self._num_notices = 0
        self._log: AttemptLog | None = None
        self._event_files: EventFiles | None = None
        if context.rank == 0:
            self._steps.catch_up(Follower.of_file(context.metrics_path))
            self._log = AttemptLog(context.metrics_path)
            self._event_files = EventFiles.of(context.job.watch.tensorboard, context.job.run_id)
        self._tokens_per_step = 0
        self._flops_per_step = 0.0
        self._peak_flops: float | None = None

    def measure(
        self, *, tokens_per_step: int, flops_per_step: float, peak_flops: float | None
    ) -> None:
        """Set how much a step computes on all ranks, and what one device could at its best."""
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops

    def add(
        self,
        step: int,
        vote: Vote,
        data: DataPosition,
        *,
        step_s: float,
        has_norm: bool = True,
    ) -> None:
        """Put a completed step on record, once.

        Args:
            step: its number.
            vote: what the ranks agreed on.
            data: place in the data behind the step.
            step_s: its duration.
            has_norm: whether the gradient norm is known; a nan that is known is abnormal.
        """
        if step in (self._steps.last_step, self._recent[-1].step if self._recent else 0):
            return
        context = self._context
        record = StepRecord(
            step=step,
            loss=vote.loss,
            grad_norm=vote.grad_norm if has_norm else None,
            lr=vote.lr,
            tokens_per_s=self._tokens_per_step / step_s,
            mfu=self._mfu(step_s),
            at_s=time.time(),
            step_s=step_s,
            position=data.position,
            epoch=data.epoch,
            placement=context.placement,
            attempt=context.attempt,
        )
        if self._log is None:
            self._keep(record)
            return
        self._steps.add(record)
        self._log.append(record)
        if self._event_files is not None:
            self._event_files.step(record)

    def recent(self) -> list[dict[str, Any]]:
        """Return the newest records, for a first rank that has none; empty on the first rank."""
        return [STEP.dump_python(record, mode="json") for record in self._recent]

    def adopt(self, recent: Sequence[Mapping[str, Any]]) -> None:
        """Put the records of another rank on record, as far as they are news here."""
        for fields in recent:
            record = STEP.validate_python(fields)
            if self._log is not None and record.step > self._steps.last_step:
                self._steps.add(record)
                self._log.append(record)

    def _keep(self, record: StepRecord) -> None:
        while self._recent and self._recent[-1].step >= record.step:
            self._recent.pop()  # a recovery has gone back, and it is done again
        self._recent.append(record)

    def notice(self, text: str) -> None:
        """Put on record what the author of the program should know."""
        if self._log is None:
            return
        self._num_notices += 1
        self._log.append(ProgramNotice(at_s=time.time(), number=self._num_notices, text=text))

    def skipped(self, batch: SkippedBatch, *, is_known: bool) -> None:
        """Put on record that no rank trains on a batch."""
        if self._log is not None:
            self._log.append(
                BatchSkipped(at_s=time.time(), number=batch.stop, batch=batch, is_known=is_known)
            )

    def unsaved(self) -> dict[str, str]:
        """Make objects for the store, by key, with the records that no save has taken yet."""
        self._unsaved |= self._steps.take()
        return self._unsaved

    def surviving(self) -> dict[str, str]:
        """Make the same objects for a last save, which any rank may make without the first rank.

        It may have died after a vote, before it put the step on record that the others completed.
        """
        if self._log is not None:
            return self.unsaved()
        context = self._context
        steps = UnsavedSteps(metrics_prefix(context.job.run_id, context.placement, context.attempt))
        for record in self._recent:
            steps.add(record)
        return steps.take()

    def saved(self) -> None:
        """Forget the records that `unsaved` returned: a save has taken them."""
        self._unsaved = {}

    def committed(self, step: int) -> None:
        """Record that a checkpoint is in the store."""
        if self._log is not None:
            self._log.append(CheckpointCommitted(step=step))

    def close(self) -> None:
        """Write the remaining records."""
        if self._log is not None:
            self._log.close()
        if self._event_files is not None:
            self._event_files.close()

    def _mfu(self, step_s: float) -> float | None:
        if not self._peak_flops or not self._flops_per_step:
            return None
        return self._flops_per_step / step_s / (self._peak_flops * self._context.world_size)


class EventFiles:
    """Writes step records as scalars.

    Args:
        folder: the run's event files.
        open_writer: `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, folder: Path, open_writer: Callable[..., Any]) -> None:
        self._folder = folder
        self._open_writer = open_writer
        self._writer: Any = None
        self._failed = False

    @classmethod
    def of(cls, folder: str | None, run_id: str) -> Self | None:
        """Open event files below a folder; None: they are not wanted, or TensorBoard is missing."""
        if folder is None:
            return None
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            _log.warning(
                f"watch.tensorboard={folder}: no event files, install perdure[tensorboard]: {error}"
            )
            return None
        return cls(Path(folder) / run_id, module.SummaryWriter)

    def step(self, record: StepRecord) -> None:
        """Record a completed step."""
        if self._failed:
            return
        try:
            if self._writer is None:
                self._writer = self._open_writer(
                    str(self._folder), purge_step=record.step, flush_secs=FLUSH_S
                )
            for name, read in SCALARS:
                value = read(record)
                if value is not None:
                    self._writer.add_scalar(name, value, record.step, walltime=record.at_s)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write the remaining records."""
        try:
            if self._writer is not None and not self._failed:
                self._writer.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        _log.warning(f"no more event files in {self._folder}: {error}")
