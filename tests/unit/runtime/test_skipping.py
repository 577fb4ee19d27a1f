"""Which batches a later start passes over: what is on record, by the limits of today."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure.storage.local import LocalStore
from perdure.training.recovery.repair import SkippedBatch, Vote
from perdure.training.runtime.step_loop.skipping import SkippedData, skipped_batch, skipped_prefix
from perdure.training.runtime.step_loop.step import Limits


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path)


def data(store: LocalStore, limits: Limits | None = None) -> SkippedData:
    return SkippedData(store, "run-1", limits=limits or Limits(grad_norm=5.0), max_in_a_row=10)


def batch(start: int, **changes: Any) -> SkippedBatch:
    given = {"step": 3, "start": start, "stop": start + 8, "loss": 2.0, "grad_norm": 7.0}
    return SkippedBatch.model_validate({**given, **changes})


def test_a_later_start_knows_what_an_earlier_one_wrote_down_in_the_order_of_the_data(store):
    earlier, later = data(store), data(store)
    for one in (batch(160), batch(16), batch(24, loss=None, grad_norm=None)):
        earlier.record(one)
    found = later.read_stored()
    assert [one.start for one in found] == [16, 24, 160]
    later.add(found)
    assert later.find_skipped(24, 32) == batch(24, loss=None, grad_norm=None)
    assert later.find_skipped(32, 40) is None


@pytest.mark.parametrize(
    ("limits", "is_known"),
    [
        (Limits(grad_norm=7.0), True),
        (Limits(grad_norm=7.5), False),
        (Limits(loss=1.0), True),
        (Limits(), False),
    ],
)
def test_a_batch_that_the_limits_of_today_accept_is_trained_on_again(store, limits, is_known):
    skipping = data(store, limits)
    skipping.add([batch(16)])
    assert (skipping.find_skipped(16, 24) is not None) == is_known


@pytest.mark.parametrize(
    ("span", "is_known"),
    [((0, 16), False), ((0, 32), True), ((20, 22), True), ((16, 24), True), ((24, 40), False)],
)
def test_a_batch_of_another_size_is_passed_over_where_it_has_any_of_the_samples(
    store, span, is_known
):
    skipping = data(store)
    skipping.add([batch(16)])
    assert (skipping.find_skipped(*span) is not None) == is_known


def test_what_is_no_number_is_on_record_as_none_and_stays_skipped_whatever_the_limits(store):
    one = skipped_batch(Vote(step=3, loss=math.nan, grad_norm=math.inf), 16, 24)
    assert (one.loss, one.grad_norm) == (None, None)
    skipping = data(store, Limits())
    skipping.add([one])
    assert skipping.find_skipped(16, 24) == one


def test_a_record_that_cannot_be_read_is_left_out_and_named(store, caplog):
    key = f"{skipped_prefix('run-1')}000000000000008.json"
    store.put(key, b"{}")
    data(store).record(batch(16))
    assert [one.start for one in data(store).read_stored()] == [16]
    assert key in caplog.text
