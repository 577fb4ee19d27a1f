"""A run from its start to its end, supervised without Prefect, and what is done to it meanwhile.

A hook is called after every poll of the supervisor, with the newest step: it kills processes, or
has the run pause and continue. Times are seconds since the epoch, steps completed optimizer steps.
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
from perdure.training.drill.termination import terminated_as_exception
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
LIMIT_S = 300.0  # of one start of a run; a drill that hangs is a drill that failed

SPARES_S = 60.0  # for containers to stand by; on a busy machine their imports take ten
PAUSED_FOR_S = 0.5  # a rank that trains on in between would be noticed

Curve = Mapping[int, tuple[float, float]]
Secrets = Callable[[], Mapping[str, SecretStr]]
RunHook = Callable[[RunSupervisor, Progress], None]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What remains of a run that is over.

    Attributes:
        history: its ledger.
        curve: loss and gradient norm of every step that was kept.
        state: checksums of the last checkpoint's files, by their rank.
        fired_s: when each fault of the job fired, by its index.
        left_over: names of processes or objects that outlived it.
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
    """Runs jobs below one folder, without Prefect.

    Attributes:
        home: Perdure's folder for them.
        limit_s: of one start of a run.
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
            job: that has not been run below this folder.
            hook: called after every poll of the run; None: nothing is.
            starts: how often it is started at most, while it has not reached its target.

        Raises:
            PerdureError: it could not be run.
            StorageError: likewise.
        """
        ended = ""
        os.environ.setdefault(CHECK_INVARIANTS_ENV, "1")  # a drill that hides a defect is none
        with terminated_as_exception():
            for _ in range(starts):
                ended = self._start(job, hook)
                if ended == EndKind.COMPLETED:
                    break
        return self.outcome(job, ended)

    def _start(self, job: Job, hook: RunHook | None) -> str:
        """Start it once. Returns how it ended."""
        run = self._run(job)
        run.take()
        until_s = time.monotonic() + self.limit_s

        def is_late() -> bool:
            return time.monotonic() > until_s

        on_progress = {} if hook is None else {"on_progress": partial(hook, run)}
        try:
            end = run_to_completion(RunSteps(run, is_late, **on_progress), log=LOG)
        # Ctrl-C, SIGTERM and Prefect's cancellation, too: no process is to be left.
        except BaseException:
            with suppress(EngineError):  # what came first is of use
                run.end("failed", "interrupted")
            raise
        match end.outcome:
            case "completed":
                return end.outcome
            case "cancelled":
                return f"not ended after {self.limit_s:g} s"
            case "failed":
                return end.message

    def _run(self, job: Job) -> RunSupervisor:
        return RunSupervisor(
            job, home=self.home, credentials=self.credentials, secrets=self.secrets
        )

    def outcome(self, job: Job, ended: str) -> RunOutcome:
        """What remains of a run, however it was supervised.

        Args:
            job: of the run.
            ended: how.
        """
        run = self._run(job)
        kept = read_kept_steps(run.store, job.run_id)
        try:
            manifest = run.checkpoints.manifest(job.steps)
            # By rank: attempt and generation in a file's name do not belong to the state.
            files = sorted(manifest.shards.items())
            shards = {f"rank{rank}": one.xxh3_128 for rank, (_, one) in enumerate(files)}
        except StorageError:
            shards = {}  # the last step was not reached
        return RunOutcome(
            history=run.refresh(),
            curve={
                step: (one.loss, one.grad_norm)
                for step, one in kept.items()
                if one.loss is not None and one.grad_norm is not None
            },
            state=shards,
            fired_s=fired_at_s(run.store, job.run_id),
            left_over=tuple(run.list_leftovers()),
            ended=ended,
        )


def kill_hook(injector: KillInjector) -> RunHook:
    """A hook that lets an injector kill what is due."""

    def inject(run: RunSupervisor, progress: Progress) -> None:
        if progress.last is not None:
            step, is_running = progress.last.step, progress.is_running
            injector.inject(run.fleet.kill, step, is_running=is_running)

    return inject


@dataclass(slots=True)
class Pauser:
    """A hook that pauses a run at a step, checks that every rank stays there, and resumes it.

    Attributes:
        at_step: completed step from which on the pause is requested.
        num_ranks: of the run.
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
        """Do what is due."""
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


@dataclass(slots=True)
class SpareAwaiter:
    """A hook that has a run pause until containers stand by, all that it wants.

    So that a fault of one of the next steps finds them.

    Attributes:
        limit_s: of the pause; a fault may have come first, and taken them.
    """

    limit_s: float = SPARES_S
    _since_s: float | None = None
    _is_over: bool = False

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        """Do what is due."""
        if self._is_over or progress.last is None:
            return
        now_s = time.monotonic()
        if self._since_s is None:
            write_control(run.store, run.job.run_id, pause=True)
            self._since_s = now_s
            return
        is_ready = len(run.warm_spares) == run.job.engine.num_warm_spares
        if is_ready or now_s - self._since_s > self.limit_s:
            write_control(run.store, run.job.run_id, pause=False)
            self._is_over = True


def _paused_steps(progress: Progress) -> tuple[int, ...]:
    """Completed steps of the paused ranks."""
    workers = [one for agent in progress.snapshot.agents.values() for one in agent.workers]
    paused = Phase.PAUSED.name.lower()
    return tuple(one.step for one in workers if one.phase == paused and one.step is not None)
