"""The position of a Trainer's data: counted, saved, set, and never read twice."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from perdure.integrations.trainer_data import EpochEnded, TrainerData
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.errors import InputError


@contextmanager
def alone():
    yield


def data(samples_per_batch: int = 8) -> TrainerData:
    setting = "per_device_train_batch_size"
    return TrainerData(setting, samples_per_batch, 15, alone, lambda: {"total_flos": 7})


def test_a_step_has_as_many_batches_as_the_trainer_asks_for_and_all_are_counted():
    one = data()
    one.draw_from(iter(range(15)), 2)
    assert [one.next_step(), one.next_step()] == [[0, 1], [2, 3]]
    assert (one.epoch, one.batches, one.position) == (0, 4, 32)
    one.begin_epoch(1)
    assert (one.epoch, one.batches, one.position) == (1, 0, 120)


def test_the_last_step_of_an_epoch_may_have_fewer_and_none_is_the_end():
    one = data()
    one.draw_from(iter(range(3)), 2)
    assert [one.next_step(), one.next_step()] == [[0, 1], [2]]
    with pytest.raises(EpochEnded):
        one.next_step()
    assert one.batches == 3


def test_what_is_too_little_for_a_step_at_the_end_of_a_stream_is_left_out():
    one = data()
    one.only_whole = True
    one.draw_from(iter(range(3)), 2)
    assert one.next_step() == [0, 1]
    with pytest.raises(EpochEnded):
        one.next_step()
    assert one.batches == 2
    one.begin_epoch(1)
    one.draw_from(iter(range(3)), 2)
    assert one.next_step() == [0, 1]


def test_a_position_goes_on_where_it_was_saved_also_with_other_batches():
    one = data()
    one.begin_epoch(2)
    one.draw_from(iter(range(15)), 4)
    one.next_step()
    state = one.state_dict()
    for samples, batches in ((8, 4), (16, 2), (4, 8)):
        other = data(samples)
        other.load_state_dict(state)
        assert (other.epoch, other.batches) == (2, batches)
        assert other.restored == {"total_flos": 7}


def test_a_position_within_a_batch_is_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"per_device_train_batch_size: 24 samples .* the 32"):
        data(24).load_state_dict({"epoch": 0, "samples": 32, "trainer": {}})


def test_the_step_that_comes_again_has_the_batches_that_were_drawn_for_it():
    one = data()
    one.draw_from(iter(range(15)), 2)
    one.next_step()
    before = one.state_dict()
    assert one.next_step() == [2, 3]
    after = one.state_dict()
    one.load_state_dict(before)
    assert one.next_step() == [2, 3]
    one.load_state_dict(after)
    assert one.next_step() == [4, 5]


def test_a_loop_that_has_begun_elsewhere_is_begun_again_by_a_new_process():
    one = data()
    one.draw_from(iter(range(15)), 2)
    for _ in range(3):
        one.next_step()
    with pytest.raises(SystemExit) as end:
        one.load_state_dict({"epoch": 0, "samples": 0, "trainer": {}})
    assert end.value.code == EXIT_RESTART_ME
