"""The table and the picture of where the time went, and who keeps them up to date."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from perdure.storage.local import LocalStore
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import replay
from perdure.training.journal.steps import metrics_prefix
from perdure.training.journal.time_account import MEANING, Account, Interval, Owner
from perdure.training.reporting.ettr import (
    COLOURS,
    Accountant,
    coarse,
    duration_text,
    ettr_text,
    share_rows,
    timeline_picture,
)
from tests.unit.journal.histories import BEGINNING, END

STEP = StepRecord(11, 2.0, 1.0, 1e-3, 1e5, None, 5.0, 0.5, 8, 0, 1, 1)


def account_of(*parts: tuple[float, Owner]) -> Account:
    at_s, intervals = 100.0, []
    for seconds, owner in parts:
        intervals.append(Interval(at_s, at_s + seconds, owner, (1, 1)))
        at_s += seconds
    return Account(tuple(intervals))


HALF = account_of((5.0, Owner.START_UP), (8.0, Owner.PRODUCTIVE), (3.0, Owner.SAVE))


def test_every_owner_has_a_colour_of_its_own():
    assert set(COLOURS) == set(MEANING)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_the_rows_add_up_and_explain_themselves():
    rows = share_rows(HALF)
    assert [(row["owner"], row["time"], row["share"]) for row in rows] == [
        ("productive_step", "8.0 s", "50.0%"),
        ("save_block", "3.0 s", "18.8%"),
        ("start_up", "5.0 s", "31.2%"),
        ("wall time", "16.0 s", "100.0%"),
    ]
    assert rows[0]["what"] == MEANING[Owner.PRODUCTIVE]
    assert ettr_text(HALF) == "ETTR 50.0%: 8.0 s on steps that were kept, of 16.0 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.04 s"), (59.94, "59.9 s"), (60.0, "1m 0s"), (3700.0, "1h 1m"), (1e6, "11d 13h")],
)
def test_a_duration_is_shown_in_its_two_largest_units(seconds, text):
    assert duration_text(seconds) == text


def test_what_is_too_short_to_be_seen_goes_with_its_neighbours_and_nothing_is_lost():
    parts = [part for _ in range(5000) for part in ((0.9, Owner.PRODUCTIVE), (0.1, Owner.SAVE))]
    reported = account_of(*parts, (500.0, Owner.START_UP))
    drawn = list(coarse(reported.intervals, 100))
    assert len(drawn) <= 102
    assert {interval.owner for interval in drawn} == {Owner.PRODUCTIVE, Owner.START_UP}
    assert drawn[0].from_s == reported.intervals[0].from_s
    assert drawn[-1].to_s == reported.intervals[-1].to_s
    assert all(interval.to_s == other.from_s for interval, other in pairwise(drawn))
    assert list(coarse(())) == []


@pytest.mark.parametrize("reported", [HALF, Account(())])
def test_the_picture_is_a_png(reported):
    assert timeline_picture(reported).startswith(b"\x89PNG")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


def put(store: LocalStore, *records: StepRecord) -> None:
    key = f"{metrics_prefix('run', 1, 1)}{records[0].step:08d}-{records[-1].step:08d}.jsonl"
    store.put(key, "".join(json.dumps(asdict(interval)) + "\n" for interval in records).encode())


def steps(*numbers: int) -> list[StepRecord]:
    return [replace(STEP, step=number, at_s=float(number)) for number in numbers]


def test_steps_of_the_living_attempt_count_before_they_are_in_the_store(store):
    put(store, *steps(11, 12))
    accountant, living = Accountant(store, "run"), replay(BEGINNING)
    assert accountant.account(living, now_s=20.0).seconds[Owner.PRODUCTIVE] == 1.0
    accountant.add_steps(steps(12, 13, 14))
    assert accountant.account(living, now_s=20.0).seconds[Owner.PRODUCTIVE] == 2.0
    put(store, *steps(13))
    assert accountant.account(living, now_s=20.0).seconds[Owner.PRODUCTIVE] == 2.0
    assert [record.step for record in accountant.kept_steps().values()] == [11, 12, 13]


def test_steps_that_are_not_in_the_store_are_lost_when_their_attempt_ends(store):
    put(store, *steps(11))
    accountant = Accountant(store, "run")
    accountant.add_steps(steps(11, 12, 13))
    over = replay([*BEGINNING, *END])
    assert accountant.account(over, now_s=20.0).seconds[Owner.PRODUCTIVE] == 0.5
