"""The loop from one step boundary to the next, faults included.

Everything that needs all ranks, the step itself, a save, the end, may be cut short by a fault.
What was still to be done is reported to the coordinator then, and done again by all ranks once
they are at one step. Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from perdure.storage.ranks import from_first
from perdure.storage.staging import GroupRanks
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.injection.inside import WorkerInjector
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.recovery.protocol import Ending, Paused
from perdure.training.recovery.repair import SkippedBatch, Vote
from perdure.training.runtime.agent_requests import AgentRequests
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.errors import AbnormalStretch, WorkerError
from perdure.training.runtime.program import MicroBatch, Training
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.random_numbers import seed_step
from perdure.training.runtime.step_loop.batches import DivisionCheck, checked
from perdure.training.runtime.step_loop.rank_recovery import RankRecovery, RankState
from perdure.training.runtime.step_loop.save_clock import SaveClock
from perdure.training.runtime.step_loop.skipping import SkippedData, skipped_batch
from perdure.training.runtime.step_loop.step import (
    Comparison,
    Limits,
    Step,
    StepContext,
    StepRequests,
)
from perdure.training.runtime.step_loop.step_records import StepRecords

SETTLE_TIMEOUT_S = 1800.0  # for the last save to reach the store


@dataclass(slots=True)
class StepLoop:
    """The steps of one process.

    Attributes:
        until: target step.
        context: rank, job and folders of this process.
        training: what is trained.
        checkpointer: saves and restores it.
        device: the rank's accelerator, or the CPU.
        heartbeat: shows that this process lives.
        faults: injects the faults of a drill.
        records: takes the records of completed steps.
        requests: the agent's signals.
        recovery: from faults while the process lives; None: they end it.
        skipping: takes abnormal batches; None: an abnormal step is a fault.
        stays: the program goes on behind the last step, and calls `leave` at its end.
        state: place of this rank in the loop.
        has_applied: the newest recovery let ranks apply the step that they were in.
    """

    until: int
    context: WorkerContext
    training: Training
    checkpointer: Checkpointer
    device: torch.device
    heartbeat: HeartbeatWriter
    faults: WorkerInjector
    records: StepRecords
    requests: AgentRequests
    recovery: RankRecovery | None
    skipping: SkippedData | None = None
    stays: bool = False
    state: RankState = field(default_factory=lambda: RankState(0, {}))
    has_applied: bool = False
    _steps: StepContext = field(init=False)
    _comparison: Comparison = field(init=False)
    _clock: SaveClock = field(init=False)
    _is_first: bool = True

    def __post_init__(self) -> None:
        """Prepare what all steps have in common."""
        job, layout = self.context.job, self.context.layout
        restart = job.restart
        self._comparison = Comparison(
            layout.replica_groups(),
            job.watch.consistency_every_steps,
            is_split=self.context.holds_parts,
            notice=self.records.notice,
        )
        self._steps = StepContext(
            training=self.training,
            device=self.device,
            heartbeat=self.heartbeat,
            faults=self.faults,
            requests=self._requests_at,
            is_recoverable=self.is_recoverable,
            limits=Limits(restart.abnormal_loss, restart.abnormal_grad_norm),
            comparison=self._comparison,
            skips=self.skipping is not None,
            division=DivisionCheck(self.records.notice),
            settle=self.recovery.healing.settle if self.recovery is not None else lambda: None,
        )

    def begin(self) -> None:
        """Restore, or take the place of another process. Collective."""
        self.heartbeat.beat(phase=Phase.RESTORE)
        self.faults.reached("restore", 0)
        if self.context.generation is not None:
            self.state.is_fresh = True
            if self.skipping is not None:  # nobody writes to it: the others wait for this rank
                self.skipping.add(self.skipping.read_stored())
            self.recover(None)
        else:
            self.state.step = self.checkpointer.restore()
            self.state.data = self.training.loader.state_dict()
            if self.skipping is not None:
                self.skipping.add(self._skipped_before(self.skipping))
            if self.recovery is not None:
                self.recovery.snapshot(self.state)
                self.recovery.report_training(self.state.step)
        self._comparison.aligned_at = self.state.step
        self._at_step(Phase.DATA)
        # A job without an interval gets the recommended interval for the size of its model.
        num_parameters = sum(p.numel() for p in self.training.model.parameters())
        spec = self.context.job.checkpoint.resolved(num_parameters)
        self._clock = SaveClock(spec, self.training.loader, self.state.step)
        self.requests.in_loop = True

    def _skipped_before(self, skipping: SkippedData) -> list[SkippedBatch]:
        """Read the record, the same on every rank. Collective."""
        documents = from_first(
            lambda: [batch.model_dump() for batch in skipping.read_stored()],
            GroupRanks(self.device),
        )
        return [SkippedBatch.model_validate(document) for document in documents]

    def _at_step(self, phase: Phase | None = None) -> None:
        self.heartbeat.beat(phase=phase, step=self.state.step)
        if self.recovery is not None:
            self.recovery.groups.step = self.state.step

    @property
    def completed_step(self) -> int:
        """Steps that are in the weights; the step handed out counts once it is applied."""
        step = self.state.in_flight
        return step.number if step is not None and step.is_applied else self.state.step

    def next_step(self) -> Step | None:
        """Return the next step, or the previous step once more; None at the end.

        Raises:
            ValueError: the step before was not used as `with step:`.
            SystemExit: code 75, after saving, when the agent asked for the end.
        """
        while True:
            try:
                self._finish_step()
                self._do_pending()
                if self.state.step >= self.until:
                    self._end()
                    return None
                return self._new_step()
            except (RuntimeError, WorkerError) as error:
                if not self.is_recoverable(error):
                    raise
                self.recover(error)

    def end_at(self, step: int) -> None:
        """Have the loop end behind a step, and save it, where the program ends before its target.

        A step that was begun behind it is left; the next call of `next_step` is the end.
        """
        state = self.state
        if step >= self.until:
            return
        self.until = step
        if state.in_flight is not None and state.in_flight.number > step:
            state.in_flight = None
        state.batch = None
        has_trained = not self._is_first or bool(state.pending)
        if state.in_flight is None and has_trained and "last_save" not in state.pending:
            state.pending = (*state.pending, "last_save")

    def is_recoverable(self, error: BaseException) -> bool:
        """Whether an exception is a fault that this process outlives."""
        return self.recovery is not None and self.recovery.classify(error) is not None

    def _requests_at(self, number: int) -> StepRequests:
        # Only the first rank's clock and policy count, or the ranks would disagree.
        is_due = self.context.rank == 0 and self._clock.is_due(number)
        return StepRequests(
            stop=self.requests.stop,
            save=is_due or self.requests.save,
            pause=self.recovery is not None and self.recovery.groups.client.pause_wanted,
        )

    def recover(self, error: BaseException | None) -> None:
        """Bring this rank to one step with the others; None: it takes the place of another.

        Afterwards `state.step` says whether the step under way is in the weights, or comes again.

        Raises:
            BaseException: `error`, when the attempt is given up and it is this rank's own fault.
            SystemExit: code 75, when it is given up for another reason.
        """
        assert self.recovery is not None  # noqa: S101 asked by the callers
        plan = self.recovery.rejoin(self.state, error=error)
        self.has_applied = bool(plan.applies)
        state = self.state
        self._comparison.aligned_at = state.step  # on every rank alike, as the plan has it
        self._is_first = False  # on every rank alike; the next save prepares
        if plan.applies or plan.moves or plan.pending:
            # A rank that took a state has not done yet what the others have.
            state.pending = self._list_pending(state.vote)
        self._at_step()
        self._record(state.vote)
        for batch in state.skipped:  # a first rank that died may not have put it on record
            self._record_skipped(batch)
        self.recovery.snapshot(state)

    def _record(self, vote: Vote | None) -> None:
        if vote is None:
            return
        if self.recovery is not None:
            self.recovery.groups.end_step()
        self.records.add(self.state.step, vote, self.training.loader, step_s=self.state.step_s)

    def _finish_step(self) -> None:
        """Take in how the step that was handed out has ended."""
        step = self.state.in_flight
        if step is None:
            return
        error, step.error = step.error, None
        if step.is_skipped:
            self._skip(step)
        if error is not None:
            raise error
        if step.is_skipped:
            self._check_stretch()
            return
        if not step.is_applied:
            raise ValueError(f"step {step.number}: use it as 'with step:'")
        state = self.state
        state.step, state.vote, state.in_flight = step.number, step.vote, None
        state.skipped = ()
        state.data = self.training.loader.state_dict()
        state.pending = self._list_pending(step.vote)
        self._record(step.vote)
        self._at_step()
        every = self.context.job.restart.snapshot_every_steps
        if self.recovery is not None and state.step % every == 0:
            self.recovery.snapshot(state)

    def _skip(self, step: Step) -> None:
        """Leave a step that was abnormal; the next batch is to become it."""
        assert step.vote is not None  # noqa: S101 it has shown that the step is abnormal
        batch = skipped_batch(step.vote, *self.state.span)
        self.state.in_flight = None
        self._pass_over(batch)
        self._record_skipped(batch)
        if self.recovery is not None:
            self.recovery.groups.end_step()

    def _pass_over(self, batch: SkippedBatch) -> None:
        self.state.skipped += (batch,)
        self.state.data = self.training.loader.state_dict()

    def _record_skipped(self, batch: SkippedBatch, *, is_known: bool = False) -> None:
        """Put it on record, once, on the first rank."""
        if self.skipping is None or self.context.rank != 0:
            return
        is_new = self.skipping.find_skipped(batch.start, batch.stop) is None
        if is_new:
            self.skipping.record(batch)
            self.skipping.add([batch])
        if is_new or is_known:
            self.records.skipped(batch, is_known=is_known)

    def _check_stretch(self) -> None:
        """End the run after so many abnormal batches in a row, as MindFormers does.

        Raises:
            AbnormalStretch: they are that many.
        """
        assert self.skipping is not None  # noqa: S101 no step is skipped without
        skipped, limit = self.state.skipped, self.skipping.max_in_a_row
        if len(skipped) >= limit:
            # The end of another rank would cut the first one short, which writes the record.
            dist.barrier()
            raise AbnormalStretch(
                f"{len(skipped)} batches in a row are abnormal at step {skipped[-1].step}, samples "
                f"{skipped[0].start} to {skipped[-1].stop}: look at the data, the thresholds or "
                f"the learning rate; restart.max_skipped_in_a_row={limit}"
            )

    def _list_pending(self, vote: Vote | None) -> tuple[str, ...]:
        """List the work before the next step, by the vote of a step."""
        pending: list[str] = ["prepare"] if self._is_first else []
        is_last = self.state.step >= self.until or (vote is not None and vote.stop)
        if is_last:
            pending.append("last_save")
        elif vote is not None and vote.save:
            pending.append("save")
        if vote is not None and vote.pause and not is_last:
            pending.append("pause")
        if vote is not None and vote.stop and self.state.step < self.until:
            pending.append("stop")
        return tuple(pending)

    def _do_pending(self) -> None:
        state = self.state
        while state.pending:
            self._do(state.pending[0])
            state.pending = state.pending[1:]

    def _do(self, name: str) -> None:
        match name:
            case "prepare":
                self.heartbeat.beat(phase=Phase.SAVE)
                self.checkpointer.prepare()
                self._is_first = False
            case "save" | "last_save":
                self.faults.reached("save", self.state.step)
                self.heartbeat.beat(phase=Phase.SAVE)
                self._save(is_last=name == "last_save")
            case "pause":
                self._pause()
            case "stop":
                self._leave(Phase.STOPPED)
                raise SystemExit(EXIT_RESTART_ME)

    def _save(self, *, is_last: bool) -> None:
        """Save this step, and wait for the store when it is the last one; collective."""
        step, started_s = self.state.step, self._clock.now_s()
        is_new = self.checkpointer.save(
            step,
            data=self.state.data,
            attachments=self.records.unsaved(),
            loss=self.state.loss,
        )
        self.records.saved()
        # Not when the request was voted on: a fault may have had the vote taken again.
        self.requests.save = False
        self._clock.saved(step, started_s=started_s)
        if is_last:
            self.checkpointer.settle(SETTLE_TIMEOUT_S)
        if not self.checkpointer.is_behind:  # else the checkpoint server does the rest
            self.records.committed(step)
            if is_new:
                self.checkpointer.apply_retention(step)

    def _pause(self) -> None:
        """Wait at this step boundary, as all ranks do, until the pause is over."""
        if self.recovery is None:
            return
        self.heartbeat.beat(phase=Phase.PAUSED)
        groups = self.recovery.groups
        groups.client.pause(
            groups.generations.current, step=self.state.step, until=lambda: self.requests.stop
        )
        groups.client.send(Paused(step=self.state.step, is_paused=False))

    def _new_step(self) -> Step:
        state = self.state
        number = state.step + 1
        self.state.started_s = time.perf_counter()  # waiting for data is part of a step
        self.heartbeat.beat(phase=Phase.DATA)
        if (
            state.batch is None
        ):  # and kept until the step is in flight: a stopped device has no seed
            state.batch = self._next_batch()
        self.heartbeat.beat(phase=Phase.STEP)
        stream = self.context.layout.stream(self.context.rank)
        seed_step(self.context.job.seed, rank=stream, step=number)
        step = Step(number, state.batch, self._steps)
        state.batch, state.in_flight = None, step
        return step

    def _next_batch(self) -> Sequence[MicroBatch]:
        """Return the next batch to train on."""
        state, loader = self.state, self.training.loader
        while True:
            state.data = loader.state_dict()
            start, began_ns = loader.position, time.monotonic_ns()
            batch = checked(loader.next_step())
            self.heartbeat.record_data_wait(time.monotonic_ns() - began_ns)
            state.span = (start, loader.position)
            skipped = self.skipping.find_skipped(*state.span) if self.skipping is not None else None
            if skipped is None:
                return batch
            self.heartbeat.beat(phase=Phase.DATA)
            self._pass_over(skipped)
            self._record_skipped(skipped, is_known=True)

    def _end(self) -> None:
        """End the loop at its target."""
        if self._is_first:  # nothing was left to do, but what was restored may not be in the store
            self.heartbeat.beat(phase=Phase.SAVE)
            self.checkpointer.settle(SETTLE_TIMEOUT_S)
        if self.stays:
            self.requests.in_loop = False
            # The work behind the last step has the limit of an evaluation.
            self.heartbeat.beat(phase=Phase.EVALUATE)
            return
        self.leave()

    def leave(self) -> None:
        """End a program that reached its last step. Collective."""
        self._leave(Phase.DONE)

    def _leave(self, phase: Phase) -> None:
        """End together: a rank that left early would look like a failure to the others."""
        dist.barrier()
        self.requests.in_loop = False
        if self.recovery is not None:
            client = self.recovery.groups.client
            client.send(Ending(step=self.state.step))
            client.close()
        self.training.loader.close()
        self.heartbeat.beat(phase=phase)
        dist.destroy_process_group()
