"""What a report of devices comes to, and which drills devices leave out."""

from __future__ import annotations

import pytest

from perdure.training.drill.device_report import DeviceReport
from perdure.training.drill.evaluation import DrillOutcome
from perdure.training.drill.runner import find_obstacle, select_runnable
from perdure.training.drill.table import DRILLS
from perdure.training.errors import InputError
from perdure.training.wire.node import Check, CheckOutcome

FINE = DeviceReport(perdure="1", machine="Linux", versions=(), trials=())
BY_NAME = {drill.name: drill for drill in DRILLS}


@pytest.mark.parametrize(
    ("outcome", "is_fine"),
    [(CheckOutcome.OK, True), (CheckOutcome.WARNING, True), (CheckOutcome.FAILED, False)],
)
def test_a_report_is_fine_unless_a_check_failed(outcome, is_fine):
    check = Check(name="versions", outcome=outcome, seen="seen")
    assert FINE.model_copy(update={"versions": (check,)}).is_fine is is_fine


def test_a_drill_that_did_not_go_as_expected_is_in_the_report_with_its_problems():
    good = DrillOutcome("pause", "ddp", "a pause")
    bad = DrillOutcome("hang", "ddp", "a stop", problems=("it never ended",))
    assert FINE.with_drills([good], {}).is_fine
    report = FINE.with_drills([good, bad], {"link-broken": "gloo"})
    assert not report.is_fine
    assert report.drills[1]["problems"] == ("it never ended",)
    assert report.left_out == {"link-broken": "gloo"}


def test_devices_leave_out_what_breaks_connections_of_gloo():
    for name in ("operator-retry", "link-broken"):
        assert "gloo" in find_obstacle(BY_NAME[name], None, num_devices=8)
        assert find_obstacle(BY_NAME[name], None) == "", "on the CPU they are gloo's"
    assert find_obstacle(BY_NAME["replace-rank"], None, num_devices=8) == ""


def test_fewer_devices_than_ranks_leave_all_out():
    with pytest.raises(InputError, match="4 ranks, and this machine 2 devices"):
        select_runnable(DRILLS[1:2], None, num_devices=2)
