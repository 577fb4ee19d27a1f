"""The steps of a session, as the loop of another framework asks for them.

Steps are completed optimizer steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor

from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.liveness.heartbeat import Phase
from perdure.training.runtime.errors import WorkerError
from perdure.training.runtime.session import Session
from perdure.training.runtime.step_loop.loop import StepLoop
from perdure.training.runtime.step_loop.step import Step

_log = logging.getLogger("perdure.runtime")


class FrameworkSteps:
    """Begins steps, and does what belongs to one as often as faults have it done again.

    Args:
        session: of this process.
        completed: steps that the framework has completed; its loop cannot be led back.
    """

    def __init__(self, session: Session, *, completed: Callable[[], int]) -> None:
        self.session = session
        self._completed = completed
        self._loop: StepLoop | None = None
        self._step: Step | None = None
        self._is_measured = False

    @property
    def loop(self) -> StepLoop:
        """The session's, once it is open."""
        assert self._loop is not None  # noqa: S101 no step comes before
        return self._loop

    @property
    def is_open(self) -> bool:
        """Whether the session has a loop."""
        return self._loop is not None

    @property
    def step(self) -> Step:
        """The one under way."""
        assert self._step is not None  # noqa: S101 the framework takes its batches first
        return self._step

    @property
    def has_begun(self) -> bool:
        """Whether there was a step in this process."""
        return self._step is not None

    def open(self, *, until: int) -> StepLoop:
        """Restore, or take the place of another process. Collective.

        The program goes on behind the last step.
        """
        self._loop = self.session.open_loop(until=until)
        self._loop.stays = True
        return self._loop

    def begin(self) -> Step:
        """The next step; saves, pauses and ends come before it.

        Raises:
            SystemExit: code 75: it is not the one that the framework is about to do.
        """
        step = self.loop.next_step()
        if step is None or step.number != self._completed() + 1:
            self._go_back()
        self._step = step
        return step

    def _go_back(self) -> NoReturn:
        _log.info(
            f"the program's loop has completed step {self._completed()} and cannot go back to step "
            f"{self.loop.state.step}: all ranks start again from the newest checkpoint"
        )
        raise SystemExit(EXIT_RESTART_ME)

    def run(self, work: Callable[[], None]) -> bool:
        """Do a part of the step under way until it succeeds.

        Returns whether a recovery has brought this rank behind the step instead.
        """
        while True:
            try:
                work()
            except (RuntimeError, WorkerError) as error:
                if not self.loop.is_recoverable(error):
                    raise
                # Its frames hold tensors and groups of the broken step.
                error.__traceback__ = None
                if self._recover(error):
                    return True
            else:
                return False

    def _recover(self, error: BaseException) -> bool:
        """Whether the step is in the weights; otherwise it is to be done again."""
        number = self.step.number
        self.loop.recover(error)
        if self.loop.state.step != number:
            self.begin()
            return False
        self.step.vote = self.loop.state.vote
        return True

    def finish(self, *, at: int) -> None:
        """Save the last step and wait for the store, where the framework ends after step `at`.

        Raises:
            SystemExit: code 75: a recovery has led back to a step before.
        """
        loop = self.loop
        loop.end_at(at)
        if loop.next_step() is not None:
            self._go_back()
        self.session.close_loop(loop)

    def during(self, phase: Phase, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call what has the time limit of a phase, between two steps."""
        if self._loop is None or not self._loop.requests.in_loop:
            return work(*args, **named)
        with self.session.during(phase):
            return work(*args, **named)

    def measure(self, batches: Iterable[Any]) -> None:
        """Tell the session, once, how many tokens a step has.

        Args:
            batches: of this rank in one step.
        """
        if self._is_measured:
            return
        self._is_measured = True
        measure(self.session, batches)


def measure(session: Session, batches: Iterable[Any]) -> None:
    """Tell a session how many tokens the steps have of which this rank has these batches."""
    tokens = sum(count_tokens(batch) for batch in batches)
    session.measure(tokens_per_step=tokens * session.world_size)


def count_tokens(batch: Any) -> int:
    """The elements of `input_ids`, or of the first tensor, if it is one of whole numbers, 2-D."""
    if hasattr(batch, "get"):
        input_ids = batch.get("input_ids")
        return input_ids.numel() if isinstance(input_ids, Tensor) else 0
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    is_text = isinstance(first, Tensor) and not first.is_floating_point() and first.dim() == 2
    return first.numel() if is_text else 0
