"""Starts that are silent on all nodes: ended, or only reported."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.diagnosis.evidence import SilentRank
from perdure.training.engines.base import Snapshot
from perdure.training.journal.events import AlertKind
from perdure.training.liveness.start_patience import StartPatience
from perdure.training.supervisor.stall_check import StallCheck
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent_status import AgentState, AgentStatus, HangReport
from tests.jobs import small_job
from tests.values import not_none

PATIENT = StartPatience(4.0, ends_slow_start=False)


def hang(**changes: Any) -> HangReport:
    fields: dict[str, Any] = {
        "rank": None, "silent_s": 130.0, "limit_s": 120.0, "phase": "command", "step": -1,
        "ends_attempt": False, "field": "watch.command_quiet_s", "is_slow_start": True,
        "is_busy": True,
    }  # fmt: skip
    return HangReport(**{**fields, **changes})


def progress_of(*hangs: HangReport | None) -> Progress:
    agents = {
        member: AgentStatus(
            node=f"node-{member}", member=member, state=AgentState.RUNNING, schedule_cnt=1,
            proc_start_cnt=1, placement=1, attempt=3, is_command=True, is_launcher=True,
            hang=report,
        )
        for member, report in enumerate(hangs)
    }  # fmt: skip
    return Progress(snapshot=Snapshot(agents), at_s=1000.0)


def check_of(**watch: Any) -> StallCheck:
    job = small_job(worker={"command": ["true"]}, watch=watch)
    return StallCheck(job, 0.0, PATIENT)


@pytest.mark.parametrize(
    ("hangs", "is_ended"),
    [
        ([hang()], False),
        ([hang(is_busy=False)], True),
        ([hang(is_busy=None)], True),
        ([hang(is_busy=False), hang()], False),
        ([hang(is_busy=False), None], False),
        ([hang(is_busy=False), hang(is_busy=False)], True),
        ([None], False),
    ],
    ids=["computes", "idle", "not known", "another node computes", "another node makes progress",
         "all are idle", "no hang"],
)  # fmt: skip
def test_a_third_slow_start_is_ended_only_if_no_node_computes(hangs, is_ended):
    result = check_of().check(progress_of(*hangs))
    assert (result is not None) is is_ended
    if result is not None:
        assert isinstance(result.culprit, SilentRank)
        assert result.culprit.is_slow_start


def test_a_slow_start_that_is_not_ended_raises_the_alert():
    alert = not_none(check_of().hang_of(progress_of(hang())))
    assert alert.point is AlertKind.HANG
    assert "watch.command_quiet_s" in alert.text
    assert check_of().hang_of(progress_of(None)) is None


@pytest.mark.parametrize(("patience", "is_ended"), [(PATIENT, False), (StartPatience(4.0), True)])
def test_silent_output_before_a_step_has_the_time_of_the_start(monkeypatch, patience, is_ended):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    job = small_job(worker={"command": ["true"]}, watch={"output_quiet_s": 10})
    check = StallCheck(job, 0.0, patience)
    for now[0] in (0.0, 39.0):
        assert check.check(progress_of(None)) is None, "four times the limit"
    now[0] = 41.0
    result = check.check(progress_of(None))
    assert (result is not None) is is_ended
    alert = check.hang_of(progress_of(None))
    assert (alert is None) is is_ended
