"""The worker's side of a run: join, register, loop over steps.

    session = training.join()
    session.register(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in session.steps(until=session.job.steps):
        with step:
            for inputs, targets in step.micro_batches():
                step.backward(model(inputs, targets))
            step.apply()

The loop restores first, saves between steps, and ends early, with everything saved, when the
node agent asks for it. Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import datetime as dt
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn

from storage.address import open_store
from storage.checkpoint import CheckpointStore
from storage.policy import apply_retention
from training.device import backend_of, pick_device
from training.diagnosis.exits import EXIT_RESTART_ME
from training.errors import InputError
from training.monitor.heartbeat import HeartbeatWriter, Phase
from training.runtime.buckets import settle_buckets
from training.runtime.checkpointing import Checkpointer
from training.runtime.context import WorkerContext
from training.runtime.metrics import MetricsLog, StepRecord, metrics_prefix
from training.runtime.policies import SaveClock, retention_policy
from training.runtime.step import MicroBatch, Scheduler, Step, Training, Wishes
from training.specs.recovery import CheckpointSpec


class Loader(Protocol):
    """What a session needs of a resumable data loader."""

    @property
    def position(self) -> int:
        """Global samples handed out."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        ...

    def next_step(self) -> Sequence[MicroBatch]:
        """The micro-batches of this rank for one step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


class Session:
    """This process's part in the run. Made by `training.join()`.

    Attributes:
        newest_step: last step of a loop that came to its end in this process, 0 before.
    """

    newest_step: ClassVar[int] = 0

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.job = context.job
        self._heartbeat = HeartbeatWriter(context.heartbeat_path)
        self.device = pick_device(context.local_rank)
        self._stop_wanted = False
        self._looping = False
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._store = open_store(self.job.storage)
        self._checkpoints = CheckpointStore(self._store, self.job.run_id)
        self._training: Training | None = None
        self._loader: Loader | None = None
        self._saves: SaveClock | None = None
        self._tokens_per_step = 0
        self._flops_per_step = 0.0
        self._peak_flops: float | None = None
        self._metrics: MetricsLog | None = None
        if self.rank == 0:
            prefix = metrics_prefix(self.job.run_id, context.placement, context.attempt)
            self._metrics = MetricsLog(context.metrics_path, self._store, prefix)
        dist.init_process_group(
            backend_of(self.device),
            rank=context.rank,
            world_size=context.world_size,
            timeout=dt.timedelta(seconds=self.job.comm.timeout_s),
        )

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Loader,
        scheduler: Scheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Say what is trained; it is what checkpoints hold. Collective: every rank calls it."""
        clip = self.job.optimizer.grad_clip_norm
        _require_loader(data)
        self._training = Training(model, optimizer, scheduler, scaler, clip)
        self._loader = data
        settle_buckets(model)

    def measure(
        self, *, tokens_per_step: int, flops_per_step: float = 0.0, peak_flops: float | None = None
    ) -> None:
        """Say how much a step computes, for tokens/s and MFU.

        Args:
            tokens_per_step: of all ranks together.
            flops_per_step: model FLOPs of all ranks together.
            peak_flops: peak FLOP/s of one device.
        """
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops

    def steps(self, *, until: int) -> Iterator[Step]:
        """The steps from the newest checkpoint up to `until`.

        Raises:
            ValueError: nothing was registered.
            SystemExit: code 75, after saving, when the agent asked for the end.
        """
        training, loader = self._training, self._loader
        if training is None or loader is None:
            raise ValueError("session.register(model=..., optimizer=..., data=...) comes first")
        checkpointer = Checkpointer(self.context, self._checkpoints, training, loader, self.device)
        self._heartbeat.beat(phase=Phase.RESTORE)
        restored = checkpointer.restore()
        self._saves = SaveClock(self._checkpoint_spec(training.model), loader, restored)
        done = self._saves.step
        self._heartbeat.beat(phase=Phase.DATA, step=done)
        self._looping = True
        while done < until:
            started_s = time.perf_counter()  # waiting for data is part of a step
            step = self._next_step(done + 1, training, loader)
            yield step
            agreement = step.agreement
            if agreement is None:
                raise ValueError(f"step {step.number}: use it as `with step:`")
            done = step.number
            self._record(step, agreement.loss, time.perf_counter() - started_s)
            self._heartbeat.beat(step=done)
            if agreement.save or agreement.stop or done == until:
                self._save(checkpointer, done)
            if agreement.stop and done < until:
                self._leave(loader, Phase.STOPPED)
                sys.exit(EXIT_RESTART_ME)
        self._leave(loader, Phase.DONE)
        Session.newest_step = done

    def _checkpoint_spec(self, model: nn.Module) -> CheckpointSpec:
        """The job's policy, with the recommended interval for the model's size if it has none."""
        return self.job.checkpoint.resolved(sum(p.numel() for p in model.parameters()))

    def _next_step(self, number: int, training: Training, loader: Loader) -> Step:
        self._heartbeat.beat(phase=Phase.DATA)
        batch = loader.next_step()
        self._heartbeat.beat(phase=Phase.STEP)
        return Step(
            number,
            batch=batch,
            training=training,
            device=self.device,
            wishes=self._wishes,
            heartbeat=self._heartbeat,
        )

    def _wishes(self, number: int) -> Wishes:
        # Only the first rank's clock and policy count, or the ranks would disagree.
        save = self.rank == 0 and self._saves is not None and self._saves.is_due(number)
        return Wishes(stop=self._stop_wanted, save=save)

    def _save(self, checkpointer: Checkpointer, step: int) -> None:
        self._heartbeat.beat(phase=Phase.SAVE)
        assert self._saves is not None  # noqa: S101 set before the first step
        started_s = self._saves.now_s()
        if self._metrics is not None:
            self._metrics.flush()
        fresh = checkpointer.save(step)
        self._saves.saved(step, started_s=started_s)
        if self._metrics is not None:
            self._metrics.checkpoint(step)
        if fresh and self.rank == 0:
            apply_retention(
                self._checkpoints, retention_policy(self.job.checkpoint), protect={step}
            )

    def _record(self, step: Step, loss: float, step_s: float) -> None:
        if self._metrics is None:
            return
        assert self._training is not None  # noqa: S101 checked by steps()
        assert self._loader is not None  # noqa: S101 checked by steps()
        scheduler = self._training.scheduler
        lr = scheduler.get_last_lr()[0] if scheduler is not None else self.job.optimizer.lr
        self._metrics.step(
            StepRecord(
                step=step.number,
                loss=loss,
                grad_norm=step.grad_norm,
                lr=float(lr),
                tokens_per_s=self._tokens_per_step / step_s,
                mfu=self._mfu(step_s),
                at_s=time.time(),
                step_s=step_s,
                position=self._loader.position,
                epoch=self._loader.epoch,
                placement=self.context.placement,
                attempt=self.context.attempt,
            )
        )

    def _mfu(self, step_s: float) -> float | None:
        if not self._peak_flops or not self._flops_per_step:
            return None
        return self._flops_per_step / step_s / (self._peak_flops * self.world_size)

    def _leave(self, loader: Loader, phase: Phase) -> None:
        """End together: a rank that left early would look like a failure to the others."""
        self._looping = False
        loader.close()
        if self._metrics is not None:
            self._metrics.close()
        dist.barrier()
        self._heartbeat.beat(phase=phase)
        dist.destroy_process_group()

    def _on_terminate(self, _number: int, _frame: object) -> None:
        """Inside the loop the step boundary answers; before it there is nothing to save."""
        if not self._looping:
            sys.exit(EXIT_RESTART_ME)
        self._stop_wanted = True


def _require_loader(data: object) -> None:
    needed = ("next_step", "position", "epoch", "state_dict", "load_state_dict", "close")
    missing = [name for name in needed if not hasattr(data, name)]
    if missing:
        raise InputError(
            "session.register(data=...)",
            f"{type(data).__name__} lacks {', '.join(missing)}; "
            "training.runtime.session.Loader says what they are",
        )


def join() -> Session:
    """Take this process's place in its run: device, process group, heartbeat, storage.

    Raises:
        InputError: the program was not started by a node agent.
    """
    return Session(WorkerContext.from_environment())
