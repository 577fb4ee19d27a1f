"""The codes that the chip watch takes from the samples of the nodes and from the platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perdure.training.engines.base import Snapshot
from perdure.training.recovery.chip_events import ChipEvents, ChipReport
from perdure.training.recovery.chips import ChipLevel
from perdure.training.supervisor import chip_watch
from perdure.training.supervisor.chip_watch import ChipWatch, node_reports
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.node import ChipCode, DeviceSample, NodeSample
from tests.jobs import small_job


def status(*devices: DeviceSample, at_s: float = 100.0) -> AgentStatus:
    return AgentStatus(
        node="n1", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, sample=NodeSample(at_s=at_s, devices=devices),
    )  # fmt: skip


def test_a_code_in_reset_json_acts_by_the_level_that_the_platform_gives_it():
    device = DeviceSample(
        index=3,
        error_codes=("80E01809",),
        platform_codes=(ChipCode(code="DEADBEEF", level=ChipLevel.SEPARATE),),
    )
    nodes = node_reports([status(device)], [])
    assert nodes["n1"].reports == (
        ChipReport("n1", 3, "80E01809"),
        ChipReport("n1", 3, "DEADBEEF", ChipLevel.SEPARATE, reporter="reset.json"),
    )
    events = ChipEvents().update(nodes, [], now_s=101.0)
    assert [event.report.code for event in events] == ["DEADBEEF"]


def test_a_code_that_two_reporters_have_is_one_event():
    device = DeviceSample(
        index=0, error_codes=("80E18402",), platform_codes=(ChipCode(code="80E18402"),)
    )
    nodes = node_reports([status(device)], [ChipReport("n1", 0, "80E18402", ChipLevel.SEPARATE)])
    assert len(ChipEvents().update(nodes, [], now_s=101.0)) == 1


class Notices:
    """What a chip watch needs of an attempt, with the notices that it sends."""

    def __init__(self, folder) -> None:
        self.sent: list[Any] = []
        self.job = small_job(folder, engine={"nodes": 1, "slots_per_node": 1})
        history = SimpleNamespace(attempts=[], budgets_from=0)
        self.view = SimpleNamespace(recoveries=(), key=(1, 1), started=SimpleNamespace(at_s=0.0))
        self.writer = SimpleNamespace(history=history, now=lambda view: view)
        self.fleet = SimpleNamespace(notice=self.sent.append, chip_reports=lambda _since_s: ())

    def has_room(self, *, is_sure: bool) -> bool:
        return not is_sure


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_a_chip_whose_node_misses_polls_is_still_reported_until_it_is_answered(
    tmp_path, monkeypatch, missed
):
    monkeypatch.setattr(chip_watch, "ANSWER_S", -1.0)  # again at every poll
    attempt: Any = Notices(tmp_path)
    watch = ChipWatch(attempt, attempt)
    ill = status(DeviceSample(index=0, error_codes=("80E18402",)))
    present, absent = Snapshot({0: ill}), Snapshot()
    progress = Progress()
    for number, snapshot in enumerate([present, *[absent] * missed, present]):
        progress.take_snapshot(snapshot, at_s=101.0 + number)
        assert watch.check(progress) is None
    assert [order.message.fault.code for order in attempt.sent] == ["80E18402"] * 2
