from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.trainer.data.loader import SampleOrder, permute


@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_once(n: int, seed: int, epoch: int) -> None:
    out = permute(np.arange(n), num_items=n, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(out), np.arange(n))


@given(n=st.integers(20, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    items = np.arange(n)
    one = permute(items, num_items=n, seed=seed, epoch=epoch)
    assert not np.array_equal(one, permute(items, num_items=n, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(one, permute(items, num_items=n, seed=seed + 1, epoch=epoch))


@given(
    n=st.integers(1, 50),
    start=st.integers(0, 500),
    counts=st.lists(st.integers(0, 40), max_size=4),
    shuffle=st.booleans(),
)
def test_pieces_make_the_whole_across_epochs(
    n: int, start: int, counts: list[int], *, shuffle: bool
) -> None:
    order = SampleOrder(n, 7, shuffle)
    pieces, position = [], start
    for count in counts:
        pieces += order.indices(position, count).tolist()
        position += count
    assert pieces == order.indices(start, sum(counts)).tolist()


def test_without_shuffle_samples_come_as_they_lie() -> None:
    assert SampleOrder(3, 0, shuffle=False).indices(1, 5).tolist() == [1, 2, 0, 1, 2]


def test_huge_corpora_need_no_list() -> None:
    n = 10**15
    out = SampleOrder(n, 1).indices(n - 1000, 1000)
    assert len(set(out.tolist())) == 1000
    assert 0 <= out.min() < n // 50
    assert n - n // 50 < out.max() < n


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        SampleOrder(0, 1)


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # Another order would make saved positions mean other samples.
    assert SampleOrder(10, 1234).indices(0, 20).tolist() == [
        *(3, 8, 4, 7, 1, 0, 6, 9, 2, 5),
        *(3, 8, 9, 7, 4, 5, 0, 6, 2, 1),
    ]
