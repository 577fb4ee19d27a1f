"""The order of a run: prepare data, place, check, train, decide, repair damaged data, end.

It is written once: Prefect's tasks and a plain loop carry out a step in different ways, and the
same follows from it. A run is cancelled from wherever its store is in reach, through its supervisor
or without it. Steps are completed optimizer steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from perdure.training.diagnosis.ending import SHORT_CODES
from perdure.training.engines.base import Placement
from perdure.training.errors import EngineError, RunConflict, StopRequested
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.exit_zero import good_end_text
from perdure.training.supervisor.finishing import AttemptResult
from perdure.training.supervisor.preparing import PreparationError
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import EndKind, Progress
from perdure.training.trainer.data.prepare import DataOutcome, prepare
from perdure.training.trainer.data.tokenizer import open_tokenizer
from perdure.training.wire.requests import request_cancel

_log = logging.getLogger("perdure.supervisor")

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run, as the ledger has it; ended from outside, it goes on when started again."""

    outcome: Literal["completed", "cancelled", "failed", "ended from outside"]
    message: str


@dataclass
class RunSteps:
    """The steps of a run, carried out in this process; the flow makes Prefect tasks of them.

    Attributes:
        run: supervised by this process.
        stop_wanted: polled while waiting and watching: whether the run is to be cancelled.
        on_progress: called at every poll of an attempt.
    """

    run: RunSupervisor
    stop_wanted: Callable[[], bool] = lambda: False
    on_progress: Callable[[Progress], None] = lambda _progress: None

    def prepare_data(self) -> DataOutcome:
        """Bring token shards and their manifest into the store; only what is missing is made."""
        job = self.run.job
        assert job.data is not None  # noqa: S101 the runbook asks for jobs with data alone
        return prepare(job.data, open_tokenizer(job.tokenizer), self.run.store).outcome

    def place(self) -> Placement:
        """Choose nodes and start their containers, or find the containers that are there.

        Raises:
            EngineError: no placement is possible, or a stop was requested.
        """
        return self.run.place(stop_wanted=self.stop_wanted)

    def check(self, placement: Placement) -> bool:
        """Check the nodes. Returns whether the placement can be used; else place() finds others.

        Raises:
            EngineError: before the first attempt, something is wrong that no node is to blame for.
        """
        return self.run.check(placement).is_passed

    def prepare(self, placement: Placement) -> None:
        """Have the job's own command prepare data on the nodes; what is there is kept.

        Raises:
            PreparationError: the command has failed, and as often as the policy has it.
            StopRequested: meanwhile.
        """
        preparer, stop_wanted = self.run.preparer(placement), self.stop_wanted
        for tries in range(1, self.run.job.restart.in_place_retries + 2):
            try:
                preparer.prepare(stop_wanted=stop_wanted, on_progress=_log.info)
            except PreparationError as error:
                if not error.may_pass or tries > self.run.job.restart.in_place_retries:
                    raise
                _log.warning("%s; it is tried again", error)
            else:
                return

    def train(self, placement: Placement, data_manifest_key: str | None) -> AttemptResult:
        """Run at least one attempt on a placement. Returns how the last attempt ended."""
        self.run.wait_to_restart(placement, self.stop_wanted)
        return self.run.attempt(
            placement,
            data_manifest_key=data_manifest_key,
            stop_wanted=self.stop_wanted,
            on_progress=self.on_progress,
        )


def run_to_completion(steps: RunSteps, *, log: Log) -> RunEnd:
    """Bring a run that was taken from where its ledger stops to its end, and record that end.

    Args:
        steps: carry out the work.
        log: receives errors that do not end the run.
    """
    # The previous supervisor may have died between the end of its last attempt and the run's.
    pending = steps.run.pending_end()
    end = _end_after(pending) if pending is not None else _train(steps, log)
    if end.outcome == "ended from outside":
        steps.run.leave()
    else:
        steps.run.end(end.outcome, end.message)
    return end


