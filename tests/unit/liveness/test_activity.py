"""When a program without a heartbeat hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.training.liveness.hang_limits import (
    ActivityDetector,
    Inactivity,
    ProcessorUse,
    ProgramActivity,
)
from tests.values import not_none

QUIET_S = 600.0
PERIOD_S = 10.0


def judged(
    until_s: float,
    *,
    log: Callable[[float], int] = lambda _at_s: 0,
    io: Callable[[float], int] = lambda _at_s: 0,
    cpu_s: Callable[[float], float] = lambda _at_s: 0.0,
    use: Callable[[float], float | None] = lambda _at_s: None,
) -> tuple[float, Inactivity] | None:
    """When a program that does this is judged to hang, and how; None when it never is."""
    detector = ActivityDetector(QUIET_S)
    at_s = 0.0
    while at_s <= until_s:
        inactivity = detector.judge(
            ProgramActivity(at_s, log(at_s), io(at_s), cpu_s(at_s), use(at_s))
        )
        if inactivity is not None:
            return at_s, inactivity
        at_s += PERIOD_S
    return None


def test_silence_with_idle_processors_is_a_hang_after_the_quiet_time():
    inactivity = judged(1000.0)
    assert inactivity == (QUIET_S + PERIOD_S, Inactivity(QUIET_S + PERIOD_S, 0.0))


def test_processes_that_wait_by_spinning_are_a_hang_as_well():
    inactivity = not_none(judged(1000.0, cpu_s=lambda at_s: 8.0 * at_s))
    assert inactivity[1].cores == 8.0


def test_the_quiet_time_begins_with_the_last_sign_of_life():
    inactivity = not_none(judged(5000.0, log=lambda at_s: min(int(at_s), 1000)))
    assert inactivity[0] == 1000.0 + QUIET_S + PERIOD_S


@pytest.mark.parametrize(
    "signs",
    [
        {"log": lambda at_s: int(at_s / 500.0)},
        {"io": lambda at_s: int(at_s / 590.0)},
        {"cpu_s": lambda at_s: at_s + (at_s % 50.0 < 20.0) * 5.0},
        {"use": lambda at_s: 90.0 if at_s % 40.0 < 20.0 else 30.0},
    ],
    ids=["output", "input and output of the processes", "uneven processors", "uneven devices"],
)
def test_output_and_uneven_use_are_signs_of_life(signs):
    assert judged(5000.0, **signs) is None


def test_devices_that_are_used_evenly_are_no_sign_of_life():
    assert judged(5000.0, use=lambda _at_s: 100.0) is not None


def test_a_first_reading_proves_nothing():
    assert ActivityDetector(0.001).judge(ProgramActivity(1e6, 5, 5, 5.0)) is None


@pytest.mark.parametrize(
    ("use", "is_busy"),
    [
        (ProcessorUse(1.0, 0.0, 64.0), True),
        (ProcessorUse(0.02, 0.01, 64.0), False),
        (ProcessorUse(0.15, 0.8, 2.0), True),
        (ProcessorUse(0.24, 0.0, 0.25), True),
        (ProcessorUse(0.05, 0.0, 0.25), False),
        (ProcessorUse(7.9, 0.0, 8.0), True),
    ],
    ids=["a thread on a large node", "a program that sleeps", "a node with other work",
         "a quota of a quarter", "idle with a quota", "all processors"],
)  # fmt: skip
def test_processors_are_busy_by_what_the_node_could_give(use, is_busy):
    assert use.is_busy is is_busy
    assert f"processors were {'busy' if is_busy else 'idle'}, {use.cores:.2f} of" in use.text
    assert ("the node gave no more" in use.text) is (is_busy and use.waited > use.cores)


def test_the_time_that_threads_waited_for_a_processor_is_measured_over_the_newest_readings():
    detector, inactivity = ActivityDetector(QUIET_S), None
    for at_s in range(0, 700, 10):
        waited_s = max(0.0, 0.75 * (at_s - 300))
        reading = ProgramActivity(at_s, 0, 0, 0.2 * at_s, waited_s=waited_s)
        inactivity = inactivity or detector.judge(reading)
    assert not_none(inactivity).waited == pytest.approx(0.75)
