"""The batches of a Lightning Trainer: whole steps, from a place on, none of them read before it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from perdure.integrations.framework_steps import count_tokens
from perdure.integrations.lightning_data import StepBatches, host_batches, place_loader
from perdure.training.errors import InputError


class Numbers(Dataset[int]):
    """Samples, which remembers those that were read."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    """Five samples, whose number is not known before."""

    def __iter__(self) -> Any:
        return iter(range(5))


def placed(places: list[int | None], **settings: Any) -> DataLoader[int]:
    loader = DataLoader(Numbers(), batch_size=2, **settings)
    assert place_loader(loader, lambda: places[0])
    return loader


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_begins_at_its_place_and_goes_on_from_the_start(settings):
    places: list[int | None] = [3]
    loader = placed(places, **settings)
    assert len(loader) == 5
    assert [one.tolist() for one in loader] == [[6, 7], [8, 9]]
    places[0] = 0
    assert [one.tolist() for one in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert len(loader) == 5


def test_nothing_is_read_before_the_place_is_known_nor_before_the_place():
    places: list[int | None] = [None]
    loader = placed(places)
    assert list(loader) == []
    places[0] = 4
    assert [one.tolist() for one in loader] == [[8, 9]]
    assert loader.dataset.read == [8, 9]  # type: ignore[attr-defined]


def test_the_order_of_an_epoch_is_drawn_when_it_begins():
    def order(num_skipped: int) -> list[Any]:
        def place() -> int:
            torch.manual_seed(5)
            return num_skipped

        loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
        place_loader(loader, place)
        iterator = iter(loader)
        torch.manual_seed(6)  # a step is seeded before its batches are there
        return [one.tolist() for one in iterator]

    assert order(2) == order(0)[2:]


def test_a_loader_that_is_not_read_by_index_stays_as_it_is():
    assert not place_loader([1, 2], lambda: 0)
    stream = DataLoader(Stream(), batch_size=2)
    assert not place_loader(stream, lambda: 0)
    assert type(stream) is DataLoader


def test_an_order_that_cannot_be_had_again_is_refused():
    numbers = Numbers()
    drawn = torch.Generator()
    for sampler in (
        RandomSampler(numbers, generator=drawn),
        WeightedRandomSampler([1.0] * 10, 10, generator=drawn),
    ):
        for loader in (
            DataLoader(numbers, sampler=sampler),
            DataLoader(numbers, batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
            DataLoader(numbers, sampler=DistributedSamplerWrapper(sampler, 1, 0)),
        ):
            name = type(sampler).__name__
            with pytest.raises(InputError, match=f"train_dataloader: its {name} has a generator"):
                place_loader(loader, lambda: 0)


@pytest.mark.parametrize("loader", [DataLoader(Numbers(5)), DataLoader(Stream())])
def test_batches_are_drawn_for_a_step_and_handed_out_one_by_one(loader):
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader(loader, "max_size_cycle"))
    epoch = host_batches(iter(fetcher))
    drawn: list[int] = []

    def begin() -> list[Any]:
        step = list(islice(epoch, 2))
        drawn.append(len(step))
        return step

    batches = StepBatches(begin)
    found = []
    while not batches.done:
        batch, index, _ = next(batches)
        found.append((int(batch), index))
        assert len(drawn) == index // 2 + 1
    assert found == [(one, one) for one in range(5)]


def test_tokens_are_counted_in_what_looks_like_text():
    tokens = torch.zeros(4, 8, dtype=torch.long)
    images, classes = torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.long)
    assert count_tokens({"input_ids": tokens, "labels": tokens}) == 32
    assert count_tokens(tokens) == 32
    assert count_tokens((tokens, tokens)) == 32
    assert count_tokens((images, classes)) == 0
    assert count_tokens((images, tokens)) == 0, "many labels are no text"
    assert count_tokens({"pixels": images}) == 0
