"""The expectation of a job, corrected by what its run has lived through."""

from __future__ import annotations

import pytest

from tests.unit.histories import BEGINNING, KEY, NOW
from training.journal.failure_rate import measured_mtbf_s
from training.journal.history import RunHistory, replay
from training.journal.records import AttemptEnded, AttemptStarted

DAY_S = 86_400.0


def lived(*attempts: tuple[str, float]) -> RunHistory:
    """A run whose attempts ended like this after so long."""
    records = list(BEGINNING[:-1])
    for number, (outcome, duration_s) in enumerate(attempts, start=1):
        key = {**KEY, "attempt": number}
        records.append(AttemptStarted(**NOW, **key, from_step=0))
        records.append(
            AttemptEnded(
                **NOW, **key, outcome=outcome, to_step=1, duration_s=duration_s, proc_start_cnt={}
            )
        )
    return replay(records)


@pytest.mark.parametrize(
    ("attempts", "mtbf_s"),
    [
        ((), DAY_S),
        ((("failed", DAY_S),), DAY_S),
        ((("failed", 0.0),), DAY_S / 2),
        ((("stopped", DAY_S),), 2 * DAY_S),
        ((("failed", 3600.0),) * 99, (DAY_S + 99 * 3600) / 100),
    ],
)
def test_the_mean_time_between_failures_is_measured_from_the_jobs_expectation_on(attempts, mtbf_s):
    assert measured_mtbf_s(DAY_S, lived(*attempts)) == pytest.approx(mtbf_s)


def test_failures_bring_it_down_and_good_times_bring_it_up():
    bad = lived(("failed", 60.0), ("failed", 60.0))
    good = lived(("failed", 60.0), ("failed", 60.0), ("stopped", 30 * DAY_S))
    assert measured_mtbf_s(DAY_S, bad) < DAY_S < measured_mtbf_s(DAY_S, good)
