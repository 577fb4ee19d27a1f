"""A run from its start to its end, under a supervisor without Prefect.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.address import Credentials
from storage.errors import StorageError
from training.drill.hooks import NoHook, RunHook
from training.injection.inside import fired_at_s
from training.injection.outside import LocalRun
from training.job import Job
from training.journal.history import RunHistory
from training.journal.steps import kept_steps
from training.supervisor.run import Run
from training.supervisor.runbook import PlainSteps, conduct
from training.supervisor.watch import EndKind, Progress

LOG = logging.getLogger(__name__)
LIMIT_S = 300.0  # of one start of a run; a drill that hangs is a drill that failed

Curve = Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run has left.

    Attributes:
        history: its ledger.
        curve: loss and gradient norm of every step that was kept.
        state: checksums of the last checkpoint's files, by their rank.
        fired_s: when each fault of the job fired, by its index.
        left_over: names of processes that outlived it.
        ended: how, in a word or two.
    """

    history: RunHistory
    curve: Curve
    state: Mapping[str, str]
    fired_s: Mapping[int, list[float]]
    left_over: tuple[str, ...]
    ended: str


@dataclass(slots=True)
class RunDriver:
    """Plays runs below one folder.

    Attributes:
        home: Perdure's folder for them.
        limit_s: of one start of a run.
        credentials: keys of the runs' store; None: boto3's default chain.
    """

    home: Path
    limit_s: float = LIMIT_S
    credentials: Credentials | None = None

    def play(self, job: Job, *, person: RunHook | None = None, starts: int = 1) -> RunOutcome:
        """Run a job to its end.

        Args:
            job: that has not been run below this folder.
            person: watches it.
            starts: how often it is started at most, while it has not reached its target.

        Raises:
            PerdureError: it could not be run.
            StorageError: likewise.
        """
        ended = ""
        for _ in range(starts):
            ended = self._start(job, person or NoHook())
            if ended == EndKind.COMPLETED:
                break
        return self._left_by(job, ended)

    def _start(self, job: Job, person: RunHook) -> str:
        """Start it once, and see to its end. Returns how it ended."""
        run = self._run(job)
        run.take()
        until_s = time.monotonic() + self.limit_s

        def is_late() -> bool:
            return time.monotonic() > until_s

        def on_progress(progress: Progress) -> None:
            person.see(run, progress)

        try:
            end = conduct(run, PlainSteps(run, is_late, on_progress), log=LOG)
        except BaseException:
            run.end("failed", "interrupted")
            raise
        match end.outcome:
            case "completed":
                return end.outcome
            case "cancelled":
                return f"not ended after {self.limit_s:g} s"
            case "failed":
                return end.message

    def _run(self, job: Job) -> Run:
        return Run(job, home=self.home, credentials=self.credentials)

    def _left_by(self, job: Job, ended: str) -> RunOutcome:
        run = self._run(job)
        kept = kept_steps(run.store, job.run_id)
        try:
            manifest = run.checkpoints.manifest(job.steps)
            # In the order of ranks: which attempt and generation a name tells is not the state's.
            files = sorted(manifest.shards.items())
            shards = {f"rank{rank}": one.xxh3_128 for rank, (_, one) in enumerate(files)}
        except StorageError:
            shards = {}  # it did not come so far
        left = LocalRun(self.home, job.run_id).processes()
        return RunOutcome(
            history=run.refresh(),
            curve={step: (one.loss, one.grad_norm) for step, one in kept.items()},
            state=shards,
            fired_s=fired_at_s(run.store, job.run_id),
            left_over=tuple(process.name() for process in left),
            ended=ended,
        )
