"""Clocks of several nodes, compared by the steps that all ranks make together."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from training.diagnosis.peers import MAX_ANCHORS, anchors, offsets

YEAR = 2026
STARTED_S = datetime(2026, 8, 1, 10, tzinfo=UTC).timestamp()


def log(numbers: range, *, ahead_s: float = 0.0) -> str:
    return "".join(
        f"{datetime.fromtimestamp(STARTED_S + 10 * n + ahead_s, UTC):%Y-%m-%d %H:%M:%S} "
        f"iteration {n}/ 1000 | lm loss: 2.0 |\n"
        for n in numbers
    )


def steps(numbers: range, *, ahead_s: float = 0.0) -> dict[int, float]:
    return {n: STARTED_S + 10 * n + ahead_s for n in numbers}


def test_steps_are_read_with_the_time_of_their_first_mention():
    text = log(range(3)) + log(range(3), ahead_s=5)
    assert anchors(text, year=YEAR) == steps(range(3))


@pytest.mark.parametrize("words", ["step 7", "Step: 7", "global_step=7", "'step': 7", "step[7]"])
def test_steps_are_read_in_each_trainers_words(words):
    assert anchors(f"2026-08-01 10:00:00 {words} loss 2\n", year=YEAR) == {7: STARTED_S}


def test_steps_without_a_time_and_times_without_a_step_are_no_anchors():
    assert anchors("step 7 loss 2\n2026-08-01 10:00:00 steps done\n", year=YEAR) == {}


def test_only_the_newest_steps_are_kept():
    found = anchors(log(range(MAX_ANCHORS + 50)), year=YEAR)
    assert (len(found), min(found)) == (MAX_ANCHORS, 50)


def test_a_number_of_thousands_of_digits_is_no_step():
    assert anchors(f"2026-08-01 10:00:00 step {'1' * 5000}\n", year=YEAR) == {}


@pytest.mark.parametrize("ahead_s", [-3600.0, -7.5, 7.5, 3600.0])
def test_a_clock_that_is_off_is_put_right(ahead_s):
    shifts = offsets([steps(range(20)), steps(range(5, 18), ahead_s=ahead_s), steps(range(9))])
    assert shifts == [0.0, -ahead_s, 0.0]


def test_an_offset_is_not_misled_by_one_late_step():
    late = {**steps(range(10), ahead_s=60.0), 4: STARTED_S + 5000}
    assert offsets([steps(range(20)), late]) == [0.0, -60.0]


def test_small_differences_are_tolerated():
    assert offsets([steps(range(20)), steps(range(20), ahead_s=0.9)]) == [0.0, 0.0]


@pytest.mark.parametrize("common", [range(0), range(19, 25), range(30, 40)])
def test_sources_with_too_few_steps_in_common_keep_their_time(common):
    assert offsets([steps(range(20)), steps(common, ahead_s=60.0)]) == [0.0, 0.0]


def test_no_sources_have_no_offsets():
    assert offsets([]) == []
