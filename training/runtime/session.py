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
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import IO, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from storage.address import open_store
from storage.checkpoint import CheckpointStore
from storage.retention import apply_retention
from storage.saving import SaveHooks
from training.device import backend_of, pick_device
from training.diagnosis.exits import EXIT_RESTART_ME
from training.errors import InputError
from training.health.heartbeat import HeartbeatWriter, Phase, stacks_file
from training.injection.inside import WorkerInjector
from training.journal.attempt_log import AttemptLog, Follower
from training.journal.events import CheckpointCommitted, StepRecord
from training.journal.steps import UnsavedSteps, metrics_prefix
from training.log import start_logging
from training.recovery.protocol import Reconnected, WorkerFault, WorkerFaultKind
from training.recovery.repair import Vote
from training.runtime.context import WorkerContext
from training.runtime.coordinator_client import CoordinatorClient
from training.runtime.damage import break_connections, damage_state
from training.runtime.errors import WorkerError
from training.runtime.process_group.connections import GLOO, StoreClient
from training.runtime.process_group.generations import Generations
from training.runtime.process_group.reconfigurable import install
from training.runtime.process_group.replay import ReplayableConnections, ReplayableProcessGroup
from training.runtime.program import Loader, Scheduler, Training
from training.runtime.state.checkpointer import Checkpointer
from training.runtime.state.live import Snapshots
from training.runtime.state.random_numbers import Undrawn, seeded_after
from training.runtime.step_loop.loop import SETTLE_TIMEOUT_S, StepLoop
from training.runtime.step_loop.rank_recovery import RankRecovery
from training.runtime.step_loop.records import EventFiles
from training.runtime.step_loop.save_clock import SaveClock
from training.runtime.step_loop.step import Limits, Step, StepRequests
from training.runtime.step_loop.wrappers import settle_buckets
from training.specs.recovery import CheckpointSpec


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
        self._save_wanted = False
        self._loop: StepLoop | None = None
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_save_signal)
        self._stacks = _print_stacks_on_request(context)
        self._store = open_store(self.job.storage)
        self._checkpoints = CheckpointStore(self._store, self.job.run_id)
        self._training: Training | None = None
        self._loader: Loader | None = None
        self._saves: SaveClock | None = None
        self._checkpointer: Checkpointer | None = None
        self._unsaved_records: dict[str, str] = {}
        self._tokens_per_step = 0
        self._flops_per_step = 0.0
        self._peak_flops: float | None = None
        self._log: AttemptLog | None = None
        self._unsaved_steps = UnsavedSteps(
            metrics_prefix(self.job.run_id, context.placement, context.attempt)
        )
        self._event_files: EventFiles | None = None
        if self.rank == 0:
            self._unsaved_steps.catch_up(Follower.of_file(context.metrics_path))
            self._log = AttemptLog(context.metrics_path)
            self._event_files = EventFiles.of(self.job.watch.tensorboard, self.job.run_id)
        self._contact: CoordinatorClient | None = None
        self._generations: Generations | None = None
        self._links: ReplayableConnections | None = None
        self._connect()
        self._faults = WorkerInjector(
            self.job.drill.faults,
            rank=self.rank,
            store=self._store,
            run_id=self.job.run_id,
            damage_state=lambda: damage_state(self._training),
            break_connections=lambda: break_connections(self._generations),
        )
        if self._links is not None:
            self._links.on_begin = self._faults.on_collective

    def _connect(self) -> None:
        """Take part in the process groups of the attempt."""
        context, timeout_s = self.context, self.job.comm.timeout_s
        backend = backend_of(self.device)
        if context.coordinator is None:
            dist.init_process_group(
                backend,
                rank=context.rank,
                world_size=context.world_size,
                timeout=dt.timedelta(seconds=timeout_s),
            )
            return
        generations = Generations(
            context.rank,
            backend=backend,
            device=self.device.type,
            op_timeout_s=timeout_s,
            open_store=_open_store,
            on_collective=self._heartbeat.enter_collective,
            on_collective_end=self._heartbeat.leave_collective,
            on_transfer=self._heartbeat.transfer,
        )
        if backend == GLOO:
            self._links = ReplayableConnections(
                generations,
                open_store=_open_store,
                report=self._report_broken_connection,
                budget_s=self.job.comm.link_retry_s,
                replays=self.job.comm.link_retry,
            )
        install(
            generations,
            world_size=context.world_size,
            new_group=partial(ReplayableProcessGroup, generations, self._links)
            if self._links
            else None,
        )
        self._contact = CoordinatorClient.of_file(
            context.coordinator,
            rank=context.rank,
            on_generation=generations.announce,
            on_wait=self._heartbeat.beat,
        )
        if self._links is not None:
            generations.on_announced = self._links.fail
            self._contact.on_reconnect = self._reconnect
        self._generations = generations
        if context.generation is None:
            generations.enter(self._contact.newer_than(0))
        else:
            # What the others built together is built alone here; their state comes later.
            generations.is_alone = True

    def _report_broken_connection(self, text: str, link: int) -> None:
        """An operation was cut short; the training thread does not know."""
        assert self._contact is not None  # noqa: S101 links come with a coordinator
        assert self._generations is not None  # noqa: S101 likewise
        self._contact.send(
            WorkerFault(
                generation=self._generations.current,
                kind=WorkerFaultKind.CONNECTION,
                text=text.strip().splitlines()[0][:500],
                step=self._loop.stand.step if self._loop is not None else 0,
                at_s=time.time(),
                connection=link,
            )
        )

    def _reconnect(self, generation: int, link: int) -> None:
        """Make new links under operations that were cut short; in a thread of its own."""
        assert self._contact is not None  # noqa: S101 links come with a coordinator
        assert self._links is not None  # noqa: S101 asked only where they are kept
        count, problem = 0, None
        try:
            count = self._links.reconnect(generation, link)
        except (RuntimeError, WorkerError) as exc:
            problem = f"{type(exc).__name__}: {exc}"[:500]
        self._contact.send(
            Reconnected(generation=generation, connection=link, operations=count, problem=problem)
        )

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of the model, optional: a replaced process comes back sooner.

        Its parameters are sent by another rank, so they are not drawn at random first. Random
        numbers after it are the same in every process; those within it need not be, but for
        parameters and buffers, which are sent. A model that computes anything else from its
        parameters, or draws anything else, when it is made does without this.
        """
        is_sent = self.context.generation is not None
        with seeded_after(), Undrawn() if is_sent else nullcontext():
            yield

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

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation between two steps: its silence has a limit of its own.

        Inside the loop and outside of `with step:`, on every rank alike.
        """
        self._heartbeat.beat(phase=Phase.EVALUATE)
        try:
            yield
        finally:
            self._heartbeat.beat(phase=Phase.STEP)

    def steps(self, *, until: int) -> Iterator[Step]:
        """The steps from the newest checkpoint up to `until`.

        A fault that the process outlives leaves `with step:` quietly, and the same step comes
        again once it is mended: what the loop does with a step belongs inside the block.

        Raises:
            ValueError: nothing was registered.
            SystemExit: code 75, after saving, when the agent asked for the end.
        """
        training, loader = self._training, self._loader
        if training is None or loader is None:
            raise ValueError("session.register(model=..., optimizer=..., data=...) comes first")
        self._checkpointer = Checkpointer(
            self.context,
            self._checkpoints,
            training,
            loader,
            self.device,
            hooks=SaveHooks(
                on_wait=self._heartbeat.beat,
                on_agree=partial(self._heartbeat.beat, phase=Phase.AGREE),
                on_copy=partial(self._heartbeat.beat, phase=Phase.SAVE),
            ),
        )
        loop = self._new_loop(training, loader, self._checkpointer, until)
        is_fresh = self.context.generation is not None
        if self._generations is not None:
            self._generations.is_alone = False
        loop.begin(is_fresh=is_fresh)
        self._saves = SaveClock(self._checkpoint_spec(training.model), loader, loop.stand.step)
        self._loop = loop
        while (step := loop.next_step()) is not None:
            yield step
        if self._log is not None:
            self._log.close()
        if self._event_files is not None:
            self._event_files.close()
        Session.newest_step = loop.stand.step

    def _new_loop(
        self, training: Training, loader: Loader, checkpointer: Checkpointer, until: int
    ) -> StepLoop:
        restart = self.job.restart
        mender = None
        if self._contact is not None and self._generations is not None:
            mender = RankRecovery(
                self.rank,
                contact=self._contact,
                generations=self._generations,
                training=training,
                loader=loader,
                checkpointer=checkpointer,
                device=self.device,
                heartbeat=self._heartbeat,
                save_limit_s=self.job.engine.grace_s,
                reached=self._faults.reached,
                snapshots=Snapshots() if restart.numeric_retry else None,
            )
        return StepLoop(
            self,
            until=until,
            rank=self.rank,
            seed=self.job.seed,
            training=training,
            loader=loader,
            checkpointer=checkpointer,
            device=self.device,
            heartbeat=self._heartbeat,
            limits=Limits(restart.abnormal_loss, restart.abnormal_grad_norm),
            snapshot_every_steps=restart.snapshot_every_steps,
            mender=mender,
            reached=self._faults.reached,
        )

    def _checkpoint_spec(self, model: nn.Module) -> CheckpointSpec:
        """The job's policy, with the recommended interval for the model's size if it has none."""
        return self.job.checkpoint.resolved(sum(p.numel() for p in model.parameters()))

    def wishes(self, number: int) -> StepRequests:
        """What this rank brings to the agreement of a step."""
        # Only the first rank's clock and policy count, or the ranks would disagree.
        due = self.rank == 0 and self._saves is not None and self._saves.is_due(number)
        pause = self._contact is not None and self._contact.pause_wanted
        return StepRequests(stop=self._stop_wanted, save=due or self._save_wanted, pause=pause)

    def loss_factor(self, number: int) -> float:
        """The factor of an injected fault for the loss of a step."""
        return self._faults.loss_factor(number)

    def is_stopping(self) -> bool:
        """Whether this process was asked to end."""
        return self._stop_wanted

    def save(self, step: int, *, data: dict[str, Any], is_last: bool) -> None:
        """Save a step, and wait for the store when it is the last one; collective.

        Args:
            step: completed steps.
            data: position of the data after them.
            is_last: nothing comes after it.
        """
        saves, checkpointer = self._saves, self._checkpointer
        assert saves is not None  # noqa: S101 set before the first step
        assert checkpointer is not None  # noqa: S101 likewise
        started_s = saves.now_s()
        # Kept until the save has them: one that a fault cuts short is done again.
        self._unsaved_records |= self._unsaved_steps.take()
        fresh = checkpointer.save(step, data=data, attachments=self._unsaved_records)
        self._unsaved_records = {}
        # Not when it was wished for: a fault may have had the vote taken again.
        self._save_wanted = False
        saves.saved(step, started_s=started_s)
        if is_last:
            checkpointer.settle(SETTLE_TIMEOUT_S)
        if checkpointer.is_behind:
            return  # the checkpoint server announces the commit, and applies the retention
        if self._log is not None:
            self._log.append(CheckpointCommitted(step=step))
        if fresh and self.rank == 0:
            apply_retention(self._checkpoints, self.job.checkpoint.retention(), protect={step})

    def record(self, step: int, vote: Vote, step_s: float) -> None:
        """Put a completed step on record, once; only the first rank does."""
        if self._links is not None:
            self._links.end_step()
        if self._log is None or self._unsaved_steps.last_step == step:
            return
        assert self._training is not None  # noqa: S101 checked by steps()
        assert self._loader is not None  # noqa: S101 checked by steps()
        scheduler = self._training.scheduler
        lr = scheduler.get_last_lr()[0] if scheduler is not None else self.job.optimizer.lr
        record = StepRecord(
            step=step,
            loss=vote.loss,
            grad_norm=vote.grad_norm,
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
        self._unsaved_steps.add(record)
        self._log.append(record)
        if self._event_files is not None:
            self._event_files.step(record)

    def _mfu(self, step_s: float) -> float | None:
        if not self._peak_flops or not self._flops_per_step:
            return None
        return self._flops_per_step / step_s / (self._peak_flops * self.world_size)

    def _on_save_signal(self, _number: int, _frame: object) -> None:
        """SIGUSR1 to any rank: save at the next step boundary."""
        self._save_wanted = True

    def _on_terminate(self, _number: int, _frame: object) -> None:
        """Inside the loop the step boundary answers; before it there is nothing to save."""
        if self._loop is None or self._loop.is_over:
            sys.exit(EXIT_RESTART_ME)
        self._stop_wanted = True


def _print_stacks_on_request(context: WorkerContext) -> IO[str]:
    """Have SIGUSR2 print the stacks of all threads, even while one of them holds the lock."""
    path = stacks_file(context.heartbeat_path.parent, context.local_rank)
    file = path.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


def _open_store() -> StoreClient:
    return StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _require_loader(data: object) -> None:
    needed = ("next_step", "position", "epoch", "state_dict", "load_state_dict", "close")
    missing = [name for name in needed if not hasattr(data, name)]
    if missing:
        raise InputError(
            "session.register(data=...)",
            f"{type(data).__name__} lacks {', '.join(missing)}; "
            "training.runtime.program.Loader says what they are",
        )


def join() -> Session:
    """Take this process's place in its run: device, process group, heartbeat, storage.

    Raises:
        InputError: the program was not started by a node agent.
    """
    start_logging()
    return Session(WorkerContext.from_environment())
