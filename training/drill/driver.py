"""A run from its start to its end, supervised without Prefect, with hooks that disturb it.

The driver calls a hook after every poll of the supervisor, with the newest step: it kills
processes, or pauses the run and resumes it. Times are seconds since the epoch, steps completed
optimizer steps.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from perdure.storage.address import Credentials
from perdure.storage.errors import StorageError
from perdure.training.config.job import Job
from perdure.training.drill.termination import raise_on_termination
from perdure.training.errors import EngineError
from perdure.training.injection.inside import fired_at_s
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.history import RunHistory
from perdure.training.journal.steps import read_kept_steps
from perdure.training.liveness.heartbeat import Phase
from perdure.training.recovery.invariants import CHECK_INVARIANTS_ENV
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.runbook import RunSteps, run_to_completion
from perdure.training.supervisor.watch import EndKind, Progress
from perdure.training.wire.requests import write_control

LOG = logging.getLogger(__name__)
LIMIT_S = 300.0  # for each start of a run; a drill that hangs has failed
PAUSED_FOR_S = 0.5  # long enough to notice a rank that trains on

Curve = Mapping[int, tuple[float, float]]
Secrets = Callable[[], Mapping[str, SecretStr]]
RunHook = Callable[[RunSupervisor, Progress], None]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The remains of a run that is over.

    Attributes:
        history: the run's ledger.
        curve: loss and gradient norm of every step that was kept.
        state: checksums of the last checkpoint's files, by their rank.
        fired_s: when each fault of the job fired, by its index.
        leftovers: names of processes or objects that outlived the run.
        ended: how the run ended, in a word or two.
    """

    history: RunHistory
    curve: Curve
    state: Mapping[str, str]
    fired_s: Mapping[int, list[float]]
    leftovers: tuple[str, ...]
    ended: str


@dataclass(slots=True)
class RunDriver:
    """Runs jobs below one folder, without Prefect.

    Attributes:
        home: Perdure's folder for the runs.
        limit_s: for each start of a run.
        credentials: keys of the runs' store; None: boto3's default chain.
        secrets: reads the values of a job's env_from that are in Prefect blocks.
    """

    home: Path
    limit_s: float = LIMIT_S
    credentials: Credentials | None = None
    secrets: Secrets = dict

    def run(self, job: Job, *, hook: RunHook | None = None, starts: int = 1) -> RunOutcome:
        """Run a job to its end.

        Args:
            job: must not have been run below this folder.
            hook: called after every poll of the run; None: no hook.
            starts: limit for starts of the run, while it has not reached its target.

        Raises:
            PerdureError: the run could not start.
            StorageError: the store failed.
        """
        ended = ""
        os.environ.setdefault(CHECK_INVARIANTS_ENV, "1")  # a drill that hides a defect is none
        with raise_on_termination():
            for _ in range(starts):
                ended = self._start(job, hook)
                if ended == EndKind.COMPLETED:
                    break
        return self.outcome(job, ended)

    def _start(self, job: Job, hook: RunHook | None) -> str:
        """Start the run once. Returns how it ended."""
        run = self._run(job)
        run.take()
        until_s = time.monotonic() + self.limit_s

        def is_late() -> bool:
            return time.monotonic() > until_s

        on_progress = {} if hook is None else {"on_progress": partial(hook, run)}
        try:
            end = run_to_completion(RunSteps(run, is_late, **on_progress), log=LOG)
        # Ctrl-C, SIGTERM and Prefect's cancellation must leave no process, either.
        except BaseException:
            with suppress(EngineError):  # the first error is the useful one
                run.end("failed", "interrupted")
            raise
        match end.outcome:
            case "completed":
                return end.outcome
            case "cancelled":
                return f"not ended after {self.limit_s:g} s"
            case "failed" | "ended from outside":
                return end.message

    def _run(self, job: Job) -> RunSupervisor:
        return RunSupervisor(
            job, home=self.home, credentials=self.credentials, secrets=self.secrets
        )

    def outcome(self, job: Job, ended: str) -> RunOutcome:
        """Collect the remains of a run, however it was supervised.

        Args:
            job: the run's job.
            ended: how the run ended.
        """
        run = self._run(job)
        records = read_kept_steps(run.store, job.run_id)
        try:
            manifest = run.checkpoints.manifest(job.steps)
            # A file's name has its attempt and generation, which do not belong to the state.
            files = sorted(manifest.shards.items())
            shards = {f"rank{rank}": shard.xxh3_128 for rank, (_, shard) in enumerate(files)}
        except StorageError:
            shards = {}  # the last step was not reached
        return RunOutcome(
            history=run.refresh(),
            curve={
                step: (record.loss, record.grad_norm)
                for step, record in records.items()
                if record.loss is not None and record.grad_norm is not None
            },
            state=shards,
            fired_s=fired_at_s(run.store, job.run_id),
            leftovers=tuple(run.list_leftovers()),
            ended=ended,
        )


def kill_hook(injector: KillInjector) -> RunHook:
    """Make a hook that lets an injector kill the victims that are due."""

    def inject(run: RunSupervisor, progress: Progress) -> None:
        if progress.last is not None:
            step, is_running = progress.last.step, progress.is_running
            injector.inject(run.fleet.kill, step, is_running=is_running)

    return inject


@dataclass(slots=True)
class Pauser:
    """A hook that pauses a run at a step, checks that every rank stays there, and resumes it.

    Attributes:
        at_step: completed step at which the hook requests the pause.
        num_ranks: number of the run's ranks.
        requested_s: when the pause was requested.
        paused_at: the steps of all ranks, for every poll that found all of them paused.
        resumed_s: when the run was resumed.
    """

    at_step: int
    num_ranks: int
    requested_s: float | None = None
    paused_at: list[tuple[int, ...]] = field(default_factory=list)
    resumed_s: float | None = None
    _paused_s: float | None = None

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        """Request the pause, check it, or resume the run."""
        now_s = time.time()
        if self.requested_s is None:
            if progress.last is not None and progress.last.step >= self.at_step:
                write_control(run.store, run.job.run_id, pause=True)
                self.requested_s = now_s
            return
        if self.resumed_s is not None:
            return
        steps = _paused_steps(progress)
        if len(steps) < self.num_ranks:
            return
        self.paused_at.append(steps)
        self._paused_s = self._paused_s or now_s
        if now_s - self._paused_s >= PAUSED_FOR_S:
            write_control(run.store, run.job.run_id, pause=False)
            self.resumed_s = now_s


def _paused_steps(progress: Progress) -> tuple[int, ...]:
    """List the completed steps of the paused ranks."""
    workers = [worker for agent in progress.snapshot.agents.values() for worker in agent.workers]
    paused = Phase.PAUSED.name.lower()
    return tuple(
        worker.step for worker in workers if worker.phase == paused and worker.step is not None
    )
