"""A run under supervision: what happens next, done in the order the ledger can resume from.

Every record is appended before the action it announces, and every action is idempotent, so a
supervisor that is killed anywhere is followed by one that goes on at the same place. Knows
nothing of Prefect: tasks call these methods one by one. Times are seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.address import Credentials, open_store, worker_environment
from storage.checkpoint import CheckpointStore
from storage.errors import PermanentError
from training.agent.protocol import AgentState, StartOrder
from training.diagnosis.cause import Diagnosis
from training.diagnosis.classify import diagnose
from training.engines.base import Engine, Placement, plan, plan_replacement
from training.engines.local import LocalEngine
from training.environment import worker_variables
from training.errors import AgentUnreachable, EngineError, NoCapacity, RunConflict
from training.job import Job
from training.ledger import Identity, Ledger
from training.policy.faults import Fault, FaultClass
from training.policy.history import AttemptView, RunHistory, fault_of, record_of
from training.policy.ladder import (
    RESTARTS_IN_PLACE,
    Capacity,
    Decision,
    Policy,
    Rung,
    Severity,
    decide,
)
from training.policy.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSeen,
    DataReady,
    Decided,
    FirstStep,
    Placed,
    RunCreated,
    RunEnded,
    RungFailed,
)
from training.runtime.metrics import StepRecord
from training.supervisor.watch import AttemptEnd, AttemptWatch, EndKind, Progress
from training.trainer.data.prepare import PrepareResult

SPARE_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended and, if it failed, what is to be done."""

    kind: EndKind
    placement: int
    attempt: int
    step: int | None
    fault: Fault | None = None
    decision: Decision | None = None
    runners_up: tuple[Fault, ...] = ()

    @property
    def restarts_in_place(self) -> bool:
        """Whether the same containers start the processes again."""
        return self.decision is not None and self.decision.rung in RESTARTS_IN_PLACE


