"""The worker's side of a run: join, register, loop over steps.

    session = perdure.join()
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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DataParallel

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.saving import SaveHooks
from perdure.training.device import backend_of, pick_device
from perdure.training.errors import InputError
from perdure.training.injection.inside import WorkerInjector
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.log import start_logging
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.runtime.agent_requests import AgentRequests
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.errors import WorkerError
from perdure.training.runtime.layout_checks import (
    check_layout,
    compare_layouts,
    fitting_layout,
)
from perdure.training.runtime.process_group.attempt_groups import RankMembership, meet
from perdure.training.runtime.program import Loader, Scheduler, Stateful, Training
from perdure.training.runtime.rank_process import print_stacks_on_request, store_patience
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.live import Snapshots, damage
from perdure.training.runtime.state.program_state import ProgramState
from perdure.training.runtime.state.random_numbers import UninitializedParameters, seeded_after
from perdure.training.runtime.step_loop.loop import StepLoop
from perdure.training.runtime.step_loop.loop_body import notice_of
from perdure.training.runtime.step_loop.rank_recovery import RankRecovery
from perdure.training.runtime.step_loop.skipping import SkippedData
from perdure.training.runtime.step_loop.step import Limits, Step
from perdure.training.runtime.step_loop.step_records import StepRecords
from perdure.training.runtime.step_loop.wrappers import settle_buckets

ONE_PROCESS = (
    "the model is a DataParallel: one process drives all devices, and the fault of one ends it; "
    "DistributedDataParallel, with a rank for each device, is faster and loses no step"
)
MEETING = "session.evaluation(), which all ranks must enter"  # of 48 characters at most


class Session:
    """This process's part in the run. Made by `perdure.join()`.

    Attributes:
        ended_at: last step of a loop that came to its end in this process, 0 before.
        current: this process's session, None before `perdure.join()`.
    """

    ended_at: ClassVar[int] = 0
    current: ClassVar[Session | None] = None
    _loop: ClassVar[StepLoop | None] = None

    def __init__(self, context: WorkerContext, *, layout: ParallelLayout | None = None) -> None:
        self.context = context = replace(context, own_layout=fitting_layout(layout, context))
        self.job = context.job
        self._heartbeat = HeartbeatWriter(context.heartbeat_path)
        self.device = pick_device(context.local_rank)
        self._requests = AgentRequests()
        self._requests.install()
        self._stacks = print_stacks_on_request(context)
        self._store = open_store(self.job.storage, retry=store_patience(context, self._heartbeat))
        self._training: Training | None = None
        self._records = StepRecords(context)
        self._groups = self._join_groups()
        compare_layouts(context, self.device)
        self._faults = WorkerInjector(
            self.job.drill.faults,
            rank=self.rank,
            store=self._store,
            run_id=self.job.run_id,
            damage_state=self._damage_state,
            break_connections=self._break_connections,
        )
        if self._groups is not None and self._groups.connections is not None:
            self._groups.connections.on_begin = self._faults.on_collective

    def _join_groups(self) -> RankMembership | None:
        """Take part in the process groups of the attempt; None: without a coordinator."""
        context = self.context
        if context.coordinator is not None:
            return RankMembership(context, context.coordinator, self.device, self._heartbeat)
        dist.init_process_group(
            backend_of(self.device),
            rank=context.rank,
            world_size=context.world_size,
            timeout=dt.timedelta(seconds=self.job.comm.timeout_s),
        )
        return None

    def _damage_state(self) -> None:
        assert self._training is not None  # noqa: S101 steps come after register()
        damage(self._training)

    def _break_connections(self) -> None:
        if self._groups is not None:
            self._groups.generations.break_connections()

    @classmethod
    def completed_step(cls) -> int:
        """Steps that this process's newest loop has completed, however it was left; 0 before."""
        return cls._loop.completed_step if cls._loop is not None else 0

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    @property
    def layout(self) -> ParallelLayout:
        """How the ranks are laid out."""
        return self.context.layout

    def lay_out(self, layout: ParallelLayout) -> None:
        """Give the layout of a program that reads it behind `join`; before `register`. Collective.

        Raises:
            InputError: it does not fit, or is not that of every rank.
        """
        context = self.context = replace(
            self.context, own_layout=fitting_layout(layout, self.context)
        )
        if self._groups is not None:
            self._groups.client.layout = layout
        compare_layouts(context, self.device)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Construct the model inside this, optionally: a replaced process is back sooner.

        Its parameters are sent by another rank, so they are not drawn at random first. Random
        numbers after it are the same in every process; those within it need not be, but for
        parameters and buffers, which are sent. It is not for a model that computes anything else
        from its parameters, or draws anything else, when it is constructed.
        """
        is_sent = self.context.generation is not None
        with seeded_after(), UninitializedParameters() if is_sent else nullcontext():
            yield

    def register(  # noqa: PLR0913 by keyword: each is a part of the training
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data: Loader,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip: Callable[[], Tensor | float] | None = None,
        optimize: Callable[[], None] | None = None,
        state: Mapping[str, Stateful] | None = None,
        on_applied: Callable[[], None] = lambda: None,
        reset: Callable[[], None] = lambda: None,
        compare: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Register the parts of the training, which checkpoints hold. Collective.

        Args:
            model: as it is called, with its wrapper.
            optimizer: an optimizer, or a list (Muon and AdamW), each with parameters of its own.
            data: yields the micro-batches: tensors, or tuples or mappings of them.
            scheduler: sets the learning rate, or a list; None: the program sets rates itself.
            scaler: scales the loss, for fp16.
            clip: clips the gradients and returns the norm that those of all ranks had before;
                None: torch does it. It comes after the unscaling.
            optimize: lets optimizer and scaler run, once all ranks hold the gradients of a step;
                None: their `step` and `update`; for recoveries, too.
            state: what the program keeps beside, by name: averages of weights, best values,
                counters; alike on ranks that are replicas. It is saved and sent with the model.
            on_applied: updates such state, once for each step that is applied, and no other;
                without collectives, and for recoveries, too.
            reset: forgets what an interrupted step has left, so that it can begin again.
            compare: returns further tensors that replicas have alike when gradients are reduced:
                gradients that are not in `.grad`, the optimizer's copies of weights.

        Raises:
            InputError: the loader lacks a method, the model has another layout than the job, a
                parameter is in two optimizers, or a part of the state cannot be saved.
        """
        _check_loader(data)
        ProgramState(state or {}).take()
        check_layout(model, self.context, clips_itself=clip is not None)
        self._training = Training(
            model,
            _optimizers(optimizer),
            tuple(scheduler) if isinstance(scheduler, Sequence) else _as_tuple(scheduler),
            scaler,
            data,
            self.job.optimizer.grad_clip_norm,
            clip,
            optimize,
            state=state or {},
            on_applied=on_applied,
            reset=reset,
            compare=compare,
        )
        settle_buckets(model)
        if isinstance(model, DataParallel):
            self._records.notice(ONE_PROCESS)

    def measure(
        self, *, tokens_per_step: int, flops_per_step: float = 0.0, peak_flops: float | None = None
    ) -> None:
        """Set how much a step computes, for tokens/s and MFU.

        Args:
            tokens_per_step: sum over all ranks.
            flops_per_step: model FLOPs of all ranks together.
            peak_flops: peak FLOP/s of one device.
        """
        self._records.measure(
            tokens_per_step=tokens_per_step, flops_per_step=flops_per_step, peak_flops=peak_flops
        )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Give an evaluation between two steps its own time limit; collective.

        Inside the loop and outside of `with step:`, on every rank alike, also where only some of
        them evaluate: at its end each rank waits for the others.
        """
        with self.during(Phase.EVALUATE):
            yield
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        step = self._loop.state.in_flight if self._loop is not None else None
        if step is not None and step.error is not None:
            return  # the others wait for this rank to report it, which the next step does
        if self._groups is None:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 there is no public way
            meet(PrefixStore("meetings", store), self.world_size)
            return
        try:
            self._groups.wait_for_all(self.world_size, place=MEETING)
        except (RuntimeError, WorkerError) as error:
            # The next step runs into the same fault, and all ranks recover from there.
            if self._loop is None or not self._loop.is_recoverable(error):
                raise

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Apply the time limit of a phase, between two steps."""
        self._heartbeat.beat(phase=phase)
        try:
            yield
        finally:
            self._heartbeat.beat(phase=Phase.STEP)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run collectives that need no other rank: all ranks would bring the same values."""
        with self._groups.generations.alone() if self._groups is not None else nullcontext():
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run collectives with all ranks, within `alone`."""
        if self._groups is None:
            yield
            return
        with self._groups.generations.alone(is_alone=False):
            yield

    @property
    def is_alone(self) -> bool:
        """Whether collectives return at once, with what this rank has brought."""
        return self._groups is not None and self._groups.generations.is_alone

    def steps(self, *, until: int) -> Iterator[Step]:
        """Iterate over the steps from the newest checkpoint up to `until`.

        A fault that the process outlives leaves `with step:` quietly, and the same step comes
        again once all ranks have recovered: what a program does with a step belongs inside the
        block.

        Raises:
            ValueError: nothing was registered.
            SystemExit: code 75, after saving, when the agent asked for the end.
        """
        loop = self.open_loop(until=until)
        if self._groups is not None and (notice := notice_of(sys._getframe(1))):  # noqa: SLF001
            self._records.notice(notice)
        while (step := loop.next_step()) is not None:
            yield step
        self.close_loop(loop)

    def open_loop(self, *, until: int) -> StepLoop:
        """Return the loop of `steps`, for a program that drives it. Restores, which is collective.

        Raises:
            ValueError: nothing was registered.
        """
        if self._training is None:
            raise ValueError("session.register(model=..., optimizer=..., data=...) comes first")
        loop = Session._loop = self._new_loop(self._training, until)
        if self._groups is not None:
            self._groups.generations.is_alone = False
        loop.begin()
        return loop

    def close_loop(self, loop: StepLoop) -> None:
        """Take note that a loop came to its end: `next_step` has returned None."""
        self._records.close()
        Session.ended_at = loop.state.step

    @classmethod
    def leave(cls) -> None:
        """End a program that went on behind its last step. Collective."""
        if cls._loop is not None and cls._loop.stays:
            cls._loop.leave()

    def _new_checkpointer(self, training: Training) -> Checkpointer:
        context, beat = self.context, self._heartbeat.beat
        first_container = context.schedule_cnt if context.rank == 0 else None
        return Checkpointer(
            context,
            CheckpointStore(self._store, self.job.run_id, first_container=first_container),
            training,
            self.device,
            hooks=SaveHooks(
                on_wait=beat,
                on_agree=partial(beat, phase=Phase.AGREE),
                on_copy=partial(beat, phase=Phase.SAVE),
            ),
        )

    def _new_loop(self, training: Training, until: int) -> StepLoop:
        context, heartbeat = self.context, self._heartbeat
        checkpointer = self._new_checkpointer(training)
        recovery = None
        if self._groups is not None:
            recovery = RankRecovery(
                self._groups,
                context,
                training,
                checkpointer,
                self.device,
                heartbeat,
                self._faults,
                self._records,
                snapshots=Snapshots() if self.job.restart.numeric_retry else None,
            )
        return StepLoop(
            until,
            context=context,
            training=training,
            checkpointer=checkpointer,
            device=self.device,
            heartbeat=heartbeat,
            faults=self._faults,
            records=self._records,
            requests=self._requests,
            recovery=recovery,
            skipping=self._skipping(),
        )

    def _skipping(self) -> SkippedData | None:
        spec = self.job.restart
        if not spec.data_skipping:
            return None
        limits = Limits(spec.abnormal_loss, spec.abnormal_grad_norm)
        return SkippedData(
            self._store, self.job.run_id, limits=limits, max_in_a_row=spec.max_skipped_in_a_row
        )


