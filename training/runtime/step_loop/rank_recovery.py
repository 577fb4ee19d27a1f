"""Recovery of a rank from a fault at the same step as all others, on the coordinator's plan.

Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch

from perdure.storage.errors import StorageError
from perdure.training.device import Healing, healing_of
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.injection.inside import WorkerInjector
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.masking import mask_text, secret_values
from perdure.training.recovery.protocol import (
    GenerationReport,
    LastSaved,
    Trains,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import (
    RankReport,
    RepairMode,
    RepairPlan,
    SkippedBatch,
    StepPhase,
    Vote,
)
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.errors import GivenUp, NumericAnomaly, SilentCorruption, WorkerError
from perdure.training.runtime.process_group.attempt_groups import RankMembership
from perdure.training.runtime.process_group.reconfigurable import default_group
from perdure.training.runtime.program import Loader, MicroBatch, Training
from perdure.training.runtime.recoverable import RecoverableError, classify
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.live import Snapshots
from perdure.training.runtime.state.transfer import (
    local_part,
    receive_header,
    receive_tensors,
    send_state,
)
from perdure.training.runtime.step_loop.step import Step
from perdure.training.runtime.step_loop.step_records import StepRecords
from perdure.training.runtime.step_loop.wrappers import reset

_log = logging.getLogger("perdure.runtime")

RECORDS = "records"  # beside the state of a rank


@dataclass(slots=True)
class RankState:
    """Where this rank is in its training.

    Attributes:
        step: completed steps in its tensors.
        data: position of the data after them.
        vote: result of the last step's vote, None when it was not taken here.
        in_flight: the step after, once it is handed out.
        batch: the next step's batch, which is to be executed again.
        span: global samples handed out before the newest batch and after it.
        skipped: batches passed over since `step`, oldest first.
        pending: what is to be done before the next step, by name.
        started_s: request of the newest step, on the clock of time.perf_counter().
        is_fresh: there is no state yet: this process takes the place of another.
        is_dirty: the tensors are not to be trusted.
        is_damaged: the device has reported that its memory is damaged, and was not cleaned since.
    """

    step: int
    data: dict[str, Any]
    vote: Vote | None = None
    in_flight: Step | None = None
    batch: Sequence[MicroBatch] | None = None
    span: tuple[int, int] = (0, 0)
    skipped: tuple[SkippedBatch, ...] = ()
    pending: tuple[str, ...] = ()
    started_s: float = 0.0
    is_fresh: bool = False
    is_dirty: bool = False
    is_damaged: bool = False

    @property
    def loss(self) -> float | None:
        """Loss of `step`, None where its vote was not taken here."""
        return self.vote.loss if self.vote is not None and self.vote.step == self.step else None

    @property
    def step_s(self) -> float:
        """How long ago the newest step was asked for."""
        return time.perf_counter() - self.started_s

    def report(self, rank: int, snapshot_step: int | None) -> RankReport:
        """Report to the coordinator."""
        step = self.in_flight
        votes = (self.vote, step.vote if step is not None else None)
        return RankReport(
            rank=rank,
            step=self.step,
            phase=step.phase if step is not None else StepPhase.RUN,
            is_dirty=self.is_dirty or (step is not None and step.is_dirty),
            is_fresh=self.is_fresh,
            snapshot_step=snapshot_step,
            votes=tuple(vote for vote in votes if vote is not None),
            pending=self.pending,
            skipped=self.skipped,
        )

    def catch_up(self, skipped: tuple[SkippedBatch, ...], loader: Loader) -> None:
        """Pass over the batches that other ranks have passed over since this step."""
        for _ in skipped[len(self.skipped) :]:
            if self.batch is not None:
                self.batch = None  # the loader is past it
            else:
                loader.next_step()
            self.data = loader.state_dict()
        self.skipped = skipped


@dataclass(slots=True)
class RankRecovery:
    """Brings this rank to one step with the others.

    Attributes:
        groups: this process's process groups.
        context: rank, job and folders of this process.
        training: what is trained.
        checkpointer: gives and takes state.
        device: the rank's accelerator, or the CPU.
        heartbeat: shows that this process lives.
        faults: injects the faults of a drill.
        snapshots: earlier states for a rollback, None when the job has none.
        records: completed steps, which a new first rank gets from another one.
        healing: what the device needs.
    """

    groups: RankMembership
    context: WorkerContext
    training: Training
    checkpointer: Checkpointer
    device: torch.device
    heartbeat: HeartbeatWriter
    faults: WorkerInjector
    records: StepRecords
    snapshots: Snapshots | None = None
    healing: Healing = field(init=False)

    def __post_init__(self) -> None:
        """Find out what the device needs."""
        self.healing = healing_of(self.device)

    def classify(self, error: BaseException) -> RecoverableError | None:
        """Classify an exception; None when it is the program's own."""
        if isinstance(error, NumericAnomaly):
            return RecoverableError(WorkerFaultKind.NUMERIC, str(error))
        if isinstance(error, SilentCorruption):
            if not error.culprits:
                return None
            # The others wait for the generation in which the culprits get their state.
            is_own = self.context.rank in error.culprits
            return RecoverableError(WorkerFaultKind.MEMORY if is_own else None, str(error))
        return classify(error, is_interrupted=self._is_interrupted)

    @property
    def _is_interrupted(self) -> bool:
        return self.groups.generations.announced > self.groups.generations.current

    def rejoin(self, state: RankState, *, error: BaseException | None = None) -> RepairPlan:
        """Report a fault, and recover from it together with the others.

        Args:
            state: place of this rank in the loop; brought up to date.
            error: what was caught, None for a process that takes the place of another.

        Raises:
            BaseException: `error`, when the attempt is given up and it is this rank's own fault.
            SystemExit: code 75, when it is given up for another rank's, or once the last
                checkpoint is written.
        """
        self.heartbeat.beat(phase=Phase.RECOVER)
        if error is not None:
            self._report(error, state)
        while True:
            try:
                plan = self._follow_plan(state)
            except GivenUp as exc:
                self._leave(error, exc)
            except (RuntimeError, WorkerError) as exc:
                self._report_failed_recovery(exc, state)
            else:
                self.heartbeat.beat(phase=Phase.STEP)
                return plan

    def _leave(self, error: BaseException | None, given_up: GivenUp) -> NoReturn:
        """End this process with what it knows: its traceback, if the fault was here."""
        fault = self.classify(error) if error is not None else None
        if error is not None and (fault is None or fault.kind is not None):
            raise error from None
        reason = f"{given_up}; it ran into: {fault.text}" if fault is not None else str(given_up)
        _log.info(f"rank {self.context.rank} ends: {reason}")
        raise SystemExit(EXIT_RESTART_ME) from None

    def _report(self, error: BaseException, state: RankState) -> None:
        fault = self.classify(error)
        if fault is None or fault.kind is None:
            return
        self._note_damage(fault, state)
        vote = state.in_flight.vote if state.in_flight is not None else None
        self._send_fault(fault.kind, fault, state.step, vote)

    def _note_damage(self, fault: RecoverableError, state: RankState) -> None:
        if fault.is_of_device:
            state.is_damaged = True  # how far, the device is asked
        elif fault.kind is WorkerFaultKind.MEMORY:
            state.is_dirty = True

    def _report_failed_recovery(self, error: BaseException, state: RankState) -> None:
        """Have the coordinator begin another generation, unless it already has."""
        fault = self.classify(error)
        if fault is None:
            raise error
        self._note_damage(fault, state)
        if not self._is_interrupted:
            self._send_fault(WorkerFaultKind.REPAIR, fault, state.step)

    def _send_fault(
        self, kind: WorkerFaultKind, fault: RecoverableError, step: int, vote: Vote | None = None
    ) -> None:
        self.groups.client.send(
            WorkerFault(
                generation=self.groups.generations.current,
                kind=kind,
                text=mask_text(fault.text, secret_values(os.environ))[:500],
                step=step,
                at_s=time.time(),
                code=fault.code,
                grad_norm=vote.grad_norm if vote is not None else None,
                culprit=vote.culprit if vote is not None else None,
                is_finite=vote is None
                or (math.isfinite(vote.loss) and math.isfinite(vote.grad_norm)),
            )
        )

    def _follow_plan(self, state: RankState) -> RepairPlan:
        """Take part in the newest generation, up to where training goes on."""
        client, generations, rank = self.groups.client, self.groups.generations, self.context.rank
        generation = client.newer_than(generations.current)
        generations.enter(generation)
        self.heartbeat.generation = generation
        self._heal(state)
        generations.release_retired()
        snapshot_step = self.snapshots.step if self.snapshots is not None else None
        report = state.report(rank, snapshot_step)
        client.send(GenerationReport(generation=generation, report=report))
        # While others are still on their way: no plan applies a gradient that is not reduced.
        is_ready = state.is_fresh or report.phase < StepPhase.PREPARED
        if is_ready and not state.is_fresh:
            reset(self.training, generations)
        plan = client.plan_for(generation)
        self.faults.reached("recovery", plan.step + 1)
        self._end_step_in_flight(state, plan)
        if not is_ready:
            reset(self.training, generations)
        self.checkpointer.forget(generation)
        if plan.mode is RepairMode.LAST_SAVE:
            self._save_and_end(state, plan)
        # By all ranks and at once: a connection established inside a transfer between two would
        # wait for the others, who wait in their next collective.
        default_group().connect()
        if plan.rolls_back:
            self._roll_back(state, plan)
        self._transfer(state, plan)
        if plan.rolls_back or self._is_given_a_state(plan):
            self.healing.settle()
            state.is_dirty = False
        generations.check()
        state.vote = plan.vote
        state.pending = plan.pending
        self.report_training(state.step)
        return plan

    def _heal(self, state: RankState) -> None:
        """Have the device take work again; a device that cannot is left to a new process."""
        training = self.training
        tensors = chain(
            training.model.parameters(), training.model.buffers(), training.kept_tensors()
        )
        local_tensors = [local_part(tensor) for tensor in tensors]
        is_whole = self.healing.clean(local_tensors, is_damaged=state.is_damaged)
        # The device is not asked about state of the program: `state_dict` may need it running.
        is_doubtful = state.is_damaged and bool(training.state)
        state.is_dirty = state.is_dirty or not is_whole or is_doubtful
        state.is_damaged = False

    def _end_step_in_flight(self, state: RankState, plan: RepairPlan) -> None:
        """Apply a gradient that every rank was known to hold, or keep the batch for later."""
        step = state.in_flight
        if self.context.rank in plan.applies and step is not None:
            step.finish(plan.vote)
            state.step, state.data = step.number, self.training.loader.state_dict()
            state.vote = step.vote  # another fault may come before the end: it is reported again
            state.skipped = ()
        elif step is not None:
            # This plan may fail, and the next may execute this step again.
            state.batch = step.data
            state.is_dirty = state.is_dirty or step.is_dirty
        state.in_flight = None
        if state.step == plan.step and not self._is_given_a_state(plan):
            state.catch_up(plan.skipped, self.training.loader)

    def _is_given_a_state(self, plan: RepairPlan) -> bool:
        return any(move.target == self.context.rank for move in plan.moves)

    def _transfer(self, state: RankState, plan: RepairPlan) -> None:
        """Send this rank's state to those that lost theirs, or receive a state."""
        live, rank = self.checkpointer.live, self.context.rank
        for move in plan.moves:
            if move.source == rank:
                tensors, extra = live.whole()
                extra["data"] = state.data
                if move.target == 0:
                    extra[RECORDS] = self.records.recent()
                send_state(tensors, extra, to=move.target, device=self.device)
            elif move.target == rank:
                layouts, extra = receive_header(source=move.source, device=self.device)
                self.records.adopt(extra.pop(RECORDS, ()))
                state.is_dirty = True  # until it is whole
                fill = partial(
                    receive_tensors, names=layouts, source=move.source, device=self.device
                )
                live.adopt(extra, fill, layouts)
                self._move_to(state, plan, extra["data"])
                state.is_fresh = False

    def _roll_back(self, state: RankState, plan: RepairPlan) -> None:
        """Take this rank's own snapshot, unless it receives another rank's."""
        if self._is_given_a_state(plan):
            return
        assert self.snapshots is not None  # noqa: S101 the plan follows from what was reported
        extra = self.snapshots.extra
        state.is_dirty = True  # until it is whole
        self.checkpointer.live.adopt(extra, self.snapshots.restore)
        self._move_to(state, plan, extra["data"])

    def _move_to(self, state: RankState, plan: RepairPlan, data: dict[str, Any]) -> None:
        self.training.loader.load_state_dict(data)
        state.step, state.vote, state.data = plan.step, plan.vote, data
        state.batch = None
        state.skipped = plan.skipped

    def _save_and_end(self, state: RankState, plan: RepairPlan) -> NoReturn:
        """Write the end-of-life checkpoint."""
        problem = None
        if self.context.rank in plan.savers:
            self.heartbeat.beat(phase=Phase.SAVE)
            if state.vote is not None and state.vote.step == state.step:
                # The first rank need not have come to the end of a step that is applied here.
                self.records.add(state.step, state.vote, self.training.loader, step_s=state.step_s)
            try:
                self.checkpointer.last_save(
                    state.step,
                    plan.savers,
                    data=state.data,
                    timeout_s=self.context.job.engine.grace_s,
                    loss=state.loss,
                    attachments=(
                        self.records.surviving() if self.context.rank == plan.savers[0] else None
                    ),
                )
            except (StorageError, RuntimeError) as exc:
                problem = f"rank {self.context.rank}: {type(exc).__name__}: {exc}"[:500]
        self.groups.client.send(LastSaved(step=state.step, problem=problem))
        self.groups.client.close()
        raise SystemExit(EXIT_RESTART_ME)

    def report_training(self, step: int) -> None:
        """Report that this rank is in its loop."""
        generation = self.groups.generations.current
        layout = self.context.own_layout
        self.groups.client.send(Trains(generation=generation, step=step, layout=layout))

    def snapshot(self, state: RankState) -> None:
        """Keep this step to go back to."""
        if self.snapshots is not None:
            tensors, extra = self.checkpointer.live.whole()
            extra["data"] = state.data
            self.snapshots.take(state.step, tensors, extra)
