"""The loop of megatron.training, its steps being those of a session.

Functions that it calls by name are replaced by methods here, which call them. A step runs as a
whole, from the first micro-batch to the optimizer and its schedule; a fault in it is recovered
from, and it runs again. What Megatron does between two steps, each rank does alone: a process that
joins later has never been there. Evaluations and Megatron's own saves are done together, and one
that a fault cuts short is left out. Written against Megatron-LM core_v0.16.1
and core_v0.12.1.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.utils.data import DataLoader

from perdure.integrations.framework_steps import FrameworkSteps
from perdure.integrations.megatron_data import Evaluations, MovableLoader, StepData
from perdure.integrations.megatron_parts import MegatronParts
from perdure.integrations.megatron_settings import (
    check_arguments,
    check_training,
    layout_of,
    num_results,
)
from perdure.integrations.megatron_state import Schedule
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.errors import InputError
from perdure.training.liveness.heartbeat import Phase
from perdure.training.runtime.errors import WorkerError
from perdure.training.runtime.session import Session
from perdure.training.runtime.state.random_numbers import seed_of
from perdure.training.runtime.step_loop.step import Step

_log = logging.getLogger("perdure.megatron")

# Function of the training module, and the method that replaces it.
REPLACED: Mapping[str, str] = {
    "build_train_valid_test_data_loaders": "build_loaders",
    "train": "train",
    "train_step": "train_step",
    "evaluate_and_print_results": "evaluate",
    "save_checkpoint_and_time": "save",
    "checkpoint_and_decide_exit": "decide_exit",
    "disable_forward_pre_hook": "disable_hooks",
    "force_param_sync": "gather",
}


class MegatronLoop:
    """Drives `pretrain` through its session.

    Args:
        session: of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._globals = import_module("megatron.training.global_vars")
        self._completed = 0
        self._steps = FrameworkSteps(session, completed=lambda: self._completed)
        self._loaders: list[MovableLoader] = []
        self._valid_loaders: list[MovableLoader] = []
        self._losses: tuple[int, dict[str, Tensor]] = (0, {})

    def attach(self, module: ModuleType) -> None:
        """Replace the functions of a training module."""
        for name, method in REPLACED.items():
            if (original := getattr(module, name, None)) is not None:
                replacement = partial(getattr(self, method), original)
                setattr(module, name, replacement)

    @property
    def _args(self) -> Any:
        return self._globals.get_args()

    def lay_out(self) -> None:
        """Check the arguments, and lay out the ranks by them, before groups are made."""
        if self._args.exit_signal_handler:  # the session itself saves and ends at SIGTERM
            self._globals.get_signal_handler().release()
            self._args.exit_signal_handler = False
        check_arguments(self._session.job, self._args)
        self._session.lay_out(layout_of(self._args, self._session.world_size))
        joins = self._session.is_alone
        self._evaluations = Evaluations(self._args, self._valid_loaders, joins=joins)

    def build_loaders(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Build the loaders, such that they can be moved."""
        build = original.__globals__["build_pretraining_data_loader"]

        def movable(loader: Any, loaders: list[MovableLoader]) -> Any:
            if isinstance(loader, list) and len(loader) == 1:  # of several validation sets
                return [movable(loader[0], loaders)]
            if not isinstance(loader, DataLoader):
                return loader
            loaders.append(MovableLoader(loader, partial(build, loader.dataset)))
            return loaders[-1]

        train, valid, *further = original(*args, **named)
        if self._session.is_alone:  # the first rank has told the others so when they started
            self._args.do_train = True
        return movable(train, self._loaders), movable(valid, self._valid_loaders), *further

    def train(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Restore, or take another process's place, and train from there."""
        arguments = inspect.signature(original).bind(*args, **named).arguments
        self._open(arguments)
        try:
            with self._session.alone():
                result = original(*args, **named)
        except SystemExit as end:
            if end.code in (None, EXIT_DONE):  # an exit that the program was asked for
                self._finish()
            raise
        self._finish()
        return result

    def _open(self, arguments: Mapping[str, Any]) -> None:
        session, args, optimizer = self._session, self._args, arguments["optimizer"]
        kinds = [type(part).__name__ for part in optimizer.chained_optimizers]
        check_training(session.job, args, kinds)
        args.check_for_nan_in_loss_and_grad = False  # the vote of a step finds it
        parts = self._parts = MegatronParts(
            arguments["model"], optimizer, args, alone=session.alone
        )
        self._data = StepData(
            arguments["train_data_iterator"],
            self._loaders,
            position=args.consumed_train_samples,
            num_micro_batches=_num_micro_batches,
            samples_per_micro_batch=args.micro_batch_size * args.data_parallel_size,
        )
        # Without momentum it has no state: Megatron's is in `state`.
        rates = torch.optim.SGD(parts.model.parameters(), lr=0.0)
        session.register(
            model=parts.model,
            optimizer=rates,
            data=self._data,
            scheduler=Schedule(
                arguments["opt_param_scheduler"],
                rates,
                increment=lambda: (
                    get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
                ),
                is_skipped=lambda: parts.is_skipped,
            ),
            clip=parts.clip,
            optimize=parts.apply,
            state={"megatron": parts.state, "evaluations": self._evaluations},
            reset=parts.reset,
            compare=parts.compared,
        )
        session.measure(tokens_per_step=args.global_batch_size * args.seq_length)
        step = self._steps.open(until=args.train_iters).state.step
        if step == 0 and args.iteration:
            text = f"a checkpoint of iteration {args.iteration}: Perdure's steps begin with 1, "
            raise InputError("--load", f"{text}give --finetune to begin with its weights")
        self._completed = args.iteration = step
        args.consumed_train_samples = self._data.position
        update_num_microbatches(self._data.position, consistency_check=False)

    def _finish(self) -> None:
        self._parts.gather()  # by an exit that the vote of the last step did not know of
        self._steps.finish(at=self._completed)

    def train_step(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A step of the session, in place of Megatron's."""
        arguments = inspect.signature(original).bind(*args, **named).arguments
        with self._session.together():
            self._steps.begin()
            self._steps.run(partial(self._run_step, arguments))
        self._completed += 1
        return self._result()

    def _run_step(self, arguments: Mapping[str, Any]) -> None:
        step, parts, args = self._steps.step, self._parts, self._args
        stage = mpu.get_pipeline_model_parallel_rank()
        parts.begin(seed_of(args.seed, rank=stage, step=step.number) % 2**31)
        forward_backward = arguments.get("forward_backward_func") or get_forward_backward_func()
        with _timers_restored(self._globals.get_timers()):
            losses = forward_backward(
                forward_step_func=_drilled(arguments["forward_step_func"], step),
                data_iterator=self._data.iterators_of(step.micro_batches()),
                model=arguments["model"],
                num_microbatches=len(step.data),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=False,
            )
            self._losses = (step.number, _reduced(losses) if _has_losses() else {})
            for loss in [*self._losses[1].values()][:1]:
                step.report_loss(step.drilled(loss))
            step.apply()
        is_last = step.number >= self._session.job.steps
        vote = step.vote
        is_saved = is_last or (vote is not None and (vote.save or vote.stop))
        parts.gather_behind(is_needed=is_saved)

    def _result(self) -> tuple[Any, ...]:
        vote, parts = self._steps.step.vote, self._parts
        assert vote is not None  # noqa: S101 the step has come to its end
        number, losses = self._losses
        if number != self._completed and losses:  # the state is another rank's
            losses = {next(iter(losses)): torch.tensor([vote.loss])}
        skipped = int(parts.is_skipped)
        norm = None if skipped else vote.grad_norm
        result = (losses, skipped, False, False, 0, norm, parts.num_zeros, 0)
        return result[: num_results(megatron.core.__version__)]

    def evaluate(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """An evaluation, which has the time limit of one."""

        def work() -> Any:
            with self._evaluations.moved_on():
                return original(*args, **named)

        return self._between_steps(Phase.EVALUATE, "evaluation", work)

    def save(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A save in Megatron's own format."""
        work = partial(original, *args, **named)
        return self._between_steps(Phase.SAVE, "save of Megatron's own", work)

    def decide_exit(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Megatron's saves, and an end by its clock, which all ranks agree on."""
        work = partial(original, *args, **named)
        if not self._args.exit_duration_in_mins:
            return work()
        return self._between_steps(Phase.SAVE, "look at the clock", work, gathers=False)

    def _between_steps(
        self, phase: Phase, name: str, work: Callable[[], Any], *, gathers: bool = True
    ) -> Any:
        session = self._session
        if not self._steps.has_begun or not self._steps.loop.requests.in_loop:
            return work()
        step, loop = self._steps.step, self._steps.loop
        if step.error is not None:
            return None
        try:
            timers = _timers_restored(self._globals.get_timers())
            with session.together(), session.during(phase), timers:
                if gathers:
                    self._parts.gather()
                return work()
        except (RuntimeError, WorkerError) as error:
            if not loop.is_recoverable(error):
                raise
            # The next step begins with it. A process that joins is behind this place, and cannot
            # take part: whatever was cut short is left out.
            error.__traceback__ = None
            step.error = error
            _log.warning(f"the {name} at step {step.number} is left out: {error}")
            return None

    def disable_hooks(
        self, original: Callable[..., Any], chunks: Any, *, param_sync: bool = True
    ) -> None:
        """Remove the hooks that gather weights; they are gathered where all ranks are."""
        del param_sync
        original(chunks, param_sync=False)

    def gather(self, _original: Callable[..., Any], _chunks: Any) -> None:
        """Gather the weights, unless they are here."""
        self._parts.gather()


def _num_micro_batches(consumed_samples: int) -> int:
    update_num_microbatches(consumed_samples, consistency_check=False)
    return int(get_num_microbatches())


def _drilled(forward_step: Callable[..., Any], step: Step) -> Callable[..., Any]:
    """Have the losses of a step as a drill has them."""

    def drilled(*args: Any, **named: Any) -> Any:
        output, loss_of = forward_step(*args, **named)

        def drilled_loss_of(*outputs: Any, **further: Any) -> Any:
            loss, *values = loss_of(*outputs, **further)
            return step.drilled(loss), *values

        return output, drilled_loss_of

    return drilled


def _has_losses() -> bool:
    return bool(mpu.is_pipeline_last_stage(ignore_virtual=True))


def _reduced(losses: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Average what the micro-batches have reported, as Megatron's train_step does. Collective."""
    reduced: dict[str, Tensor] = {}
    for key in losses[0]:
        reported = [micro_batch[key] for micro_batch in losses]
        if isinstance(reported[0], tuple | list):  # core 0.12: the program itself has reduced them
            sums = [sum(column) for column in zip(*reported, strict=True)]
            reduced[key] = sums[0] / sums[1]
            continue
        values = [value.view(-1) for value in reported]
        if values[0].numel() == 2:  # the sum over tokens, and their number
            total = torch.vstack(values).sum(dim=0)
            dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
            reduced[key] = total[0] / total[1]
        else:
            reduced[key] = torch.cat(values).mean()
    return reduced


@contextmanager
def _timers_restored(timers: Any) -> Iterator[None]:
    """Have timers run, or not, as they did before, when the work is cut short."""
    by_name = timers._timers  # noqa: SLF001 there is no public way
    running = {name for name, timer in by_name.items() if timer._started}  # noqa: SLF001
    try:
        yield
    except BaseException:
        for name, timer in by_name.items():
            if timer._started and name not in running:  # noqa: SLF001
                timer.stop()
            elif name in running and not timer._started:  # noqa: SLF001
                timer.start()
        raise