def remember_job(home: Path, job: Job) -> None:
    """Note on this machine where a run's storage is, for commands that get its name alone."""
    path = job_path(home, job.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(job.model_dump_json(indent=1), encoding="utf-8")


def job_path(home: Path, run_id: str) -> Path:
    """Where `remember_job` keeps the job of a run."""
    return home / "runs" / run_id / "job.json"


class Run:
    """One run, supervised by this process.

    Args:
        job: what is run.
        home: Perdure's folder on this machine.
        credentials: keys of the job's store; None: boto3's default chain.
        cwd: folder the workers start in when the job names none; default: the caller's.
    """

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        credentials: Credentials | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.job = job
        self._credentials = credentials
        self.store = open_store(job.storage, credentials)
        self.checkpoints = CheckpointStore(self.store, job.run_id)
        self.ledger = Ledger(self.store, job.run_id)
        self._home = home
        self._cwd = str((Path(job.worker.cwd) if job.worker.cwd else cwd or Path.cwd()).resolve())
        self._identity = Identity.of_this_process()
        self._engine: Engine | None = None
        self.history = RunHistory()
        self._first_steps: set[tuple[int, int]] = set()

    def take(self) -> RunHistory:
        """Become the run's supervisor, creating the run when it is new.

        Raises:
            RunConflict: another supervisor lives, or the run belongs to a different job, or its
                containers are another machine's or another home folder's.
        """
        before = self.ledger.read()
        if before.job is not None and (before.checkpoints or before.open_attempt):
            _refuse_other_job(self.job, before.job)
        if before.job is not None:
            _refuse_elsewhere(before, self._identity, self._home)
        history = self.ledger.take(self._identity)
        if history.job is None:
            document = self.job.model_dump(mode="json")
            self.ledger.append(RunCreated, job=document, cwd=self._cwd)
        self._cwd = history.cwd or self._cwd
        remember_job(self._home, self.job)
        self._engine = self._make_engine(self.ledger.epoch)
        return self.refresh()

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        self.history = self.ledger.read()
        self._first_steps = {a.key for a in self.history.attempts if a.first_step is not None}
        return self.history

    def _make_engine(self, epoch: int) -> Engine:
        secrets_env = worker_environment(self._credentials)
        return LocalEngine(self.job, home=self._home, epoch=epoch, secrets_env=secrets_env)

    @property
    def engine(self) -> Engine:
        """The engine; take() comes first."""
        assert self._engine is not None, "take() first"  # noqa: S101 our own bug
        return self._engine

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its target; a larger target than before is not reached yet."""
        if not self.history.ended_well:
            return False
        return self.job.worker.is_command or self.history.committed_step >= self.job.steps

    @property
    def policy(self) -> Policy:
        """The job's restart policy as the ladder reads it."""
        return self.job.restart.policy(operator_retry=self.job.comm.op_retry.enabled)

    def record_data(self, result: PrepareResult) -> None:
        """Put the outcome of data preparation on record."""
        self.ledger.append(
            DataReady,
            manifest_key=result.manifest_key,
            num_tokens=result.manifest.num_tokens,
            skipped=result.skipped,
            written_shards=result.written_shards,
            damaged_shards=result.damaged_shards,
            duration_s=result.duration_s,
        )

    def pending_end(self) -> Verdict | None:
        """The verdict of an attempt that ended the run, when its end is not on record yet."""
        view = self.refresh().unended
        if view is None or view.ended is None:
            return None
        return Verdict(EndKind(view.ended.outcome), *view.key, view.ended.to_step)

    def place(self, *, stop_wanted: Callable[[], bool] = lambda: False) -> Placement:
        """The placement the next attempt stands on: the living one, or a new one.

        Raises:
            EngineError: no placement is possible, and the ladder says stop.
        """
        undecided = self.refresh().undecided
        if undecided is not None:
            self._decide(undecided, _fault_of(undecided))
        current = _placement_of(self.history)
        if current is not None and self._keeps(self.history, current):
            return current
        while True:
            rung = self._rung_of(self.refresh())
            if rung is Rung.STOP:
                raise EngineError(self._decision_text())
            try:
                return self._carry_out(rung, current, stop_wanted)
            except (EngineError, AgentUnreachable) as error:
                if stop_wanted():
                    raise EngineError("stopped on request") from error
                self._record_failed_rung(rung, str(error))

    def attempt(
        self,
        placement: Placement,
        *,
        data_manifest_key: str | None,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> Verdict:
        """Start the next attempt, or adopt the living one, and watch it to its end."""
        view = self.refresh().open_attempt
        if view is None:
            self._pause(placement, stop_wanted)
            view = self._begin(placement)
        watch = AttemptWatch(
            self.engine,
            grace_s=self.job.engine.grace_s,
            start_timeout_s=self.job.restart.start_timeout_s,
            stop_wanted=stop_wanted,
            on_progress=lambda progress: self._on_progress(view, progress, on_progress),
        )
        if not self._already_started(view):
            self.checkpoints.fence(*view.key)
            try:
                self.engine.start(self._order(view, placement, data_manifest_key))
            except (EngineError, AgentUnreachable) as error:
                return self._conclude(view, watch.wind_up(refusal=str(error)))
        return self._conclude(view, watch.run())

    def end(self, outcome: str, message: str) -> None:
        """Put the end of the run on record and take its containers down.

        Raises:
            RunConflict: another supervisor has taken the run; nothing was done.
        """
        self.ledger.renew()
        self.engine.cancel(self.job.engine.grace_s)
        view = self.refresh().open_attempt
        if view is not None:
            self._record_missed_checkpoints(view)
            self._record_end(view, "stopped", to_step=self.checkpoints.latest())
        self.ledger.append(RunEnded, outcome=outcome, message=message)
        self.ledger.release()

    def _pause(self, placement: Placement, stop_wanted: Callable[[], bool]) -> None:
        """Wait before a restart, as the policy has it; a wish to stop ends the wait."""
        if not self.history.attempts_in(placement.number):
            return
        until_s = time.monotonic() + self.job.restart.delay_s
        while time.monotonic() < until_s and not stop_wanted():
            time.sleep(min(1.0, until_s - time.monotonic()))

    def _keeps(self, history: RunHistory, current: Placement) -> bool:
        """Whether the next attempt stands on the placement that is there.

        With some of its members gone it is still kept when processes were started on it: the
        attempt then ends with the loss, and the ladder is asked.
        """
        if not history.attempts_in(current.number):
            return self._completes(history, current)
        alive = self.engine.adopt(current)
        if history.open_attempt is not None:
            if not alive:
                self._record_vanished(history.open_attempt)
            return bool(alive)
        decided = history.pending_decision
        in_place = decided is not None and decided.rung in RESTARTS_IN_PLACE
        return in_place and len(history.attempts) > history.budgets_from and bool(alive)

    def _completes(self, history: RunHistory, current: Placement) -> bool:
        """Finish a placement whose supervisor died between its record and its first attempt.

        Returns:
            False when it cannot stand as recorded: members that were to stay are gone.
        """
        members = {member.index for member in current.members}
        before = history.placements[-2].members if len(history.placements) > 1 else ()
        stay = {m.index for m in current.members if m in before}
        alive = self.engine.adopt(current)
        if alive == members:
            return True
        if not stay:
            self.engine.submit(current)
            return True
        if not alive:
            placed = history.placements[-2]
            alive = self.engine.adopt(Placement(placed.placement, placed.members)) & stay
        if not stay <= alive:
            return False
        self.engine.replace(current, members - alive)
        return True

    def _rung_of(self, history: RunHistory) -> Rung:
        decided = history.pending_decision
        if decided is None or len(history.attempts) <= history.budgets_from:
            return Rung.JOB_RESCHEDULE  # a first placement, or somebody started an ended run again
        done = history.placement is not None and history.placement.placement > decided.placement
        # Carried out already, or in place where nothing is left: only new containers help.
        return Rung.JOB_RESCHEDULE if done or decided.rung in RESTARTS_IN_PLACE else decided.rung

    def _carry_out(
        self, rung: Rung, current: Placement | None, stop_wanted: Callable[[], bool]
    ) -> Placement:
        deadline_s = time.monotonic() + self.job.restart.spare_wait_s
        while True:
            try:
                return self._new_placement(rung, current)
            except NoCapacity:
                if current is None or stop_wanted() or time.monotonic() > deadline_s:
                    raise
                time.sleep(SPARE_POLL_S)

    def _new_placement(self, rung: Rung, current: Placement | None) -> Placement:
        history, nodes = self.history, self.engine.nodes()
        avoid = history.isolated
        if rung is Rung.JOB_RESCHEDULE and self._may_go_back(avoid):
            avoid = ()
        if rung is Rung.POD_RESCHEDULE and current is not None:
            alive = self.engine.adopt(current)
            lost = [m.node for m in current.members if m.index not in alive]
            placement, moved = plan_replacement(nodes, previous=current, avoid=avoid, lost=lost)
            self._record_placed(placement, avoid)
            self.engine.replace(placement, moved)
            return placement
        placement = plan(nodes, self.job.engine.nodes, previous=current, avoid=avoid)
        self._record_placed(placement, avoid)
        self.engine.submit(placement)
        return placement

    def _may_go_back(self, avoid: tuple[str, ...]) -> bool:
        """Whether too few healthy nodes are left and the policy lets the job use isolated ones."""
        left = len(self.engine.nodes()) - len(avoid)
        return left < self.job.engine.nodes and self.job.restart.allow_without_isolation

    def _record_placed(self, placement: Placement, avoid: tuple[str, ...]) -> None:
        self.ledger.append(
            Placed,
            placement=placement.number,
            members=placement.members,
            avoid=avoid,
            host=self._identity.host,
            boot_id=self._identity.boot_id,
            home=str(self._home),
        )

    def _begin(self, placement: Placement) -> AttemptView:
        number = len(self.history.attempts_in(placement.number)) + 1
        self.ledger.append(
            AttemptStarted,
            placement=placement.number,
            attempt=number,
            from_step=self.checkpoints.latest() or 0,
        )
        view = self.refresh().open_attempt
        assert view is not None  # noqa: S101 just appended
        return view

    def _already_started(self, view: AttemptView) -> bool:
        """Whether every agent has begun this attempt: it is adopted, not started again."""
        agents = self.engine.poll().agents.values()
        return bool(agents) and all(
            (status.placement, status.attempt) == view.key and status.state is not AgentState.IDLE
            for status in agents
        )

    def _order(
        self, view: AttemptView, placement: Placement, data_manifest_key: str | None
    ) -> StartOrder:
        job = self.job
        command = job.worker.command or (sys.executable, "-m", "training.runtime.worker")
        return StartOrder(
            placement=view.started.placement,
            attempt=view.started.attempt,
            num_nodes=len(placement.members),
            slots_per_node=job.engine.slots_per_node,
            hosts=(),
            master_addr="",
            master_port=0,
            command=command,
            is_command=job.worker.is_command,
            cwd=self._cwd,
            grace_s=job.engine.grace_s,
            log_path=job.log_path,
            variables={v.name: v.value for v in worker_variables(job)},
            job=job.model_dump_json(),
            data_manifest_key=data_manifest_key,
        )

    def _on_progress(
        self, view: AttemptView, progress: Progress, then: Callable[[Progress], None]
    ) -> None:
        if view.key not in self._first_steps and progress.steps:
            self._record_first_step(view, progress.steps[0])
        for step in progress.checkpoints:
            self._record_checkpoint(view, step)
        then(progress)

    def _record_first_step(self, view: AttemptView, record: StepRecord) -> None:
        self._first_steps.add(view.key)
        placement, attempt = view.key
        self.ledger.append(
            FirstStep,
            placement=placement,
            attempt=attempt,
            step=record.step,
            stepped_s=record.at_s,
        )

    def _record_checkpoint(self, view: AttemptView, step: int) -> None:
        known = {(seen.placement, seen.attempt, seen.step) for seen in self.history.checkpoints}
        if (*view.key, step) not in known:
            placement, attempt = view.key
            self.ledger.append(CheckpointSeen, placement=placement, attempt=attempt, step=step)
            self.refresh()

    def _conclude(self, view: AttemptView, end: AttemptEnd) -> Verdict:
        """Diagnose, decide, and put both on record."""
        placement, attempt = view.key
        self._record_missed_checkpoints(view)
        diagnosis = diagnose(end.evidence) if end.kind is EndKind.FAILED else None
        self._record_end(
            view,
            end.kind.value,
            to_step=end.last_step,
            proc_start_cnt=end.proc_start_cnt,
            diagnosis=diagnosis,
        )
        if diagnosis is None:
            return Verdict(end.kind, placement, attempt, end.last_step)
        fault = diagnosis.fault
        decision = self._decide(view, fault)
        told = diagnosis.runners_up
        return Verdict(end.kind, placement, attempt, end.last_step, fault, decision, told)

    def _record_end(
        self,
        view: AttemptView,
        outcome: str,
        *,
        to_step: int | None,
        proc_start_cnt: dict[str, int] | None = None,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        placement, attempt = view.key
        self.ledger.append(
            AttemptEnded,
            placement=placement,
            attempt=attempt,
            outcome=outcome,
            to_step=to_step,
            proc_start_cnt=proc_start_cnt or {},
            fault=record_of(diagnosis.fault) if diagnosis is not None else None,
            runners_up=tuple(map(record_of, diagnosis.runners_up)) if diagnosis else (),
            duration_s=time.time() - view.started.at_s,
        )

    def _record_missed_checkpoints(self, view: AttemptView) -> None:
        """Commits whose line was lost with the first node: the store knows them."""
        for step in self.checkpoints.steps():
            if step <= self.history.committed_step:
                continue
            try:
                manifest = self.checkpoints.manifest(step)
            except PermanentError:
                continue  # the next restore finds it damaged and sets it aside
            if (manifest.placement, manifest.attempt) == view.key:
                self._record_checkpoint(view, step)

    def _decide(self, view: AttemptView, fault: Fault) -> Decision:
        history = self.refresh()
        unknown_steps = self.job.worker.is_command
        decision = decide(
            fault,
            now_s=time.time(),
            history=history.recoveries(
                progress_after_s=self.job.restart.progress_after_s if unknown_steps else None
            ),
            supported=self.engine.capabilities,
            policy=self.policy,
            capacity=self._capacity(history),
            severity=Severity(fault.severity) if fault.severity is not None else None,
        )
        placement, attempt = view.key
        self.ledger.append(
            Decided,
            placement=placement,
            attempt=attempt,
            rung=decision.rung,
            isolate=decision.isolate,
            reason=decision.reason,
            skipped=decision.skipped,
            end_of_life_checkpoint=decision.end_of_life_checkpoint,
            accept_abnormal=decision.accept_abnormal,
            sub_healthy=decision.sub_healthy,
        )
        self.refresh()
        return decision

    def _capacity(self, history: RunHistory) -> Capacity:
        healthy = set(self.engine.nodes()) - set(history.isolated)
        return Capacity(healthy=len(healthy), needed=self.job.engine.nodes)

    def _record_failed_rung(self, rung: Rung, why: str) -> None:
        """A rung could not be carried out: put it on record and ask the ladder again."""
        view = self.refresh().attempts[-1] if self.history.attempts else None
        if view is None or len(self.history.attempts) <= self.history.budgets_from:
            raise EngineError(why)
        placement, attempt = view.key
        self.ledger.append(RungFailed, placement=placement, attempt=attempt, rung=rung, why=why)
        self._decide(view, _fault_of(view))

    def _record_vanished(self, view: AttemptView) -> None:
        """The attempt ended while nobody watched, and its containers with it."""
        fault = Fault(
            FaultClass.NODE_LOST,
            time.time(),
            "no agent of the placement is left",
            explanation="All containers are gone: the machine was restarted, or everything "
            "was taken down at once.",
        )
        self._record_missed_checkpoints(view)
        self._record_end(view, "failed", to_step=None, diagnosis=Diagnosis(fault))
        self._decide(view, fault)

    def _decision_text(self) -> str:
        decided = self.history.pending_decision
        return decided.reason if decided is not None else "no placement is possible"


def _placement_of(history: RunHistory) -> Placement | None:
    placed = history.placement
    return Placement(placed.placement, placed.members) if placed is not None else None


def _fault_of(view: AttemptView) -> Fault:
    assert view.ended is not None  # noqa: S101 asked for failed attempts alone
    assert view.ended.fault is not None  # noqa: S101 likewise
    return fault_of(view.ended.fault)


# What the weights depend on must not change under a run's name.
_IDENTITY = ("model", "tokenizer", "seed", "batch", "optimizer", "precision", "worker")


def _refuse_other_job(job: Job, before: dict[str, Any]) -> None:
    now = job.model_dump(mode="json")
    for field in _IDENTITY:
        if field in before and now[field] != before[field]:
            raise RunConflict(
                f"run_id={job.run_id} belongs to a job with another {field}; "
                "choose another run_id, or go back to the former job"
            )


def _refuse_elsewhere(history: RunHistory, identity: Identity, home: Path) -> None:
    """A run with an open attempt is adopted where its containers are, or not at all."""
    placed = history.placement
    if placed is None or history.open_attempt is None or not placed.host:
        return
    if placed.host == identity.host and placed.boot_id != identity.boot_id:
        return  # rebooted: nothing is left of it
    if (placed.host, placed.home) != (identity.host, str(home)):
        raise RunConflict(
            f"an attempt of run {history.job and history.job.get('run_id')} may be alive on "
            f"{placed.host} with PERDURE_HOME={placed.home}; start it there"
        )


__all__ = ["Run", "Verdict", "job_path"]