def _train(steps: RunSteps, log: Log) -> RunEnd:
    manifest_key = _prepare_data(steps, log)
    while True:
        try:
            placement = _place(steps)
        except StopRequested as stop:
            return RunEnd("cancelled", str(stop))
        except EngineError as error:
            return RunEnd("failed", f"no placement: {error}")
        if steps.run.job.prepare is not None and steps.run.history.open_attempt is None:
            try:
                steps.prepare(placement)
            except PreparationError as error:
                return RunEnd("failed", str(error))
            except StopRequested as stop:
                return RunEnd("cancelled", str(stop))
        verdict = steps.train(placement, manifest_key)
        stops = verdict.decision is not None and verdict.decision.rung is Rung.STOP
        if verdict.kind is EndKind.RESTARTED:
            continue
        if verdict.kind is not EndKind.FAILED or stops:
            return _end_after(verdict)
        if verdict.fault is not None and verdict.fault.fault_class is FaultClass.STORAGE_ERROR:
            manifest_key = _prepare_data(steps, log)  # a shard may be damaged: redo it


def _prepare_data(steps: RunSteps, log: Log) -> str | None:
    run = steps.run
    if run.job.worker.is_command or run.job.data is None:
        return None
    history = run.history
    try:
        outcome = steps.prepare_data()
    except Exception as error:
        if history.open_attempt is None or not history.data:
            raise
        # The corpus is not needed to go on watching an attempt that has read its shards.
        log.warning("data not checked: %s", error)
        return history.data[-1].manifest_key
    run.record_data(outcome)
    return outcome.manifest_key


def _place(steps: RunSteps) -> Placement:
    """Place the next attempt; nodes that fail their checks are replaced by others."""
    while True:
        placement = steps.place()
        if not steps.run.wants_checks(placement) or steps.check(placement):
            return placement


def _end_after(verdict: AttemptResult) -> RunEnd:
    match verdict.kind:
        case EndKind.COMPLETED:
            step = verdict.step
            text = f"step {step} reached" if step is not None else None
            return RunEnd("completed", good_end_text(text, verdict.notes))
        case EndKind.STOPPED | EndKind.RESTARTED:
            return RunEnd("cancelled", "stopped on request")
        case EndKind.ENDED_FROM_OUTSIDE:
            return RunEnd("ended from outside", _text_from_outside(verdict.step))
        case EndKind.FAILED:
            reason = verdict.decision.reason if verdict.decision is not None else "failed"
            fault = verdict.fault
            is_short = fault is not None and fault.code in SHORT_CODES
            return RunEnd("failed", f"{fault.evidence}; {reason}" if fault and is_short else reason)


def _text_from_outside(step: int | None) -> str:
    at = f" at step {step}" if step is not None else ""
    return f"ended by the platform (SIGTERM to all of its processes){at}; start it again to go on"


def cancel(
    run: RunSupervisor, *, by_server: Callable[[RunHistory], bool] = lambda _history: False
) -> str:
    """Have a run stopped; without a supervisor, take its containers down here.

    Args:
        run: not taken by this process yet.
        by_server: cancels the run's flow runs on a Prefect server; returns whether there are any.
            Else the request goes into the store, where the supervisor looks for it.

    Returns:
        The line for the user.

    Raises:
        EngineError: containers are left over.
    """
    name = run.job.run_id
    ended = run.refresh().ended
    if ended is not None and not ended.leftovers:
        return f"{name}: has ended already: {ended.outcome}"
    try:
        run.take()
    except RunConflict:
        if not by_server(run.refresh()):
            request_cancel(run.store, name)
        return f"{name}: its supervisor cancels it"
    outcome, message = ("cancelled", "perdure cancel")
    if ended is not None:
        outcome, message = ended.outcome, ended.message
    run.end(outcome, message)
    now = run.refresh().ended
    if now is not None and now.leftovers:
        raise EngineError(
            f"{name}: {outcome}, but not all of it is taken down: {now.leftovers}; "
            f"`perdure cancel {name}` tries again"
        )
    if ended is not None:
        return f"{name}: has ended already: {outcome}; what was left over is taken down"
    return f"{name}: no supervisor was alive; its processes are stopped"
