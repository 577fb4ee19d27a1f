"""A chip's report and a stall in the same window are one fault: the chip's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.diagnosis import scan
from perdure.training.diagnosis.chip_reports import fault_of_report
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, NodeOutput, SilentRank, WorkerEnd
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.chips import ChipLevel, _facts
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp

MEMORY = FaultClass.DEVICE_MEMORY_ERROR
ENDED_S, SILENT_S = 1000.0, 120.0
STALL = SilentRank(2, "node-0", SILENT_S, 100.0, "step")
STALL_OF_COMMAND = replace(STALL, rank=None, phase="command")
CHIP = Fault(
    MEMORY, ENDED_S - SILENT_S + 5, "fault_code: 80E01801", node="node-1", device=1, code="80E01801"
)


def at_end(code: str, *, device: int | None = 1, name: str = "npu-smi") -> NodeOutput:
    """What the driver's tool says once the processes have ended."""
    text = f"Health Status : Alarm\nError Code : {code}\n"
    return NodeOutput("node-1", name, text, device=device)


@pytest.mark.parametrize("stall", [STALL, STALL_OF_COMMAND], ids=["session", "command"])
@pytest.mark.parametrize("before_s", [5.0, -5.0, -50.0], ids=["during", "at", "shortly before"])
def test_a_stall_that_began_with_a_chips_code_is_the_chips(stall, before_s):
    chip = replace(CHIP, at_s=ENDED_S - SILENT_S + before_s)
    found = diagnose(Evidence(ENDED_S, 30, silent=(stall,), chips=(chip,)))
    assert found.fault == chip
    assert [fault.fault_class for fault in found.runners_up] == [FaultClass.HANG]


@pytest.mark.parametrize("code", ["80E01801", "80E18402", "8C084E00", "80C98008"])
def test_a_stall_is_the_chips_whose_code_shows_only_at_the_end(code):
    found = diagnose(Evidence(ENDED_S, 30, silent=(STALL,), outputs=(at_end(code),)))
    assert (found.fault.code, found.fault.node, found.fault.device) == (code, "node-1", 1)
    assert found.fault.fault_class is not FaultClass.HANG
    assert found.fault.step == 30


@pytest.mark.parametrize("outputs", [(), (at_end("80E01801"),)], ids=["", "still there"])
def test_a_code_that_training_outlived_is_not_why_it_stalls(outputs):
    old = replace(CHIP, at_s=ENDED_S - SILENT_S - 100)
    evidence = Evidence(ENDED_S, 30, silent=(STALL,), chips=(old,), outputs=outputs)
    assert diagnose(evidence).fault.fault_class is FaultClass.HANG


@pytest.mark.parametrize("code", ["80E18401", "80818200"])
def test_a_code_that_asks_for_nothing_is_not_why_training_stalls(code):
    evidence = Evidence(ENDED_S, 30, silent=(STALL,), outputs=(at_end(code),))
    assert diagnose(evidence).fault.fault_class is FaultClass.HANG


def test_a_crash_is_not_the_chips_that_reported_a_code_before_it():
    crash = WorkerEnd(0, "node-0", 0, -11, ENDED_S - 1)
    evidence = Evidence(ENDED_S, 30, workers=(crash,), chips=(CHIP,))
    assert diagnose(evidence).fault.fault_class is FaultClass.NATIVE_CRASH


def test_an_end_for_a_chip_is_the_chips():
    stopped = WorkerEnd(0, "node-0", 0, -15, ENDED_S, stopped=True)
    evidence = Evidence(ENDED_S, 30, workers=(stopped,), chip=CHIP, chips=(CHIP,))
    assert diagnose(evidence).fault == CHIP


@pytest.mark.parametrize("code", ["80E01801", "80E18404", "80E18402", "8C084E00"])
@pytest.mark.parametrize("rank", [0, 3, None])
def test_an_end_that_the_coordinator_ordered_for_a_chip_keeps_its_rank_and_its_time(code, rank):
    """The code is still there when the driver's tool is asked once more."""
    chip = replace(CHIP, code=code, rank=rank, evidence=f"npu-smi reports {code}")
    given_up = AttemptGivenUp(at_s=ENDED_S - 1, number=1, fault=chip, why="in_place_restart")
    stopped = WorkerEnd(3, "node-1", 1, -15, ENDED_S, stopped=True)
    evidence = Evidence(
        ENDED_S,
        30,
        workers=(stopped,),
        chips=(chip,),
        given_up=given_up,
        outputs=(at_end(code),),
    )
    assert diagnose(evidence).fault == chip


REPORTS = [ChipReport("node-1", 1, fact.code) for fact in _facts().values()]
ACTING = [report for report in REPORTS if report.acts_at_once and len(report.code) == 8]


def test_a_report_shows_what_the_same_line_in_a_log_would():
    assert len(ACTING) > 200
    for report in ACTING:
        line = f"device 1: fault_code: {report.code}"
        output = NodeOutput("node-1", "npu-smi", line, device=1)
        fault = diagnose(Evidence(ENDED_S, 30, outputs=(output,))).fault
        evidence = f"npu-smi reports {line}"
        assert fault_of_report(report, at_s=ENDED_S, step=30) == replace(fault, evidence=evidence)


@pytest.mark.parametrize("code", ["80E18402", "80E18404", "DEADBEEF"])
def test_a_report_waits_for_no_compiled_pattern(code, monkeypatch):
    monkeypatch.delattr(scan, "wait_for_database")
    report = ChipReport("node-1", 1, code, ChipLevel.SEPARATE, "MindCluster")
    fault = fault_of_report(report, at_s=ENDED_S, step=30)
    assert (fault.node, fault.device, fault.code, fault.step) == ("node-1", 1, code, 30)
    assert fault.evidence == f"MindCluster reports device 1: fault_code: {code}, level separate"
