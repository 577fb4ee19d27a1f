"""The batches of a Lightning Trainer: drawn for whole steps, and from a place in the epoch on.

Written against lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from perdure.training.errors import InputError


class HostBatch:
    """A batch as the Trainer's fetcher gave it; it stays on the host until a step is run.

    Attributes:
        fetched: the batch, its index and that of its loader.
        is_last: of its epoch.
    """

    def __init__(self, fetched: Any, *, is_last: bool) -> None:
        self.fetched = fetched
        self.is_last = is_last

    @property
    def batch(self) -> Any:
        """As the loader gave it."""
        return self.fetched[0]


def host_batches(fetcher: Any) -> Iterator[HostBatch]:
    """What is left of an epoch."""
    while not fetcher.done:
        try:
            fetched = next(fetcher)
        except StopIteration:
            return
        yield HostBatch(fetched, is_last=fetcher.done)


class StepBatches:
    """Stands in for the fetcher of a Trainer: the batches of a step are drawn together.

    Args:
        begin: begins a step; its batches.

    Attributes:
        done: the batch that was handed out is the last one of the epoch.
    """

    def __init__(self, begin: Callable[[], list[HostBatch]]) -> None:
        self._begin = begin
        self._left: list[HostBatch] = []
        self.done = False

    def __next__(self) -> Any:
        """The next batch, its index and that of its loader."""
        if not self._left:
            self._left = self._begin()
        batch = self._left.pop(0)
        self.done = batch.is_last
        return batch.fetched


class FromPlace:
    """The indices of an epoch from a place on; as long as all of them.

    Args:
        indices: a batch sampler.
        num_skipped: how many of its batches to leave out; asked for with every epoch.
    """

    def __init__(self, indices: Any, num_skipped: Callable[[], int]) -> None:
        self._indices = indices
        self._num_skipped = num_skipped

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        remaining = islice(iter(self._indices), self._num_skipped(), None)
        # A sampler draws its order with the first index, and random numbers are seeded for that.
        return chain(list(islice(remaining, 1)), remaining)


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's sampler, that of its batch sampler, and what the Trainer has wrapped in them."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        yield sampler
        yield getattr(getattr(sampler, "dataset", None), "_sampler", None)


def place_loader(loader: Any, begin: Callable[[], int | None]) -> bool:
    """Have a DataLoader begin at a place, without reading what comes before it.

    Args:
        loader: changed in place.
        begin: called when the loader is iterated over: how many batches to leave out; None: the
            place is not known yet, and nothing is to be read.

    Returns:
        Whether it can: a loader of another kind is read up to there.

    Raises:
        InputError: the order of an epoch could not be had again.
    """
    kind = type(loader)
    if not isinstance(loader, DataLoader) or kind.__iter__ is not DataLoader.__iter__:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    for sampler in _samplers(loader):
        if getattr(sampler, "generator", None) is not None:
            text = "has a generator: the order of an epoch could not be had again, leave it out"
            raise InputError("train_dataloader", f"its {type(sampler).__name__} {text}")

    class Placed(kind):  # type: ignore[misc, valid-type]  # a kind of the user's
        """The loader, from a place on."""

        def __iter__(self) -> Any:
            return super().__iter__() if begin() is not None else iter(())

        @property
        def _index_sampler(self) -> Any:
            return FromPlace(super()._index_sampler, lambda: begin() or 0)

    Placed.__name__ = Placed.__qualname__ = kind.__name__
    loader.__class__ = Placed
    return True
