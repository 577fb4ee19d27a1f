"""The codes that the chip watch takes from the samples of the nodes and from the platform."""

from __future__ import annotations

from perdure.training.recovery.chip_events import ChipEvents, ChipReport
from perdure.training.recovery.chips import ChipLevel
from perdure.training.supervisor.chip_watch import node_reports
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.node import ChipCode, DeviceSample, NodeSample


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