def _as_tuple(scheduler: Scheduler | None) -> tuple[Scheduler, ...]:
    return () if scheduler is None else (scheduler,)


def _check_loader(data: Loader) -> None:
    needed = ("next_step", "position", "epoch", "state_dict", "load_state_dict", "close")
    if missing := [name for name in needed if not hasattr(data, name)]:
        raise InputError(
            "session.register(data=...)",
            f"{type(data).__name__} lacks {', '.join(missing)}; "
            "perdure.training.runtime.program.Loader describes them",
        )


def _optimizers(
    optimizer_or_list: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    """Check the optimizers of a training, and return all of them.

    Raises:
        InputError: there is none, something else, or two have a parameter in common.
    """
    field = "session.register(optimizer=...)"
    optimizers = (
        (optimizer_or_list,)
        if isinstance(optimizer_or_list, torch.optim.Optimizer)
        else tuple(optimizer_or_list)
    )
    odd = [
        type(optimizer).__name__
        for optimizer in optimizers
        if not isinstance(optimizer, torch.optim.Optimizer)
    ]
    if odd or not optimizers:
        raise InputError(field, f"{odd[0] if odd else 'nothing'} is no torch.optim.Optimizer")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [id(parameter) for group in groups for parameter in group["params"]]
    if len(set(parameters)) < len(parameters):
        raise InputError(field, "a parameter is in two of the optimizers, leave it out of one")
    return optimizers


def join(*, layout: ParallelLayout | None = None) -> Session:
    """Take this process's place in its run: device, process group, heartbeat, storage.

    Args:
        layout: ranks of a program with groups of its own (tensor, pipeline, context or expert
            parallelism), the same on every rank; None: as the job has it.

    Raises:
        InputError: the program was not started by a node agent, or the layout does not fit.
    """
    start_logging()
    Session.current = Session(WorkerContext.from_environment(), layout=layout)
    return Session.current
