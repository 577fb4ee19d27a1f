"""Where a Trainer is in its data: the loader that its session has.

Counts are batches of one rank in the epoch; positions are samples of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from perdure.integrations.accelerate_data import whole_batches
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.runtime.program import MicroBatch


class EpochEnded(Exception):  # noqa: N818 a state of affairs, named as it is shown
    """The dataset gave no batch."""


@dataclass(slots=True)
class TrainerData:
    """Hands out the batches that the Trainer's own iterator draws, and counts them.

    Attributes:
        setting: of the Trainer that has the size of a batch, by name.
        samples_per_batch: of all ranks together, in one forward pass of each.
        batches_in_epoch: of each rank.
        alone: around drawing. Accelerate has all ranks take the state of the first one's
            generator, which is the same in all; a rank whose process is new draws by itself.
        read_extra_state: what else of the Trainer a checkpoint has.
        only_whole: the batches at the end of an epoch that are too few for a step are left out.
        epoch: of the next batch, from 0.
        batches: of that epoch, handed out.
        restored: what `read_extra_state` was where the state came from.
    """

    setting: str
    samples_per_batch: int
    batches_in_epoch: int
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    read_extra_state: Callable[[], dict[str, Any]] = dict
    only_whole: bool = False
    epoch: int = 0
    batches: int = 0
    restored: dict[str, Any] = field(default_factory=dict)
    _iterator: Iterator[MicroBatch] | None = None
    _count: int = 0
    _drawn_at: tuple[int, int] = (0, 0)
    _drawn: Sequence[MicroBatch] = ()
    _comes_again: bool = False

    @property
    def position(self) -> int:
        """Global samples handed out."""
        return (self.epoch * self.batches_in_epoch + self.batches) * self.samples_per_batch

    def begin_epoch(self, epoch: int) -> None:
        """The Trainer begins with an epoch."""
        if epoch > self.epoch:
            self.epoch, self.batches = epoch, 0

    def draw_from(self, iterator: Iterator[MicroBatch], count: int) -> None:
        """The next step has this many batches of this iterator."""
        self._iterator, self._count = iterator, count

    def next_step(self) -> Sequence[MicroBatch]:
        """The batches of the next step.

        Raises:
            EpochEnded: there are none.
        """
        if not self._comes_again:
            assert self._iterator is not None  # noqa: S101 set for every step
            self._drawn_at = (self.epoch, self.batches)
            with self.alone():
                self._drawn = list(islice(self._iterator, self._count))
        self._comes_again = False
        if len(self._drawn) < (self._count if self.only_whole else 1):
            raise EpochEnded
        self.batches += len(self._drawn)
        return self._drawn

    def state_dict(self) -> dict[str, Any]:
        """Position, in samples, and what is kept of the Trainer."""
        samples = self.batches * self.samples_per_batch
        return {"epoch": self.epoch, "samples": samples, "trainer": self.read_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            InputError: it lies within a batch, as batches are now.
            SystemExit: code 75: the Trainer's loop, which has begun, is somewhere else.
        """
        batches = whole_batches(state["samples"], self.samples_per_batch, field=self.setting)
        place = (state["epoch"], batches)
        if self._iterator is not None and place != (self.epoch, self.batches):
            if place != self._drawn_at:
                raise SystemExit(EXIT_RESTART_ME)
            self._comes_again = True
        self.epoch, self.batches = place
        self.restored = state["trainer"]

    def close(self) -> None:
        """Nothing to end: the iterator is the Trainer's."""
