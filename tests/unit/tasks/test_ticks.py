"""Which of several ticks that start together does the work."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from perdure.tasks.ticks import Tick, rival_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


def tick(due: float, began: float | None = None, changed: float | None = None) -> Tick:
    """A tick that was due and began so many minutes after noon."""
    since = changed if changed is not None else began if began is not None else due
    return Tick(f"due-{due:g}", at(due), at(began) if began is not None else None, at(since))


def workers(ticks: list[Tick], now: float) -> list[str]:
    """Names of the ticks that do the work."""
    return [
        one.name
        for one in ticks
        if rival_of(one, [other for other in ticks if other is not one], now=at(now)) is None
    ]


@pytest.mark.parametrize("begins", [lambda n: 31 + n / 100, lambda n: 31 - n / 100, lambda _: 31])
def test_of_a_backlog_the_newest_alone_does_the_work(begins):
    backlog = [tick(due, begins(due)) for due in range(30)]
    assert workers(backlog, now=32) == ["due-29"]


def test_an_old_tick_ends_for_one_that_no_process_has_yet():
    late, newest = tick(0, 31), tick(29)
    assert rival_of(late, [newest], now=at(31)) == newest


def test_a_tick_that_began_in_time_is_not_ended_by_the_next():
    first, second = tick(0, 0.5), tick(1, 1.2)
    assert workers([first, second], now=1.3) == ["due-0"]


def test_on_a_machine_too_slow_for_its_schedule_a_tick_works_all_the_same():
    # Each is taken at once, and its process runs when the next ones are due.
    slow = [tick(due, due + 0.1) for due in range(5)]
    assert workers(slow, now=4.5) == ["due-0"]
    newer = [other for other in slow if other.due > slow[1].due]
    assert rival_of(slow[1], newer, now=at(4.5)) is None, "of keep-supervised each"


def test_ticks_whose_work_overlaps_never_leave_it_to_each_other():
    for begin in (0.2, 0.9, 1.0, 1.1, 3.0):
        for other in (1.0, 1.5, 3.0):
            assert len(workers([tick(0, begin), tick(1, other)], now=4)) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (tick(20, None, 20), "is Late for too long: no worker takes it"),
        (tick(20, 21), "has been at work for long: its run or its lease says more"),
        (tick(-5, 0), "began long ago"),
    ],
)
def test_a_tick_does_the_work_though_another(other, why):
    late = tick(10, 40)
    assert rival_of(late, [other], now=at(40)) is None, why


def test_the_last_of_three_wins_whatever_the_order_of_the_answer():
    backlog = [tick(0, 10), tick(2, 10), tick(4, 10)]
    rivals = [rival_of(old, list(reversed(backlog)), now=at(10)) for old, _ in pairwise(backlog)]
    assert {rival.name for rival in rivals if rival is not None} == {"due-4"}
