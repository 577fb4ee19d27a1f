"""How a rank comes out of a fault at the same step as all others, on the coordinator's plan.

Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from storage.errors import StorageError
from training.device import Healing, healing_of
from training.diagnosis.exits import EXIT_RESTART_ME
from training.health.heartbeat import HeartbeatWriter, Phase
from training.masking import masked_text, secret_values
from training.recovery.protocol import (
    GenerationReport,
    LastSaved,
    Trains,
    WorkerFault,
    WorkerFaultKind,
)
from training.recovery.repair import RankReport, RepairMode, RepairPlan, StepPhase, Vote
from training.runtime.coordinator_client import CoordinatorClient
from training.runtime.errors import GivenUp, NumericAnomaly, WorkerError
from training.runtime.process_group.generations import Generations
from training.runtime.process_group.reconfigurable import default_group
from training.runtime.program import Loader, MicroBatch, Training
from training.runtime.state.checkpointer import Checkpointer
from training.runtime.state.live import Snapshots
from training.runtime.state.transfer import local_part, receive_header, receive_tensors, send_state
from training.runtime.step_loop.step import Step
from training.runtime.step_loop.worker_faults import RecoverableError, classify
from training.runtime.step_loop.wrappers import reset

_log = logging.getLogger("perdure.runtime")


@dataclass(slots=True)
class Stand:
    """Where this rank stands.

    Attributes:
        step: completed steps in its state.
        data: position of the data after them.
        vote: of the last of them, None when it was not taken here.
        in_flight: the step after, once it is handed out.
        batch: of the step after, which is to be done again.
        pending: what is to be done before the next step, by name.
        is_fresh: there is no state yet: this process takes the place of another.
        is_dirty: the state is not to be trusted.
    """

    step: int
    data: dict[str, Any]
    vote: Vote | None = None
    in_flight: Step | None = None
    batch: Sequence[MicroBatch] | None = None
    pending: tuple[str, ...] = ()
    is_fresh: bool = False
    is_dirty: bool = False

    def report(self, rank: int, snapshot_step: int | None) -> RankReport:
        """For the coordinator."""
        flying = self.in_flight
        half = flying is not None and flying.is_dirty
        votes = (self.vote, flying.vote if flying is not None else None)
        return RankReport(
            rank=rank,
            step=self.step,
            phase=flying.phase if flying is not None else StepPhase.RUN,
            is_dirty=self.is_dirty or half,
            is_fresh=self.is_fresh,
            snapshot_step=snapshot_step,
            votes=tuple(vote for vote in votes if vote is not None),
            pending=self.pending,
        )


@dataclass(slots=True)
class RankRecovery:
    """Brings this rank back to one step with the others.

    Attributes:
        rank: of this process.
        contact: to the coordinator.
        generations: of the process groups.
        training: what is trained.
        loader: its data.
        checkpointer: gives and takes state.
        device: of this rank.
        heartbeat: shows that this process lives.
        save_limit_s: for the end-of-life checkpoint to reach the store.
        reached: told of points where drills make faults.
        snapshots: to go back to, None when the job has none.
        healing: what the device needs.
    """

    rank: int
    contact: CoordinatorClient
    generations: Generations
    training: Training
    loader: Loader
    checkpointer: Checkpointer
    device: torch.device
    heartbeat: HeartbeatWriter
    save_limit_s: float
    reached: Callable[[str, int], None] = lambda _point, _step: None
    snapshots: Snapshots | None = None
    healing: Healing = field(init=False)

    def __post_init__(self) -> None:
        """Find out what the device needs."""
        self.healing = healing_of(self.device)

    def look_at(self, error: BaseException) -> RecoverableError | None:
        """What an exception is, None when it is the program's own."""
        if isinstance(error, NumericAnomaly):
            return RecoverableError(WorkerFaultKind.NUMERIC, str(error))
        interrupted = self.generations.announced > self.generations.current
        return classify(error, is_interrupted=interrupted)

    def rejoin(self, stand: Stand, *, error: BaseException | None = None) -> RepairPlan:
        """Tell of a fault, and come out of it together with the others.

        Args:
            stand: where this rank stands; brought up to date.
            error: what was caught, None for a process that takes the place of another.

        Raises:
            BaseException: `error`, when the attempt is given up and it is this rank's own fault.
            SystemExit: code 75, when it is given up for another rank's, or once the last
                checkpoint is written.
        """
        self.heartbeat.beat(phase=Phase.RECOVER)
        if error is not None:
            self._tell(error, stand)
        while True:
            try:
                plan = self._follow(stand)
            except GivenUp as exc:
                self._leave(error, exc)
            except (RuntimeError, WorkerError) as exc:
                self._stumbled(exc, stand)
            else:
                self.heartbeat.beat(phase=Phase.STEP)
                return plan

    def _leave(self, error: BaseException | None, given_up: GivenUp) -> NoReturn:
        """End this process with what it knows: its traceback, if the fault was here."""
        seen = self.look_at(error) if error is not None else None
        if error is not None and (seen is None or seen.kind is not None):
            raise error from None
        what = f"{given_up}; it ran into: {seen.text}" if seen is not None else str(given_up)
        _log.info(f"rank {self.rank} ends: {what}")
        raise SystemExit(EXIT_RESTART_ME) from None

    def _tell(self, error: BaseException, stand: Stand) -> None:
        seen = self.look_at(error)
        if seen is None or seen.kind is None:
            return
        stand.is_dirty = stand.is_dirty or seen.kind is WorkerFaultKind.MEMORY
        flying = stand.in_flight
        vote = flying.vote if flying is not None else None
        finite = vote is None or (math.isfinite(vote.loss) and math.isfinite(vote.grad_norm))
        self._say(seen, stand.step, is_finite=finite, vote=vote)

    def _stumbled(self, error: BaseException, stand: Stand) -> None:
        """A fault inside the recovery: somebody tells the coordinator, and it begins anew."""
        seen = self.look_at(error)
        if seen is None:
            raise error
        stand.is_dirty = stand.is_dirty or seen.kind is WorkerFaultKind.MEMORY
        if self.generations.announced <= self.generations.current:
            self._say(
                RecoverableError(WorkerFaultKind.REPAIR, seen.text, seen.code),
                stand.step,
                is_finite=True,
            )

    def _say(
        self, seen: RecoverableError, step: int, *, is_finite: bool, vote: Vote | None = None
    ) -> None:
        assert seen.kind is not None  # noqa: S101 callers look
        self.contact.send(
            WorkerFault(
                generation=self.generations.current,
                kind=seen.kind,
                text=masked_text(seen.text, secret_values(os.environ))[:500],
                step=step,
                at_s=time.time(),
                code=seen.code,
                grad_norm=vote.grad_norm if vote is not None else None,
                culprit=vote.culprit if vote is not None else None,
                is_finite=is_finite,
            )
        )

    def _follow(self, stand: Stand) -> RepairPlan:
        """Take part in the newest generation, up to where training goes on."""
        generation = self.contact.newer_than(self.generations.current)
        self.healing.stop()
        self.generations.enter(generation)
        self.heartbeat.generation = generation
        snapshot_step = self.snapshots.step if self.snapshots is not None else None
        report = stand.report(self.rank, snapshot_step)
        self.contact.send(GenerationReport(generation=generation, report=report))
        self._heal(stand)
        # While others are still on their way: no plan wants a gradient that is not ready.
        is_ready = stand.is_fresh or report.phase < StepPhase.PREPARED
        if is_ready and not stand.is_fresh:
            reset(self.training, self.generations)
        plan = self.contact.plan_for(generation)
        self.reached("recovery", plan.step + 1)
        self._catch_up(stand, plan)
        if not is_ready:
            reset(self.training, self.generations)
        self.checkpointer.forget(generation)
        if plan.mode is RepairMode.LAST_SAVE:
            self._save_and_end(stand, plan)
        # By everybody and at once: a link made inside a transfer between two would wait for the
        # others, who wait in their next collective.
        default_group().connect()
        if plan.rolls_back:
            self._roll_back(stand, plan)
        self._exchange(stand, plan)
        self.generations.check()
        stand.vote = plan.vote
        stand.pending = plan.pending
        self.trains(stand.step)
        return plan

    def _heal(self, stand: Stand) -> None:
        """Have the device take work again; one that cannot is left to a new process."""
        parts = (self.training.model.parameters(), self.training.model.buffers())
        state = self.training.optimizer.state.values()
        tensors = [*chain(*parts), *(v for one in state for v in one.values())]
        self.healing.clean(
            [local_part(one) for one in tensors if isinstance(one, Tensor)],
            is_damaged=stand.is_dirty,
        )

    def _catch_up(self, stand: Stand, plan: RepairPlan) -> None:
        """Apply a gradient that every rank was known to hold."""
        flying = stand.in_flight
        if self.rank in plan.applies and flying is not None:
            flying.finish(plan.vote)
            stand.step, stand.data = flying.number, self.loader.state_dict()
            stand.vote = flying.vote  # a fault may come before the end, and it is reported again
        elif flying is not None:
            # Whatever this plan is about: it may come to nothing, and the next one may have this
            # very step done again.
            stand.batch = flying.data
        stand.in_flight = None

    def _exchange(self, stand: Stand, plan: RepairPlan) -> None:
        """Give this rank's state to whoever lost theirs, or take one."""
        for move in plan.moves:
            if move.source == self.rank:
                tensors, extra = self.checkpointer.live.whole()
                extra["data"] = stand.data
                send_state(tensors, extra, to=move.target, device=self.device)
            elif move.target == self.rank:
                rooms, extra = receive_header(source=move.source, device=self.device)
                stand.is_dirty = True  # until it is whole
                fill = partial(receive_tensors, names=rooms, source=move.source, device=self.device)
                self.checkpointer.live.adopt(extra, fill, rooms)
                self._stand_at(stand, plan, extra["data"])
                stand.is_fresh = False

    def _roll_back(self, stand: Stand, plan: RepairPlan) -> None:
        """Take this rank's own snapshot, unless it gets another one's."""
        if any(move.target == self.rank for move in plan.moves):
            return
        assert self.snapshots is not None  # noqa: S101 the plan follows from what was reported
        kept = self.snapshots.extra
        self.checkpointer.live.adopt(kept, self.snapshots.restore)
        self._stand_at(stand, plan, kept["data"])

    def _stand_at(self, stand: Stand, plan: RepairPlan, data: dict[str, Any]) -> None:
        self.loader.load_state_dict(data)
        stand.step, stand.vote, stand.data = plan.step, plan.vote, data
        stand.batch, stand.is_dirty = None, False

    def _save_and_end(self, stand: Stand, plan: RepairPlan) -> None:
        """The end-of-life checkpoint."""
        problem = None
        if self.rank in plan.savers:
            self.heartbeat.beat(phase=Phase.SAVE)
            try:
                self.checkpointer.last_save(
                    stand.step, plan.savers, data=stand.data, timeout_s=self.save_limit_s
                )
            except (StorageError, RuntimeError) as exc:
                problem = f"rank {self.rank}: {type(exc).__name__}: {exc}"[:500]
        self.contact.send(LastSaved(step=stand.step, problem=problem))
        self.contact.close()
        raise SystemExit(EXIT_RESTART_ME)

    def trains(self, step: int) -> None:
        """Tell that this rank is in its loop."""
        self.contact.send(Trains(generation=self.generations.current, step=step))

    def snapshot(self, stand: Stand) -> None:
        """Keep this step to go back to."""
        if self.snapshots is not None:
            tensors, extra = self.checkpointer.live.whole()
            extra["data"] = stand.data
            self.snapshots.take(stand.step, tensors, extra)
