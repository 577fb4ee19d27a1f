"""A rank that is left behind by the others, on the way to a first step or in a recovery."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.liveness.heartbeat import Phase
from perdure.training.liveness.stalled_rank import (
    FACTOR,
    StalledRank,
    StalledRankDetector,
)
from perdure.training.wire.rank_snapshot import RankSnapshot
from tests.values import not_none

BEGAN_S = 1000.0
LEAST_S = 60.0
AWAY = RankSnapshot(
    rank=2,
    node="node-1",
    device=0,
    pid=102,
    phase="restore",
    silent_s=9e9,
    cpu_s=5.0,
    io_bytes=7,
)
WAITING = replace(AWAY, entered=1)
TRAINING = replace(AWAY, phase="step", step=4, has_stepped=True, silent_s=0.1)


def detector(**changes) -> StalledRankDetector:
    return StalledRankDetector(**{"least_s": LEAST_S, "began_s": BEGAN_S, **changes})


def look(
    watch: StalledRankDetector, late: RankSnapshot, peers: RankSnapshot, at_s: float
) -> StalledRank | None:
    """One look at four ranks, of which one is late."""
    ranks = [late if n == late.rank else replace(peers, rank=n, pid=100 + n) for n in range(4)]
    return watch.judge(ranks, now_s=BEGAN_S + at_s)


def test_a_rank_that_the_others_wait_for_is_left_behind_after_the_least_time():
    watch = detector()
    assert look(watch, AWAY, AWAY, 1.0) is None, "nobody is ahead"
    assert look(watch, AWAY, WAITING, 5.0) is None
    assert look(watch, AWAY, WAITING, 5.0 + LEAST_S) is None
    late = not_none(look(watch, AWAY, WAITING, 6.0 + LEAST_S))
    assert (late.rank, late.phase, late.limit_s, late.peers_s) == (2, Phase.RESTORE, LEAST_S, 5.0)
    assert late.late_s == LEAST_S + 1.0


def test_where_the_others_took_minutes_a_rank_may_be_late_by_minutes():
    watch = detector()
    took_s = 240.0
    assert look(watch, AWAY, AWAY, 1.0) is None
    assert look(watch, AWAY, WAITING, took_s) is None
    assert look(watch, AWAY, WAITING, (1 + FACTOR) * took_s) is None
    assert not_none(look(watch, AWAY, WAITING, (1 + FACTOR) * took_s + 1)).peers_s == took_s


def test_ranks_that_are_all_on_their_way_take_as_long_as_they_need():
    watch = detector()
    for at_s in range(0, 3000, 50):
        assert look(watch, AWAY, AWAY, float(at_s)) is None
        assert look(watch, WAITING, WAITING, float(at_s)) is None


@pytest.mark.parametrize(
    "alive",
    [
        pytest.param({"cpu_s": 5.0 + LEAST_S}, id="it computes"),
        pytest.param({"io_bytes": 8}, id="it reads or writes"),
        pytest.param({"silent_s": 1.0}, id="it beats"),
        pytest.param({"entered": 1}, id="it has come to the collective"),
        pytest.param({"phase": "save"}, id="it saves, which has a limit of its own"),
        pytest.param({"pid": 202}, id="it is another process"),
    ],
)
def test_a_rank_that_does_something_is_not_left_behind(alive):
    watch = detector()
    assert look(watch, AWAY, WAITING, 5.0) is None
    assert look(watch, replace(AWAY, **alive), WAITING, 10.0 + LEAST_S) is None


@pytest.mark.parametrize("last", [{"io_bytes": 8}, {"cpu_s": 5.0 + LEAST_S}])
def test_a_rank_that_was_active_when_the_others_had_passed_is_found_once_it_is_idle(last):
    watch, was_active = detector(), replace(AWAY, **last)
    assert look(watch, AWAY, WAITING, 5.0) is None
    active_s = 6.0 + LEAST_S
    assert look(watch, was_active, WAITING, active_s) is None
    assert look(watch, was_active, WAITING, active_s + LEAST_S) is None
    late = not_none(look(watch, was_active, WAITING, active_s + LEAST_S + 1.0))
    assert (late.rank, late.late_s) == (2, active_s + LEAST_S + 1.0 - 5.0)


def test_a_rank_that_reads_now_and_then_is_never_left_behind():
    watch = detector()
    for number in range(50):
        reading = replace(AWAY, io_bytes=7 + number)
        assert look(watch, reading, WAITING, 5.0 + number * (LEAST_S - 1.0)) is None


def test_a_process_that_took_the_place_of_another_has_the_time_that_a_start_takes():
    watch, start_s = detector(), 50.0
    assert look(watch, AWAY, AWAY, 1.0) is None
    assert look(watch, replace(TRAINING, rank=2), TRAINING, start_s) is None
    waiting = replace(AWAY, phase="recover", generation=2, silent_s=0.5)
    fresh = replace(AWAY, pid=202, phase="start")
    began_s = 500.0
    assert look(watch, fresh, waiting, began_s) is None
    assert look(watch, fresh, waiting, began_s + 2 * LEAST_S) is None, "it builds its model"


def test_a_survivor_that_stops_in_a_recovery_is_left_behind_by_those_that_train():
    watch = detector()
    assert look(watch, replace(TRAINING, rank=2), TRAINING, 10.0) is None
    lost = replace(AWAY, phase="recover", generation=2, has_stepped=True, step=4)
    gone_on = replace(TRAINING, generation=2)
    assert look(watch, lost, replace(lost, silent_s=0.5), 500.0) is None
    assert look(watch, lost, gone_on, 502.0) is None
    late = not_none(look(watch, lost, gone_on, 503.0 + LEAST_S))
    assert (late.rank, late.phase, late.peers_s) == (2, Phase.RECOVER, 2.0)


def test_a_limit_that_was_set_for_a_phase_holds_for_it():
    watch = detector(phases_s={Phase.RESTORE: 1000.0})
    assert look(watch, AWAY, WAITING, 5.0) is None
    assert look(watch, AWAY, WAITING, 900.0) is None
    assert not_none(look(watch, AWAY, WAITING, 1006.0)).limit_s == 1000.0


def test_of_thousands_of_ranks_the_one_is_found():
    watch, size = detector(), 4096
    ranks = [replace(WAITING, rank=n, pid=n) for n in range(size)]
    ranks[1234] = replace(AWAY, rank=1234, pid=1234)
    assert watch.judge(ranks, now_s=BEGAN_S + 100.0) is None
    assert watch.judge(ranks, now_s=BEGAN_S + 399.0) is None
    assert not_none(watch.judge(ranks, now_s=BEGAN_S + 401.0)).rank == 1234
