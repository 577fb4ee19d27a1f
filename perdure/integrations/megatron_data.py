"""Micro-batches of Megatron's data iterators, by step, and a loader that can be moved.

The position is Megatron's `consumed_train_samples`: global samples, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from perdure.training.errors import InputError
from perdure.training.runtime.program import MicroBatch


class MovableLoader:
    """A data loader of Megatron whose iterators can be sent to another position.

    Args:
        loader: as the program has built it.
        rebuild: builds a loader of the same data that begins at a number of consumed samples.
    """

    def __init__(self, loader: Any, rebuild: Callable[[int], Any]) -> None:
        self._loader = loader
        self._rebuild = rebuild
        self._num_moves = 0

    def __len__(self) -> int:
        return len(self._loader)

    def move_to(self, consumed_samples: int) -> None:
        """Have the next batch be the one at a position."""
        self._loader = self._rebuild(consumed_samples)
        self._num_moves += 1

    def __iter__(self) -> Iterator[Any]:
        while True:
            num_moves = self._num_moves
            for batch in self._loader:
                yield batch
                if self._num_moves != num_moves:
                    break
            else:
                return


class StepData:
    """The micro-batches of each step, as a session draws them.

    Args:
        iterators: one, one for each model chunk, or None on ranks that read no data.
        loaders: those behind the iterators that can be moved; the others are read up to a place.
        position: samples that were consumed before.
        num_micro_batches: returns the number of micro-batches in the step at a position.
        samples_per_micro_batch: of all data-parallel ranks together.

    Attributes:
        position: global samples handed out.
        epoch: always 0; Megatron counts samples.
    """

    epoch = 0

    def __init__(
        self,
        iterators: Any,
        loaders: Sequence[MovableLoader],
        *,
        position: int,
        num_micro_batches: Callable[[int], int],
        samples_per_micro_batch: int,
    ) -> None:
        self.position = position
        self._iterators = iterators
        self._loaders = loaders
        self._num_micro_batches = num_micro_batches
        self._samples_per_micro_batch = samples_per_micro_batch

    @property
    def _is_movable(self) -> bool:
        """Whether each iterator has a loader that can be moved, or there is none."""
        parts = self._iterators if isinstance(self._iterators, list) else [self._iterators]
        return len(self._loaders) == sum(part is not None for part in parts)

    def next_step(self) -> Sequence[MicroBatch]:
        """Draw the micro-batches of a step; None for each on ranks that read no data."""
        count = self._num_micro_batches(self.position)
        self.position += count * self._samples_per_micro_batch
        return [self._draw() for _ in range(count)]

    def _draw(self) -> MicroBatch:
        if isinstance(self._iterators, list):
            return tuple(next(part) if part is not None else None for part in self._iterators)
        return next(self._iterators) if self._iterators is not None else None

    def iterators_of(self, batches: Iterator[MicroBatch]) -> Any:
        """Return what a pipeline schedule takes for the micro-batches of a step."""
        if isinstance(self._iterators, list):
            drawn = list(batches)
            return [
                None if part is None else iter([batch[number] for batch in drawn])
                for number, part in enumerate(self._iterators)
            ]
        if self._iterators is not None:
            return batches
        next(batches)  # a drill has its first point here
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"consumed_train_samples": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; where no loader can be moved, by reading up to it.

        Raises:
            InputError: the position was passed already, and the data cannot be read again.
        """
        target = int(state["consumed_train_samples"])
        if target == self.position:
            return
        if self._is_movable:
            for loader in self._loaders:
                loader.move_to(target)
            self.position = target
        if target < self.position:
            text = f"sample {target} was read already, and an external loader cannot go back"
            raise InputError("--dataloader-type", text)
        while self.position < target:
            self.next_step()

    def close(self) -> None:
        """Nothing: Megatron's loaders end with the process."""


class Evaluations:
    """Whether a program evaluates, and its place in the validation data: state of a session.

    Megatron tells the ranks when they start whether they evaluate: a process that joins later was
    not there.

    Args:
        args: of the program, which has both.
        loaders: of validation data.
        joins: the process takes another's place.
    """

    def __init__(self, args: Any, loaders: Sequence[MovableLoader], *, joins: bool) -> None:
        self._args = args
        self._loaders = loaders
        self._names = ("do_valid", "do_test") if joins else ()

    def state_dict(self) -> dict[str, Any]:
        """Return what other ranks have alike."""
        flags = {name: bool(getattr(self._args, name)) for name in ("do_valid", "do_test")}
        return {**flags, "consumed_valid_samples": int(self._args.consumed_valid_samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`; a run that starts again has its arguments' own flags."""
        for name in self._names:
            setattr(self._args, name, state[name])
        self._move_to(state["consumed_valid_samples"])

    @contextmanager
    def moved_on(self) -> Iterator[None]:
        """Be behind an evaluation's samples where it is cut short, as the others are."""
        args = self._args
        start = args.consumed_valid_samples
        try:
            yield
        except BaseException:
            if isinstance(args.eval_iters, int):  # else each evaluation reads all data
                self._move_to(start + args.eval_iters * args.global_batch_size)
            raise

    def _move_to(self, consumed_samples: int) -> None:
        if consumed_samples != self._args.consumed_valid_samples:
            self._args.consumed_valid_samples = consumed_samples
            for loader in self._loaders:
                loader.move_to(consumed_samples)
