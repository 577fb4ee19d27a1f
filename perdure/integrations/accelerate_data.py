"""Where a loop over accelerate is in its data: the loader that its session has.

A place is set in the sampler: no sample before it is read, but of an IterableDataset, which has no
other way. Written against accelerate 1.15. Counts are batches of one rank in the epoch; positions
are samples of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from accelerate import skip_first_batches

from perdure.training.errors import InputError
from perdure.training.runtime.program import MicroBatch
from perdure.training.runtime.state.random_numbers import seed_epoch


@dataclass(slots=True)
class PreparedData:
    """Hands out the batches of each step from a DataLoader that accelerate has prepared.

    Attributes:
        loader: prepared.
        samples_per_batch: of all ranks together, in one forward pass of each.
        batches_per_step: of each rank; the last step of an epoch has what is left.
        seed: of the order and of what else is drawn at the start of an epoch; None: as torch and
            accelerate have it, which no other process can repeat.
        alone: around drawing. Accelerate has all ranks take the state of the first one's
            generator, which is the same in all; a rank whose process is new draws by itself.
        epoch: of the next batch, from 0.
        batches: of that epoch, handed out.
        position: global samples handed out.
    """

    loader: Any
    samples_per_batch: int
    batches_per_step: int
    seed: int | None = None
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    epoch: int = 0
    batches: int = 0
    position: int = 0
    _iterator: Iterator[MicroBatch] | None = field(default=None, init=False)
    _drawn_from: Any = field(default=None, init=False)

    def next_step(self) -> Sequence[MicroBatch]:
        """The batches of the next step, on the device.

        Raises:
            InputError: a whole epoch has none.
        """
        with self.alone():
            drawn = self._draw() or self._draw()
        if not drawn:
            text = f"epoch {self.epoch} has no batch: the dataset is smaller than one of all ranks"
            raise InputError("training_steps(loader=...)", text)
        return drawn

    def _draw(self) -> Sequence[MicroBatch]:
        """As many batches as a step has, or what is left of the epoch; then the next one begins."""
        if self._iterator is None:
            self._begin_epoch()
        assert self._iterator is not None  # noqa: S101 begun
        drawn = list(islice(self._iterator, self.batches_per_step))
        if drawn:
            self.batches += len(drawn)
            self.position += len(drawn) * self.samples_per_batch
        else:
            self._drop()
            self.epoch, self.batches = self.epoch + 1, 0
        return drawn

    def _begin_epoch(self) -> None:
        loader, epoch = self.loader, self.epoch
        loader.set_epoch(epoch)
        set_epoch(loader, epoch)
        if self.seed is not None:
            epoch_seed = seed_epoch(self.seed, epoch=epoch)
            generator = loader.synchronized_generator
            if generator is not None:
                generator.manual_seed(epoch_seed)
        self._drawn_from = skip_first_batches(loader, self.batches) if self.batches else loader
        self._iterator = iter(self._drawn_from)

    def _drop(self) -> None:
        """Leave the iterator, and accelerate's note of it."""
        if self._iterator is None:
            return
        self._iterator = None
        loader, self._drawn_from = self._drawn_from, None
        loader.end()

    @property
    def _sampler(self) -> Any:
        """The seedable one of accelerate, None where there is another."""
        sampler = self.loader.get_sampler()
        return sampler if hasattr(sampler, "initial_seed") else None

    def state_dict(self) -> dict[str, Any]:
        """Position, in samples, and the seed of the order where the sampler has one."""
        return {
            "epoch": self.epoch,
            "samples": self.batches * self.samples_per_batch,
            "position": self.position,
            "order": self._sampler.initial_seed if self._sampler is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            InputError: it lies within a batch, as batches are now.
        """
        batches = whole_batches(state["samples"], self.samples_per_batch, field="batch_size")
        if state["order"] is not None and self._sampler is not None:
            self._sampler.initial_seed = state["order"]
        self._drop()
        self.epoch, self.batches, self.position = state["epoch"], batches, state["position"]

    def close(self) -> None:
        """End the loader's worker processes."""
        self._drop()


def whole_batches(samples: int, samples_per_batch: int, *, field: str) -> int:
    """How many batches the samples are that a checkpoint has of its epoch.

    Raises:
        InputError: they end within a batch; `field` says how large that is.
    """
    batches, remainder = divmod(samples, samples_per_batch)
    if remainder:
        raise InputError(
            field,
            f"{samples_per_batch} samples of all ranks in a batch do not divide the {samples} that "
            "the checkpoint has of its epoch",
        )
    return batches


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Have the sampler at the core take the order of an epoch; batch samplers may wrap it twice."""
    sampler: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    inner: Any = getattr(sampler, "sampler", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)
