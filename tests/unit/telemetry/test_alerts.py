"""When a run that makes progress raises an alert."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.watch import WatchSpec
from perdure.training.journal.events import AlertKind, StepRecord
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.telemetry import alerts
from perdure.training.telemetry.alerts import (
    CLEAR_S,
    AlertCondition,
    AlertMonitor,
    RunSample,
)
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample
from perdure.training.wire.rank_snapshot import RankSnapshot

SPEC = WatchSpec()


def device(**readings: Any) -> dict[str, NodeSample]:
    """What one node shows, whose only device is like this."""
    return {"node-0": NodeSample(at_s=0.0, devices=(DeviceSample(index=0, **readings),))}


def host(**readings: Any) -> dict[str, NodeSample]:
    return {"node-0": NodeSample(at_s=0.0, host=HostSample(**readings))}


def rank(number: int, **changes: Any) -> RankSnapshot:
    fields: dict[str, Any] = {
        "rank": number,
        "node": f"node-{number // 2}",
        "device": number % 2,
        "pid": 100 + number,
        "step": 0,
        "phase": "step",
        "waited_s": 0.0,
        "data_s": 0.0,
        "latency_s": 0.001,
    }
    return RankSnapshot(**{**fields, **changes})


def raised(
    look_at: Callable[[float], RunSample], *, until_s: float, spec: WatchSpec = SPEC
) -> list[tuple[float, AlertCondition]]:
    """All changes of a run in these states, one look a second."""
    watch, at_s = AlertMonitor(spec), 0.0
    conditions: list[tuple[float, AlertCondition]] = []
    while at_s <= until_s:
        conditions += [(at_s, condition) for condition in watch.update(look_at(at_s)).raised]
        at_s += 1.0
    return conditions


def points(conditions: Sequence[tuple[float, AlertCondition]]) -> list[AlertKind]:
    return [condition.point for _, condition in conditions]


def test_a_device_that_is_hardly_used_raises_an_alert_after_five_minutes_of_training():
    nodes = device(utilisation_percent=30.0)
    conditions = raised(lambda s: RunSample(s, nodes, [rank(0)]), until_s=400)
    assert [(at_s, condition.point, condition.value) for at_s, condition in conditions] == [
        (300.0, AlertKind.UTILISATION_LOW, 30.0)
    ]


@pytest.mark.parametrize(
    ("seen", "point"),
    [
        ({"memory_percent": 95.5}, AlertKind.MEMORY_HIGH),
        ({"health": "Alarm", "error_codes": ("80E01801",)}, AlertKind.DEVICE_UNHEALTHY),
        ({"link_is_up": False}, AlertKind.LINK_DOWN),
        ({"link_is_up": False, "health": "OK"}, AlertKind.LINK_DOWN),
    ],
)
def test_an_error_of_a_device_is_reported_at_once(seen, point):
    conditions = raised(lambda s: RunSample(s, device(**seen)), until_s=100)
    assert points(conditions) == [point]
    assert (conditions[0][1].node, conditions[0][1].device) == ("node-0", 0)


def test_what_the_platform_reports_of_a_chip_is_one_alert_with_what_its_driver_reports():
    report = ChipReport("node-0", 0, "80E01801", reporter="MindCluster")
    ill = device(health="Alarm", error_codes=("80E01801",))
    for nodes in ({}, ill):
        sample = partial(RunSample, nodes=nodes, reports=[report])
        conditions = raised(sample, until_s=9)
        assert points(conditions) == [AlertKind.DEVICE_UNHEALTHY]
        assert "80E01801" in conditions[0][1].text


def test_a_device_that_is_ill_is_reported_even_when_its_port_is_down():
    conditions = raised(
        lambda s: RunSample(s, device(health="Alarm", link_is_up=False)), until_s=100
    )
    assert set(points(conditions)) == {AlertKind.DEVICE_UNHEALTHY, AlertKind.LINK_DOWN}


@pytest.mark.parametrize(
    ("values", "phase"),
    [
        ({"utilisation_percent": 0.0}, "save"),
        ({"utilisation_percent": 90.0, "memory_percent": 94.0, "health": "OK",
          "link_is_up": True}, "step"),
        ({}, "step"),
    ],
    ids=["idle while the run saves", "inside its limits", "measured by no tool"],
)  # fmt: skip
def test_a_device_inside_its_limits_raises_no_alert(values, phase):
    conditions = raised(
        lambda s: RunSample(s, device(**values), [rank(0, phase=phase)]), until_s=1000
    )
    assert conditions == []


def test_a_filling_disk_raises_an_alert():
    conditions = raised(lambda s: RunSample(s, host(disk_free_percent=100.0 - s)), until_s=99)
    assert [(at_s, condition.point) for at_s, condition in conditions] == [
        (91.0, AlertKind.DISK_FILLING)
    ]


def test_a_point_is_cleared_after_it_was_inside_its_limits_for_a_while_and_may_come_again():
    watch = AlertMonitor(SPEC)
    full, free = host(disk_free_percent=1.0), host(disk_free_percent=50.0)
    assert points([(0, condition) for condition in watch.update(RunSample(0.0, full)).raised])
    assert watch.update(RunSample(1.0, free)).cleared == ()
    assert watch.update(RunSample(2.0, full)).raised == ()
    (key,) = watch.update(RunSample(3.0 + CLEAR_S, free)).cleared
    assert key[0] is AlertKind.DISK_FILLING
    assert watch.update(RunSample(100.0, full)).raised != ()


def steps(losses: Sequence[float] = (), times: Sequence[float] = ()) -> list[AlertKind]:
    """The changes of steps with these losses or durations."""
    watch = AlertMonitor(SPEC)
    conditions: list[AlertCondition] = []
    for number, value in enumerate(losses or times, start=1):
        loss, step_s = value if losses else 1.0, value if times else 1.0
        condition = StepRecord(number, loss, 1.0, 1e-3, 1.0, None, 0.0, step_s, 0, 0, 1, 1)
        conditions += watch.update(RunSample(float(number), steps=(condition,))).raised
    return [condition.point for condition in conditions]


WAVERING = [0.05, 0.2, 0.1, 0.07, 0.22, 0.12] * 10  # of a run that knows its text by heart


@pytest.mark.parametrize(
    ("losses", "is_abnormal"),
    [
        ([3.0] * 20 + [6.5], True),
        ([float("nan")], True),
        ([float("inf")], True),
        ([*WAVERING, 0.29], False),
        ([*WAVERING, 1.5], True),
        ([10.0 / (1 + n / 10) + n % 3 for n in range(100)], False),
    ],
    ids=["jumps", "nan from the first step on", "inf from the first step on",
         "small and wavers by more than its mean", "small and jumps", "falls and wavers"],
)  # fmt: skip
def test_a_loss_that_jumps_or_is_no_number_raises_an_alert(losses, is_abnormal):
    assert steps(losses=losses) == [AlertKind.LOSS_ABNORMAL] * is_abnormal


@pytest.mark.parametrize(
    ("times", "is_slow"),
    [
        ([1.0] * 30 + [9.0] + [1.0] * 30, False),
        ([1.0] * 30 + [2.6] * 15, False),
        ([1.0] * 30 + [2.6] * 25, True),
        ([30.0] * 30 + [70.0] * 2, False),
        ([30.0] * 30 + [70.0] * 5, True),
        ([0.1] * 300 + [0.5] * 50 + [0.1] * 300, False),  # many short steps of one slow moment
        ([0.1] * 300 + [0.5] * 130, True),
        ([30.0] + [1.0] * 60, False),  # a slow start is no standard of comparison
    ],
)
def test_steps_that_get_slow_raise_an_alert_and_one_slow_moment_does_not(times, is_slow):
    assert steps(times=times) == [AlertKind.STEP_SLOW] * is_slow


def test_the_latency_is_that_of_the_rank_that_came_last():
    slow = [rank(0, latency_s=9.0), rank(1, latency_s=0.1)]
    assert raised(lambda s: RunSample(s, ranks=slow), until_s=10) == []
    all_slow = [rank(0, latency_s=9.0), rank(1, latency_s=0.6)]
    conditions = raised(lambda s: RunSample(s, ranks=all_slow), until_s=10)
    assert points(conditions) == [AlertKind.LATENCY_HIGH]
    assert conditions[0][1].value == pytest.approx(600.0)


def gang(at_s: float, *, late: int | None = None, starved: int | None = None) -> RunSample:
    """Four ranks with two steps a second; who waits for a late one waits half of the time."""
    ranks = [
        rank(
            number,
            step=int(2 * at_s),
            waited_s=at_s * (0.55 if late is not None and number != late else 0.05),
            data_s=at_s * (0.6 if number == starved else 0.01),
        )
        for number in range(4)
    ]
    return RunSample(at_s, ranks=ranks)


def test_a_rank_that_is_always_later_than_the_others_raises_an_alert():
    conditions = raised(lambda s: gang(s, late=2), until_s=60)
    assert points(conditions) == [AlertKind.STRAGGLER]
    condition = conditions[0][1]
    assert (condition.rank, condition.node) == (2, "node-1")
    assert condition.value == pytest.approx(0.5)


def test_ranks_that_wait_alike_have_no_straggler():
    assert raised(gang, until_s=600) == []


def test_a_rank_that_is_late_for_a_moment_is_no_straggler():
    def look(at_s: float) -> RunSample:
        return gang(at_s, late=int(at_s / 6) % 4)

    assert AlertKind.STRAGGLER not in points(raised(look, until_s=300))


def test_a_starving_rank_raises_an_alert():
    conditions = raised(lambda s: gang(s, starved=1), until_s=60)
    assert points(conditions) == [AlertKind.DATA_STARVED]
    assert conditions[0][1].rank == 1


def test_new_processes_are_not_compared_with_those_before_them():
    def look(at_s: float) -> RunSample:
        condition = gang(at_s, late=2)
        life = int(at_s / 10)  # which is shorter than three windows
        return RunSample(at_s, ranks=_renewed(condition.ranks, life))

    assert raised(look, until_s=100) == []


def _renewed(ranks: Sequence[RankSnapshot], life: int) -> list[RankSnapshot]:
    return [replace(sample, pid=sample.pid + 1000 * life) for sample in ranks]


def test_a_checkpoint_that_is_much_older_than_usual_raises_an_alert():
    commits_s = [0.0, 100.0, 200.0, 300.0]
    conditions = raised(lambda s: RunSample(300.0 + s, commits_s=commits_s), until_s=400)
    assert [(at_s, condition.point) for at_s, condition in conditions] == [
        (301.0, AlertKind.CHECKPOINT_OLD)
    ]


def test_frequent_checkpoints_may_be_a_minute_old():
    commits_s = [0.0, 1.0, 2.0]
    conditions = raised(lambda s: RunSample(2.0 + s, commits_s=commits_s), until_s=60)
    assert conditions == []


def test_one_commit_is_no_interval():
    assert raised(lambda s: RunSample(s, commits_s=[0.0]), until_s=10_000) == []


def test_a_hang_is_raised_at_once_and_over_soon_after_whichever_rank_reports_it():
    def hang(number: int) -> AlertCondition:
        return AlertCondition(AlertKind.HANG, "silent", 70.0, 60.0, node="node-0", rank=number)

    watch = AlertMonitor(SPEC)
    assert watch.update(RunSample(0.0, hang=hang(1))).raised == (hang(1),)
    assert watch.update(RunSample(1.0, hang=hang(0))).raised == ()
    assert watch.update(RunSample(3.0)).cleared == ()
    assert watch.update(RunSample(5.0)).cleared == ((AlertKind.HANG, None, None),)


def test_every_kind_of_alert_has_a_condition_and_a_row_on_the_page():
    source = Path(alerts.__file__).read_text(encoding="utf-8")
    without = [kind.name for kind in AlertKind if f"AlertKind.{kind.name}" not in source]
    assert not without, "training/telemetry/alerts.py: each kind of alert needs a condition"
    page = (Path(__file__).parents[3] / "docs" / "watching.md").read_text(encoding="utf-8")
    subjects = "".join(re.findall(r"^\|([^|]*)\|", page, flags=re.MULTILINE))
    unlisted = [kind for kind in AlertKind if f"`{kind}`" not in subjects]
    assert not unlisted, "docs/watching.md: the table of alerts needs a row for each kind"
