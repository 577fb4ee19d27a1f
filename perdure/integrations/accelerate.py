"""A loop of one's own over accelerate, under Perdure. Written against accelerate 1.15.

    from perdure.integrations.accelerate import training_steps

    for step in training_steps(accelerator, model=model, optimizer=optimizer, loader=loader):
        with step:
            for batch in step.micro_batches():
                step.backward(model(**batch).loss)
            step.apply()

The steps are those of the session, which may come again after a fault; in a process that `perdure
run` has not started they are plain calls of accelerate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from perdure.integrations.accelerate_data import PreparedData
from perdure.integrations.accelerate_settings import check_loader, check_loop, samples_per_batch
from perdure.integrations.framework_steps import measure
from perdure.training.errors import InputError
from perdure.training.runtime.errors import NotApplied
from perdure.training.runtime.program import MicroBatch, Stateful
from perdure.training.runtime.session import Session
from perdure.training.runtime.state.program_state import ProgramState

_log = logging.getLogger("perdure.accelerate")


class TrainingStep(Protocol):
    """One optimizer step, which the loop's body does.

    Attributes:
        number: of the step, from 1.
    """

    number: int

    def __enter__(self) -> Self:
        """Begin it."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """End it: all ranks have applied it, or under Perdure none has, and it comes again."""
        ...

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Its batches, on the device; gradients are reduced with the last one only."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward of one batch's mean loss, weighted so that the step is their mean."""
        ...

    def apply(self) -> None:
        """Clip, and let optimizers and schedulers run."""
        ...


def training_steps(
    accelerator: Any,
    *,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
    until: int | None = None,
    on_applied: Callable[[], None] = lambda: None,
) -> Iterator[TrainingStep]:
    """The steps of a training whose parts `accelerator.prepare()` has prepared.

    Each has `gradient_accumulation_steps` batches; the last one of an epoch has what is left.
    Objects of `accelerator.register_for_checkpointing()` are part of the state.

    Args:
        accelerator: of accelerate.
        model: prepared.
        optimizer: prepared; one, or several in a list.
        loader: prepared, of the training data; epoch follows on epoch.
        scheduler: prepared, of the learning rate; one, several in a list, or None.
        max_grad_norm: to which gradients are clipped; None: they are not.
        until: number of steps; None: the job's, as `perdure run` has it.
        on_applied: updates such objects, once for each step that is applied.

    Raises:
        InputError: a setting does not go together with Perdure; without it, no number of steps.
        SystemExit: code 75, after saving, when the run is to end.
    """
    optimizers, schedulers = _listed(optimizer), _listed(scheduler)
    session = Session.current
    data = PreparedData(
        loader,
        samples_per_batch=samples_per_batch(accelerator, loader),
        batches_per_step=accelerator.gradient_accumulation_steps,
    )
    if session is None:
        if until is None:
            raise InputError("training_steps(until=...)", "not started by perdure run: say how far")
        for number in range(1, until + 1):
            yield PlainStep(
                number,
                data.next_step(),
                accelerator,
                model,
                optimizers,
                schedulers,
                max_grad_norm,
                on_applied,
            )
        return
    limit = math.inf if max_grad_norm is None else max_grad_norm
    check_loop(session, accelerator, until)
    check_loader(loader)
    data.seed, data.alone = session.job.seed, session.alone
    session.register(
        model=model,
        optimizer=[prepared.optimizer for prepared in optimizers],
        data=data,
        scheduler=schedulers,
        scaler=accelerator.scaler,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), limit),
        state=dict(_savable(accelerator._custom_objects)),  # noqa: SLF001 no other way
        on_applied=on_applied,
    )
    yield from _session_steps(session)


def _savable(parts: Sequence[Stateful]) -> Iterator[tuple[str, Stateful]]:
    """Name the objects that a program registered with accelerate, as far as they can be saved."""
    for number, part in enumerate(parts):
        name = f"custom_checkpoint_{number}"
        try:
            ProgramState({name: part}).take()
        except InputError as error:
            _log.warning(f"{type(part).__name__} is not saved: {error}")
        else:
            yield name, part


def _session_steps(session: Session) -> Iterator[TrainingStep]:
    loop = session.open_loop(until=session.job.steps)
    loop.stays = True  # a script saves or evaluates behind its loop
    is_measured = False
    while (step := loop.next_step()) is not None:
        if not is_measured:
            measure(session, step.data)
            is_measured = True
        yield step
    session.close_loop(loop)


def evaluation() -> AbstractContextManager[None]:
    """Around an evaluation between two steps, which has a time limit of its own.

    Inside the loop and before `with step:`, on every rank alike.
    """
    session = Session.current
    return session.evaluation() if session is not None else nullcontext()


class PlainStep:
    """A step without Perdure: what a loop over accelerate does.

    Args:
        number: of the step, from 1.
        data: its batches.
        accelerator: of accelerate.
        model: prepared.
        optimizers: as prepared by accelerate.
        schedulers: as prepared by accelerate.
        max_grad_norm: to which gradients are clipped; None: they are not.
    """

    def __init__(
        self,
        number: int,
        data: Sequence[MicroBatch],
        accelerator: Any,
        model: nn.Module,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        max_grad_norm: float | None,
        on_applied: Callable[[], None],
    ) -> None:
        self.number = number
        self._data = data
        self._accelerator = accelerator
        self._model = model
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._max_grad_norm = max_grad_norm
        self._on_applied = on_applied
        self._is_applied = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and not self._is_applied:
            raise NotApplied(f"step {self.number}: the body ended without step.apply()")

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Its batches; gradients are reduced with the last one only."""
        for index, batch in enumerate(self._data):
            is_last = index == len(self._data) - 1
            with nullcontext() if is_last else self._accelerator.no_sync(self._model):
                yield batch

    def backward(self, loss: Tensor) -> None:
        """Backward of one batch's mean loss, weighted so that the step is their mean."""
        # Accelerate divides by the number of a full step, at the end of an epoch, too.
        full = self._accelerator.gradient_accumulation_steps
        is_full = len(self._data) == full
        self._accelerator.backward(loss if is_full else loss * (full / len(self._data)))

    def apply(self) -> None:
        """Clip, and let optimizers and schedulers run."""
        if self._max_grad_norm is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        for stepper in (*self._optimizers, *self._schedulers):
            stepper.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._on_applied()
        self._is_applied = True


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
