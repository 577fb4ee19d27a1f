"""When silence is a hang."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.config.watch import HangAction
from perdure.training.errors import InputError
from perdure.training.liveness.hang_limits import (
    MIN_LIMIT_S,
    RESTORE_FIELD,
    START_FIELD,
    STEP_FIELD,
    WINDOW,
    Hang,
    HangDetector,
    SilenceLimits,
)
from perdure.training.liveness.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter, Phase
from tests.jobs import small_job
from tests.values import not_none

START_S = 1000.0  # when the processes were started
START_LIMIT_S = 600.0


def beat(
    step: int, at_s: float, *, phase: Phase = Phase.STEP, stepped_s: float | None = None
) -> Heartbeat:
    """A reading: a step completed, and the beat written, at the same time unless given."""
    stepped_s = at_s if stepped_s is None else stepped_s
    return Heartbeat(1, phase, 0, step, 0, 0, round(at_s * 1e9), round(stepped_s * 1e9))


def trained(*steps_s: float, fixed_limit_s: float | None = None) -> tuple[HangDetector, float]:
    """A detector that has seen one rank take these steps, and when the last one ended."""
    detector = HangDetector(SilenceLimits(START_LIMIT_S, fixed_limit_s))
    now_s = START_S + 10
    detector.judge({0: beat(1, now_s)}, now_s=now_s, since_s=START_S)
    for number, step_s in enumerate(steps_s, start=2):
        now_s += step_s
        assert detector.judge({0: beat(number, now_s)}, now_s=now_s, since_s=START_S) is None
    return detector, now_s


def judge(detector: HangDetector, now_s: float, **beats: Heartbeat) -> Hang | None:
    by_rank = {int(name.removeprefix("rank")): reading for name, reading in beats.items()}
    return detector.judge(by_rank, now_s=now_s, since_s=START_S)


@pytest.mark.parametrize(
    ("steps_s", "limit_s"),
    [
        ([10.0, 10.0, 20.0, 500.0, 11.0], 110.0),
        ([0.2] * 20, MIN_LIMIT_S),
        ([*[100.0] * WINDOW, *[8.0] * WINDOW], 80.0),
    ],
    ids=["ten times the median step", "a minute for fast steps", "of the newest steps"],
)
def test_the_limit_is_learned_from_the_steps(steps_s, limit_s):
    assert HangDetector(SilenceLimits(START_LIMIT_S)).limit_s == START_LIMIT_S, "before any step"
    assert trained(*steps_s)[0].limit_s == limit_s
    assert MIN_LIMIT_S == 60.0


def test_where_only_every_tenth_step_is_known_ten_of_them_are_the_measure():
    detector = HangDetector(SilenceLimits(START_LIMIT_S))
    for number in range(5):
        now_s = START_S + 20.0 * number
        reading = replace(beat(10 * number, now_s), stride=10)
        assert judge(detector, now_s, rank0=reading) is None
    assert detector.limit_s == 200.0


def test_the_least_limit_may_be_a_longer_one():
    detector = HangDetector(SilenceLimits(START_LIMIT_S, floor_s=500.0))
    for number in range(3):
        judge(detector, START_S + number, rank0=beat(number, START_S + number))
    assert detector.limit_s == 500.0


def test_steps_between_two_readings_share_their_time():
    detector, now_s = trained()
    judge(detector, now_s + 100, rank0=beat(11, now_s + 100))
    assert detector.limit_s == 100.0


def test_a_limit_given_by_the_job_is_not_learned():
    detector, now_s = trained(*[40.0] * 3, fixed_limit_s=45.0)
    assert detector.limit_s == 45.0
    verdict = judge(detector, now_s + 46, rank0=beat(4, now_s))
    assert verdict == Hang(0, 46.0, 45.0, Phase.STEP, 4, STEP_FIELD, is_slow_start=False)


def test_silence_is_a_hang_only_beyond_the_limit():
    detector, now_s = trained(*[0.5] * 5)
    silent = beat(6, now_s)
    assert judge(detector, now_s + 60, rank0=silent) is None
    assert judge(detector, now_s + 60.5, rank0=silent) == Hang(
        0, 60.5, 60.0, Phase.STEP, 6, STEP_FIELD, is_slow_start=False
    )


def test_the_rank_that_is_silent_longest_is_named():
    detector, now_s = trained(*[0.5] * 5)
    verdict = not_none(
        judge(
            detector,
            now_s + 70,
            rank0=beat(6, now_s),
            rank1=beat(5, now_s - 1),
            rank2=beat(6, now_s),
        )
    )
    assert (verdict.local_rank, verdict.step) == (1, 5)


@pytest.mark.parametrize(
    ("phase", "field"),
    [
        (Phase.START, START_FIELD),
        (Phase.RESTORE, RESTORE_FIELD),
        (Phase.SAVE, "watch.save_timeout_s"),
    ],
)
def test_slow_phases_get_the_limit_for_the_start(phase, field):
    detector, now_s = trained(*[0.5] * 5)
    slow = beat(6, now_s, phase=phase)
    assert judge(detector, now_s + START_LIMIT_S, rank0=slow) is None
    verdict = judge(detector, now_s + START_LIMIT_S + 1, rank0=slow)
    assert verdict == Hang(
        0, START_LIMIT_S + 1, START_LIMIT_S, phase, 6, field, is_slow_start=False
    )


def test_a_slow_phase_never_gets_less_than_a_step():
    detector, now_s = trained(*[100.0] * 3)
    assert judge(detector, now_s + 999, rank0=beat(4, now_s, phase=Phase.SAVE)) is None


def test_the_first_step_gets_the_limit_for_the_start_though_the_job_gives_a_short_one(tmp_path):
    writer = HeartbeatWriter(tmp_path / "heartbeat-0")
    writer.beat(phase=Phase.RESTORE)
    writer.beat(phase=Phase.DATA, step=40)
    writer.beat(phase=Phase.STEP)
    reading = not_none(HeartbeatReader.of(tmp_path, 0).read())
    detector = HangDetector(SilenceLimits(START_LIMIT_S, 5.0))
    restored_s = reading.beat_ns / 1e9
    for silent_s, hung in ((6, False), (START_LIMIT_S - 1, False), (START_LIMIT_S + 1, True)):
        verdict = detector.judge({0: reading}, now_s=restored_s + silent_s, since_s=restored_s - 9)
        assert (verdict is not None) is hung


def test_a_process_that_never_beats_again_after_its_start_hangs_at_the_limit_for_the_start():
    detector = HangDetector(SilenceLimits(START_LIMIT_S))
    silent = beat(-1, START_S + 2, phase=Phase.START, stepped_s=0.0)
    assert judge(detector, START_S + 2 + START_LIMIT_S, rank0=silent) is None
    assert judge(detector, START_S + 3 + START_LIMIT_S, rank0=silent) is not None


def test_a_beat_from_before_the_start_does_not_count_as_silence():
    detector = HangDetector(SilenceLimits(START_LIMIT_S, 5.0))
    assert judge(detector, START_S + 1, rank0=beat(3, 10.0)) is None


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.SAVE, 900.0),
        (Phase.RESTORE, 1200.0),
        (Phase.EVALUATE, 3600.0),
        (Phase.STEP, 5.0),
        (Phase.AGREE, 5.0),
    ],
)
def test_a_phase_may_have_a_limit_of_its_own(phase, limit_s):
    limits = SilenceLimits(START_LIMIT_S, 5.0, save_s=900.0, restore_s=1200.0, evaluate_s=3600.0)
    detector, slow = HangDetector(limits), beat(6, START_S + 10, phase=phase)
    assert judge(detector, START_S + 10 + limit_s, rank0=slow) is None
    verdict = not_none(judge(detector, START_S + 11 + limit_s, rank0=slow))
    assert (verdict.limit_s, verdict.phase) == (limit_s, phase)


def test_no_phase_is_allowed_less_than_a_step():
    limits = SilenceLimits(5.0, 50.0, save_s=1.0)
    assert limits.limit_of(Phase.SAVE, has_stepped=True, step_s=50.0) == 50.0
    assert limits.limit_of(Phase.START, has_stepped=False, step_s=50.0) == 50.0


@pytest.mark.parametrize(
    ("phase", "limits", "field"),
    [
        (Phase.STEP, SilenceLimits(600.0), START_FIELD),
        (Phase.STEP, SilenceLimits(600.0, 900.0), STEP_FIELD),
        (Phase.RESTORE, SilenceLimits(600.0, restore_s=50.0), START_FIELD),
        (Phase.RESTORE, SilenceLimits(600.0, restore_s=900.0), RESTORE_FIELD),
        (Phase.EVALUATE, SilenceLimits(600.0, evaluate_s=3600.0), "watch.evaluate_timeout_s"),
    ],
)
def test_the_field_of_a_limit_is_the_one_that_raises_it(phase, limits, field):
    detector = HangDetector(limits)
    hang = not_none(
        judge(detector, START_S + 9e9, rank0=beat(6, START_S, phase=phase, stepped_s=0))
    )
    assert (hang.field, hang.is_slow_start) == (field, True)


@pytest.mark.parametrize("phase", [Phase.START, Phase.RESTORE, Phase.DATA, Phase.STEP])
def test_a_process_without_a_step_gets_a_multiple_of_its_limit_where_starts_were_slow(phase):
    detector = HangDetector(SilenceLimits(START_LIMIT_S, 5.0, start_factor=2.0))
    silent = beat(40, START_S + 2, phase=phase, stepped_s=0.0)
    assert judge(detector, START_S + 2 + 2 * START_LIMIT_S, rank0=silent) is None
    assert not_none(judge(detector, START_S + 3 + 2 * START_LIMIT_S, rank0=silent)).is_slow_start
    trains = beat(41, START_S + 2, phase=Phase.STEP)
    assert not_none(judge(detector, START_S + 8, rank0=trains)).limit_s == 5.0


def test_a_process_without_a_beat_gets_a_multiple_of_its_limit_where_starts_were_slow():
    detector = HangDetector(SilenceLimits(10.0, start_factor=4.0))

    def at(now_s: float) -> Hang | None:
        return detector.judge({}, now_s=now_s, since_s=START_S, mute={0: START_S})

    assert at(START_S + 40.0) is None
    assert not_none(at(START_S + 41.0)).field == START_FIELD


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.STOPPED])
def test_a_rank_that_has_ended_its_loop_has_the_longest_of_all_limits(phase):
    limits = SilenceLimits(20.0, 5.0, save_s=30.0, evaluate_s=40.0)
    detector = HangDetector(limits)
    ended = beat(6, START_S, phase=phase)
    assert judge(detector, START_S + 39, rank0=ended) is None
    verdict = not_none(judge(detector, START_S + 41, rank0=ended))
    assert (verdict.limit_s, verdict.phase) == (40.0, phase)


def test_a_rank_in_a_pause_never_hangs():
    detector, now_s = trained(*[0.5] * 5)
    assert judge(detector, now_s + 1e6, rank0=beat(6, now_s, phase=Phase.PAUSED)) is None


def test_a_beat_within_a_step_is_a_sign_of_life():
    detector, now_s = trained(*[0.5] * 5)
    busy = beat(6, now_s + 50, stepped_s=now_s)
    assert judge(detector, now_s + 100, rank0=busy) is None


def test_no_heartbeats_give_no_verdict():
    assert judge(HangDetector(SilenceLimits(START_LIMIT_S)), START_S + 1e6) is None


def test_going_back_to_an_older_step_teaches_nothing():
    detector, now_s = trained(*[10.0] * 3)
    judge(detector, now_s + 5, rank0=beat(1, now_s + 5))
    assert detector.limit_s == 100.0


@given(st.lists(st.floats(0.01, 59.0), min_size=1, max_size=80))
def test_steps_that_advance_are_never_taken_for_a_hang(steps_s):
    detector, now_s = trained()
    step, reading = 1, beat(1, now_s)
    for step_s in steps_s:
        # Seen twice: just before the step ends, and after it.
        assert judge(detector, now_s + step_s, rank0=reading) is None
        now_s, step = now_s + step_s, step + 1
        reading = beat(step, now_s)
        assert judge(detector, now_s, rank0=reading) is None


def test_a_rank_that_never_wrote_a_heartbeat_is_a_hang_after_the_start_limit():
    detector = HangDetector(SilenceLimits(START_LIMIT_S))
    soon_s, late_s = START_S + START_LIMIT_S - 1, START_S + START_LIMIT_S + 1
    assert detector.judge({}, mute={1: START_S}, now_s=soon_s, since_s=START_S) is None
    verdict = not_none(detector.judge({}, mute={1: START_S}, now_s=late_s, since_s=START_S))
    assert (verdict.local_rank, verdict.phase, verdict.step) == (1, Phase.START, -1)


# A process that is stopped by a signal.


def stopped(detector: HangDetector, now_s: float, reading: Heartbeat | None) -> Hang | None:
    """The verdict about rank 1, which has been stopped since the processes were started."""
    beats = {} if reading is None else {1: reading}
    return detector.judge(beats, now_s=now_s, since_s=START_S, stopped={1: START_S})


@pytest.mark.parametrize(
    "reading",
    [
        None,
        *(
            beat(3, START_S, phase=phase, stepped_s=0.0)
            for phase in (Phase.START, Phase.RESTORE, Phase.RECOVER, Phase.SAVE, Phase.DONE)
        ),
    ],
    ids=["no heartbeat", "start", "restore", "recover", "save", "done"],
)
def test_a_stopped_process_hangs_as_soon_as_in_a_step_whatever_it_was_doing(reading):
    detector = HangDetector(SilenceLimits(START_LIMIT_S, save_s=9e9, restore_s=9e9))
    assert stopped(detector, START_S + MIN_LIMIT_S, reading) is None
    verdict = not_none(stopped(detector, START_S + MIN_LIMIT_S + 1, reading))
    assert (verdict.local_rank, verdict.limit_s) == (1, MIN_LIMIT_S)
    assert verdict.phase is (reading.phase if reading is not None else Phase.START)


@pytest.mark.parametrize(("fixed_s", "limit_s"), [(7.0, 7.0), (None, 100.0)])
def test_how_long_a_process_may_be_stopped_is_the_limit_of_a_step(fixed_s, limit_s):
    detector, now_s = trained(*[10.0] * 5, fixed_limit_s=fixed_s)
    reading = beat(6, now_s, phase=Phase.RECOVER)
    verdicts = [
        detector.judge({1: reading}, now_s=now_s + late_s, since_s=START_S, stopped={1: now_s})
        for late_s in (limit_s, limit_s + 1)
    ]
    assert verdicts[0] is None
    assert not_none(verdicts[1]).limit_s == limit_s


def test_a_stopped_process_in_a_pause_is_left_alone():
    assert stopped(HangDetector(SilenceLimits(5.0)), START_S + 1e6, beat(3, START_S,
                   phase=Phase.PAUSED)) is None  # fmt: skip


def test_a_hang_cannot_be_reported_where_none_is_looked_for():
    with pytest.raises(InputError, match=r"watch\.hang_action=alert needs restart\.hang=true"):
        small_job(watch={"hang_action": "alert"}, restart={"hang": False})
    assert small_job(watch={"hang_action": "alert"}).watch.hang_action is HangAction.ALERT
