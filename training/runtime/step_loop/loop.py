"""From one step boundary to the next, faults included.

Everything that needs all ranks, the step itself, a save, the end, may be cut short by a fault.
What was still to be done is told to the coordinator then, and done again by all ranks once they
stand at one step. Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from training.diagnosis.exits import EXIT_RESTART_ME
from training.health.heartbeat import HeartbeatWriter, Phase
from training.recovery.protocol import Ending, Paused
from training.recovery.repair import Vote
from training.runtime.errors import WorkerError
from training.runtime.program import Loader, Training
from training.runtime.state.checkpointer import Checkpointer
from training.runtime.state.random_numbers import seed_step
from training.runtime.step_loop.rank_recovery import RankRecovery, Stand
from training.runtime.step_loop.step import Limits, Step, StepRequests, Surroundings

SETTLE_TIMEOUT_S = 1800.0  # for the last save to reach the store


class Host(Protocol):
    """What the loop needs of its session."""

    def wishes(self, number: int) -> StepRequests:
        """What this rank brings to the agreement of a step."""
        ...

    def loss_factor(self, number: int) -> float:
        """What a drill multiplies the loss of a step with."""
        ...

    def record(self, step: int, vote: Vote, step_s: float) -> None:
        """Put a completed step on record."""
        ...

    def save(self, step: int, *, data: dict[str, Any], is_last: bool) -> None:
        """Save a step, with the position of the data after it; collective.

        Waits for the store when it is the last one.
        """
        ...

    def is_stopping(self) -> bool:
        """Whether this process was asked to end."""
        ...


@dataclass(slots=True)
class StepLoop:
    """The steps of one process.

    Attributes:
        host: the session.
        until: target step.
        rank: of this process.
        seed: of the job.
        training: what is trained.
        loader: its data.
        checkpointer: saves and restores.
        device: of this rank.
        heartbeat: shows that this process lives.
        limits: beyond which a step is abnormal.
        mender: mends faults while the process lives; None: they end it.
        snapshot_every_steps: how often the state is kept to go back to, where it is.
        reached: told of points where drills make faults.
        is_over: the loop came to its end.
        stand: where this rank stands.
    """

    host: Host
    until: int
    rank: int
    seed: int
    training: Training
    loader: Loader
    checkpointer: Checkpointer
    device: torch.device
    heartbeat: HeartbeatWriter
    limits: Limits
    snapshot_every_steps: int
    mender: RankRecovery | None
    reached: Callable[[str, int], None]
    stand: Stand = field(default_factory=lambda: Stand(0, {}))
    is_over: bool = False
    _is_first: bool = True
    _started_s: float = 0.0

    def begin(self, *, is_fresh: bool) -> None:
        """Restore, or take the place of another process. Collective.

        Args:
            is_fresh: this process takes the place of another.
        """
        self.heartbeat.beat(phase=Phase.RESTORE)
        if is_fresh:
            assert self.mender is not None  # noqa: S101 nobody else starts such a process
            self.stand.is_fresh = True
            self._rejoin(None)
        else:
            self.stand.step = self.checkpointer.restore()
            self.stand.data = self.loader.state_dict()
            if self.mender is not None:
                self.mender.snapshot(self.stand)
                self.mender.trains(self.stand.step)
        self.heartbeat.beat(phase=Phase.DATA, step=self.stand.step)

    def next_step(self) -> Step | None:
        """The next step, or the one before once more; None at the end.

        Raises:
            ValueError: the step before was not used as `with step:`.
            SystemExit: code 75, after saving, when the agent asked for the end.
        """
        while True:
            try:
                self._finish_step()
                self._do_pending()
                if self.stand.step >= self.until:
                    self._end()
                    return None
                return self._new_step()
            except (RuntimeError, WorkerError) as error:
                if self.mender is None or self.mender.look_at(error) is None:
                    raise
                self._rejoin(error)

    def _rejoin(self, error: BaseException | None) -> None:
        assert self.mender is not None  # noqa: S101 asked by the callers
        plan = self.mender.rejoin(self.stand, error=error)
        stand = self.stand
        self._is_first = False  # on every rank alike; the next save prepares
        if plan.applies or plan.moves or plan.pending:
            # Whoever took a state has not done yet what the others have.
            stand.pending = self._after(stand.vote)
        self.heartbeat.beat(step=stand.step)
        if stand.vote is not None:
            self.host.record(stand.step, stand.vote, time.perf_counter() - self._started_s)
        self.mender.snapshot(stand)

    def _finish_step(self) -> None:
        """Take in how the step that was handed out has ended."""
        step = self.stand.in_flight
        if step is None:
            return
        if step.error is not None:
            error, step.error = step.error, None
            raise error
        if not step.is_applied:
            raise ValueError(f"step {step.number}: use it as `with step:`")
        vote = step.vote
        assert vote is not None  # noqa: S101 nothing is applied before it
        stand = self.stand
        stand.step, stand.vote, stand.in_flight = step.number, vote, None
        stand.data = self.loader.state_dict()
        stand.pending = self._after(vote)
        self.host.record(stand.step, vote, time.perf_counter() - self._started_s)
        self.heartbeat.beat(step=stand.step)
        if self.mender is not None and stand.step % self.snapshot_every_steps == 0:
            self.mender.snapshot(stand)

    def _after(self, vote: Vote | None) -> tuple[str, ...]:
        """What the agreement of a step asks for before the next one."""
        pending: list[str] = ["prepare"] if self._is_first else []
        is_last = self.stand.step >= self.until or (vote is not None and vote.stop)
        if is_last:
            pending.append("last_save")
        elif vote is not None and vote.save:
            pending.append("save")
        if vote is not None and vote.pause and not is_last:
            pending.append("pause")
        if vote is not None and vote.stop and self.stand.step < self.until:
            pending.append("stop")
        return tuple(pending)

    def _do_pending(self) -> None:
        stand = self.stand
        while stand.pending:
            self._do(stand.pending[0])
            stand.pending = stand.pending[1:]

    def _do(self, name: str) -> None:
        match name:
            case "prepare":
                self.heartbeat.beat(phase=Phase.SAVE)
                self.checkpointer.prepare()
                self._is_first = False
            case "save" | "last_save":
                self.reached("save", self.stand.step)
                self.heartbeat.beat(phase=Phase.SAVE)
                stand = self.stand
                self.host.save(stand.step, data=stand.data, is_last=name == "last_save")
            case "pause":
                self._stand_still()
            case "stop":
                self._leave(Phase.STOPPED)
                raise SystemExit(EXIT_RESTART_ME)

    def _stand_still(self) -> None:
        """Wait at this step boundary, as all ranks do, until nobody wants it any more."""
        mender = self.mender
        if mender is None:
            return
        self.heartbeat.beat(phase=Phase.PAUSED)
        mender.contact.pause(
            mender.generations.current, step=self.stand.step, until=self.host.is_stopping
        )
        mender.contact.send(Paused(step=self.stand.step, is_paused=False))

    def _new_step(self) -> Step:
        stand = self.stand
        number = stand.step + 1
        self._started_s = time.perf_counter()  # waiting for data is part of a step
        self.heartbeat.beat(phase=Phase.DATA)
        if stand.batch is not None:
            batch, stand.batch = stand.batch, None
        else:
            stand.data = self.loader.state_dict()
            began_ns = time.monotonic_ns()
            batch = self.loader.next_step()
            self.heartbeat.waited_for_data(time.monotonic_ns() - began_ns)
        self.heartbeat.beat(phase=Phase.STEP)
        seed_step(self.seed, rank=self.rank, step=number)
        stand.in_flight = Step(
            number,
            batch=batch,
            training=self.training,
            device=self.device,
            heartbeat=self.heartbeat,
            around=Surroundings(
                self.host.wishes, self._may_mend, self.reached, self.host.loss_factor
            ),
            limits=self.limits,
        )
        return stand.in_flight

    def _may_mend(self, error: BaseException) -> bool:
        return self.mender is not None and self.mender.look_at(error) is not None

    def _end(self) -> None:
        """The target is reached."""
        if self._is_first:  # nothing was left to do, but what was restored may not be in the store
            self.heartbeat.beat(phase=Phase.SAVE)
            self.checkpointer.settle(SETTLE_TIMEOUT_S)
        self._leave(Phase.DONE)

    def _leave(self, phase: Phase) -> None:
        """End together: a rank that left early would look like a failure to the others."""
        dist.barrier()
        self.is_over = True
        if self.mender is not None:
            self.mender.contact.send(Ending(step=self.stand.step))
            self.mender.contact.close()
        self.loader.close()
        self.heartbeat.beat(phase=phase)
        dist.destroy_process_group()
