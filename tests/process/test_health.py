"""Health points that really leave their limits: a slow rank, a starving loader, a full disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.drill import DrillFault, DrillKind
from perdure.training.drill.driver import LIMIT_S, RunDriver, RunOutcome
from perdure.training.journal.attempt_view import Alert
from perdure.training.journal.events import AlertKind
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.telemetry.alerts import LATENCY_HOLD_S
from tests.process.harness import REPO, faulty_job

pytestmark = [pytest.mark.process, pytest.mark.alone]

JUMP_STEP = 40
SAMPLES = REPO / "tests" / "unit" / "telemetry" / "samples"


def play(home: Path, name: str, *, limit_s: float = LIMIT_S, **changes: Any) -> RunOutcome:
    """A run of the faulty program, whose alerts alone are of interest."""
    job = faulty_job(home, name, **{"checkpoint": {"every_steps": 40}, **changes})
    played = RunDriver(home, limit_s).run(job)
    assert played.ended == "completed"
    return played


def alerts(played: RunOutcome, point: AlertKind) -> list[Alert]:
    """The alerts about one point."""
    found = [alert for view in played.history.attempts for alert in view.alerts]
    return [alert for alert in found if alert.began.point is point]


def rungs(played: RunOutcome) -> list[Rung]:
    """How the attempts that ended with a fault were answered."""
    return [view.decision.rung for view in played.history.attempts if view.decision is not None]


@pytest.fixture(scope="module")
def left(home) -> RunOutcome:
    """A run with a rank that gets slow, whose node the policy has it leave."""
    return play(
        home,
        "slow-rank",
        steps=170,
        faults="slow:3:20:0.15",
        env={"SLOW_NODE": "node-1"},
        watch={"isolate_fail_slow": True, "step_slow_for_s": 5},
        checkpoint={"every_steps": 10},
        restart={"pod_retries": 1, "node_replace": False},
    )


@pytest.mark.long
def test_a_rank_that_is_later_than_the_others_is_named(left):
    (alert,) = alerts(left, AlertKind.STRAGGLER)
    assert (alert.began.rank, alert.began.node) == (3, "node-1")
    assert alert.began.value > 0.3


@pytest.mark.long
def test_steps_that_take_longer_than_before_raise_an_alert(left):
    alert = alerts(left, AlertKind.STEP_SLOW)[0]
    assert alert.began.value > alert.began.limit
    assert alert.began.step is not None
    assert alert.began.step >= 20, "the rank was slow from then on"


@pytest.mark.long
def test_a_node_that_holds_the_others_up_is_left_after_the_next_checkpoint(left):
    (alert,) = alerts(left, AlertKind.STRAGGLER)
    first, second = left.history.attempts
    assert first.ended is not None
    assert first.decision is not None
    fault = first.ended.fault
    assert (fault.fault_class, fault.node, fault.rank) == (FaultClass.FAIL_SLOW, "node-1", 3)
    assert (first.decision.rung, first.decision.isolate) == (Rung.POD_RESCHEDULE, "node-1")
    commits = [c for c in left.history.checkpoints if (c.placement, c.attempt) == first.key]
    assert commits[-1].at_s > alert.began.at_s
    # Nothing is done again: the ranks saved when they were asked to end.
    assert second.from_step == first.ended.to_step
    assert "node-1" not in {member.node for member in second.members}


@pytest.mark.long
def test_a_node_that_holds_the_others_up_is_replaced_without_a_checkpoint(home):
    played = play(
        home,
        "slow-replaced",
        steps=170,
        faults="slow:3:20:0.15",
        env={"SLOW_NODE": "node-1"},
        watch={"isolate_fail_slow": True},
        checkpoint={"every_steps": 1000},
    )
    (view,) = played.history.attempts
    (recovery,) = view.recoveries
    fault = recovery.began.fault
    assert (fault.fault_class, fault.node, fault.rank) == (FaultClass.FAIL_SLOW, "node-1", 3)
    assert recovery.began.decision.rung is Rung.NODE_REPLACE
    assert recovery.ended is not None
    assert (recovery.succeeded, recovery.ended.steps_lost) == (True, 0)
    assert [(m.node, m.schedule_cnt) for m in view.members] == [("node-0", 1), ("node-2", 2)]
    assert played.history.isolated == ("node-1",)
    assert list(played.curve) == list(range(1, 171))


@pytest.mark.long
def test_a_rank_that_is_slow_wherever_it_runs_costs_one_node_at_most(home):
    played = play(
        home,
        "slow-anywhere",
        steps=190,
        faults="slow:3:20:0.15",
        watch={"isolate_fail_slow": True},
        checkpoint={"every_steps": 10},
    )
    assert len(alerts(played, AlertKind.STRAGGLER)) == 2
    (view,) = played.history.attempts
    assert [one.began.decision.rung for one in view.recoveries] == [Rung.NODE_REPLACE]


@pytest.mark.long
def test_a_rank_that_waits_for_its_data_is_named(home):
    played = play(home, "starving", steps=110, faults="starve:1:1:0.2")
    (alert,) = alerts(played, AlertKind.DATA_STARVED)
    assert (alert.began.rank, alert.began.node) == (1, "node-0")
    assert alert.began.value > 0.5


@contextmanager
def filled_disk(home: Path) -> Iterator[float]:
    """A limit, in percent of free space, that a file takes the disk half a percent beyond."""
    usage = shutil.disk_usage(home)
    filling = home / "filling"
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, usage.total // 100)
    yield 100.0 * usage.free / usage.total - 0.5
    filling.unlink()


@pytest.fixture(scope="module")
def unhealthy(home, tmp_path_factory) -> RunOutcome:
    """A run with devices in alarm, full, idle and without a link: stand-in tools report that.

    Its loss jumps in one step, no collective is as fast as its limit, and its disk fills to a
    percent beyond its limit.
    """
    folder = tmp_path_factory.mktemp("tools")
    tool = folder / "npu-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"info) sed 's|    0    / 32768|    32112/ 32768|' {SAMPLES}/npu-smi-info.txt ;;\n"
        f'*"-t health"*) cat {SAMPLES}/npu-smi-health-alarm.txt ;;\n'
        "esac\n"
    )
    of_ports = folder / "hccn_tool"
    of_ports.write_text('#!/bin/sh\necho "link status: DOWN"\n')
    for one in (tool, of_ports):
        one.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, filled_disk(home) as disk_limit_percent:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        jump = DrillFault(kind=DrillKind.GRADIENT, rank=1, step=JUMP_STEP)
        return play(
            home,
            "unhealthy-device",
            steps=60,
            # However fast the machine, a limit is exceeded for long enough.
            pace_s=2 * LATENCY_HOLD_S / 60,
            watch={
                "chip_events": "report",
                "sample_every_s": 0.5,
                "low_for_s": 2,
                "latency_high_ms": 0.001,
                "disk_free_low_percent": disk_limit_percent,
            },
            drill={"faults": [jump]},
        )


def test_a_device_that_its_driver_reports_unhealthy_raises_an_alert(unhealthy):
    found = alerts(unhealthy, AlertKind.DEVICE_UNHEALTHY)
    assert {alert.began.node for alert in found} == {"node-0", "node-1"}
    assert "Alarm, codes A4025021, 8C03A000, 8C084E00" in found[0].began.text


def test_a_disk_that_fills_raises_an_alert(unhealthy):
    found = alerts(unhealthy, AlertKind.DISK_FILLING)
    assert {alert.began.node for alert in found} == {"node-0", "node-1"}
    assert all(alert.began.value < alert.began.limit for alert in found)


def test_a_port_without_a_link_raises_an_alert(unhealthy):
    found = alerts(unhealthy, AlertKind.LINK_DOWN)
    assert {alert.began.node for alert in found} == {"node-0", "node-1"}


def test_a_device_whose_memory_is_nearly_full_raises_an_alert(unhealthy):
    found = alerts(unhealthy, AlertKind.MEMORY_HIGH)
    assert {alert.began.node for alert in found} == {"node-0", "node-1"}
    assert {round(alert.began.value) for alert in found} == {98}


def test_a_device_that_is_hardly_used_while_ranks_train_raises_an_alert_after_a_while(unhealthy):
    found = alerts(unhealthy, AlertKind.UTILISATION_LOW)
    assert {alert.began.node for alert in found} == {"node-0", "node-1"}
    began_s = unhealthy.history.attempts[0].started.at_s
    assert min(alert.began.at_s for alert in found) - began_s >= 2


def test_a_collective_over_its_limit_raises_an_alert(unhealthy):
    (alert,) = alerts(unhealthy, AlertKind.LATENCY_HIGH)
    assert alert.began.value > alert.began.limit == 0.001


def test_a_loss_that_jumps_raises_an_alert_with_its_step(unhealthy):
    assert len(unhealthy.fired_s[0]) == 1
    (alert,) = alerts(unhealthy, AlertKind.LOSS_ABNORMAL)
    assert alert.began.step == JUMP_STEP
    assert alert.began.value > 2 * unhealthy.curve[JUMP_STEP - 1][0]


@pytest.mark.long
def test_a_checkpoint_that_gets_old_raises_an_alert(home):
    played = play(
        home,
        "old-checkpoint",
        steps=60,
        faults="pause:1:40:75",
        restart={"hang_timeout_s": 200},
        checkpoint={"every_steps": 5},
    )
    (alert,) = alerts(played, AlertKind.CHECKPOINT_OLD)
    assert 60 < alert.began.value < 75


@pytest.mark.long
def test_a_healthy_run_raises_no_alert(home):
    # How long that is may be chosen: 7500 steps take twelve minutes on two cores (make soak).
    steps = int(os.environ.get("PERDURE_HEALTHY_STEPS", "150"))
    played = play(home, "healthy", steps=steps, limit_s=max(LIMIT_S, 0.2 * steps))
    assert [alert for view in played.history.attempts for alert in view.alerts] == []
