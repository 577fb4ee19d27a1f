"""Which reports of chips are new events that ask to act."""

from __future__ import annotations

import pytest

from perdure.training.recovery.chip_events import ChipEvents, ChipReport, NodeReports, chip_key
from perdure.training.recovery.chips import ACTS_AT_ONCE, BY_LEVEL, ChipAnswer, ChipLevel
from perdure.training.recovery.faults import Fault, FaultClass

HBM = ChipReport("node-1", 0, "80E01801")  # level restart_job


def seen(
    events: ChipEvents,
    at_s: float,
    *reports: ChipReport,
    is_complete: bool = True,
    faults=(),
    began: list[float] | None = None,
) -> list[str]:
    """The codes of the events that are new in a sample of node-1; their times go into `began`."""
    sample = NodeReports(at_s, reports, is_complete=is_complete)
    new = events.update({"node-1": sample}, faults, now_s=at_s)
    if began is not None:
        began += [event.since_s for event in new]
    return [event.report.code for event in new]


@pytest.mark.parametrize(
    ("code", "acts"),
    [
        ("80C98000", True),  # restart_request
        ("80E01801", True),  # restart_job
        ("8C084E00", True),  # reset_when_idle
        ("80E18404", True),  # reset_now
        ("80E18402", True),  # separate
        ("80E18401", False),  # not_handled
        ("81078605", False),  # sub_healthy
        ("8118043C", False),  # no_new_jobs
        ("80FFFFFF", False),  # in no table
    ],
)
def test_a_code_acts_where_its_level_asks_for_it(code, acts):
    assert ChipReport("node-1", 0, code).acts_at_once is acts
    assert seen(ChipEvents(), 10.0, ChipReport("node-1", 0, code)) == [code] * acts


def test_every_level_says_whether_it_acts_and_none_acts_that_asks_for_nothing():
    assert list(ACTS_AT_ONCE) == list(ChipLevel)
    nothing = [level for level in ChipLevel if BY_LEVEL[level] is ChipAnswer.NOTHING]
    assert not any(ACTS_AT_ONCE[level] for level in nothing)


def test_the_level_of_the_reporter_comes_before_that_of_the_tables():
    assert ChipReport("node-1", 0, "80E18401", ChipLevel.SEPARATE).acts_at_once
    assert not ChipReport("node-1", 0, "80E18402", ChipLevel.NOT_HANDLED).acts_at_once


def test_a_code_that_stays_flickers_or_has_two_reporters_is_one_event():
    events = ChipEvents()
    began: list[float] = []
    other = ChipReport("node-1", 0, HBM.code, ChipLevel.RESTART_JOB, reporter="MindCluster")
    assert seen(events, 10.0, began=began) == []
    assert seen(events, 20.0, other, HBM, began=began) == [HBM.code]
    assert seen(events, 30.0, HBM, began=began) == []
    assert seen(events, 40.0, began=began) == []
    assert seen(events, 50.0, other, began=began) == [], "gone for less than the limit"
    assert seen(events, 60.0, began=began) == []
    assert seen(events, 100.0, HBM, began=began) == [HBM.code], "gone for longer"
    assert began == [20.0, 100.0]


def test_a_tool_that_gives_no_answer_for_a_while_makes_no_code_new():
    events = ChipEvents()
    assert seen(events, 10.0, HBM) == [HBM.code]
    for at_s in (20.0, 60.0, 100.0):
        assert seen(events, at_s, is_complete=False) == []
    assert seen(events, 110.0, HBM) == []
    assert seen(events, 500.0, HBM) == [], "no sample in between"


def test_a_code_that_the_attempt_before_answered_is_not_new_behind_a_first_sample_without_answer():
    events = ChipEvents(answered={HBM.key})
    assert seen(events, 10.0, is_complete=False) == []
    assert seen(events, 20.0, HBM) == []


def test_other_codes_chips_and_nodes_are_other_events():
    events = ChipEvents()
    further = (ChipReport("node-1", 1, HBM.code), ChipReport("node-1", 0, "80E18404"))
    assert seen(events, 10.0, HBM) == [HBM.code]
    assert seen(events, 20.0, HBM, *further) == [HBM.code, "80E18404"]


def test_a_code_that_the_attempt_before_answered_is_new_only_after_it_was_gone():
    def later() -> ChipEvents:
        return ChipEvents(answered={HBM.key})

    left, healed, unknown = later(), later(), ChipEvents()
    assert seen(left, 10.0, HBM) == []
    assert seen(left, 20.0) == []
    assert seen(left, 200.0, HBM) == [HBM.code], "gone meanwhile"
    assert seen(healed, 10.0) == []
    assert seen(healed, 20.0, HBM) == [HBM.code]
    assert seen(unknown, 10.0, HBM) == [HBM.code]


def test_a_code_that_comes_with_a_fault_which_its_process_has_reported_is_no_event():
    fault = Fault(FaultClass.DEVICE_MEMORY_ERROR, 12.0, "UCE ERROR", node="node-1", device=0)
    before = Fault(FaultClass.DEVICE_MEMORY_ERROR, 5.0, "UCE ERROR", node="node-1", device=0)
    elsewhere = Fault(FaultClass.DEVICE_MEMORY_ERROR, 12.0, "UCE ERROR", node="node-1", device=1)
    for answered, codes in (([fault], []), ([before, elsewhere], [HBM.code])):
        events = ChipEvents()
        seen(events, 10.0)
        seen(events, 10.0)  # the same sample, at the next poll
        assert seen(events, 20.0, HBM, faults=answered) == codes


def test_the_key_of_a_fault_is_that_of_its_report():
    fault = Fault(FaultClass.UNKNOWN, 0.0, "", node="node-1", device=0, code=HBM.code)
    assert chip_key(fault) == HBM.key
