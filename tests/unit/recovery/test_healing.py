"""What is done about a chip before processes are started on it again: pure decisions.

The faults are those that the diagnosis makes of what ranks and the driver's tool print.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, NodeOutput, WorkerEnd
from perdure.training.recovery.chips import SEPARATED, ChipLevel
from perdure.training.recovery.healing import (
    TREATMENTS,
    Act,
    ActDone,
    HealPlan,
    NextAct,
    Reset,
    found_at_fault,
    hardware_fault,
    is_healed,
    is_still_there,
    next_act,
    treatments_markdown,
)

PAGE = Path(__file__).parents[3] / "docs" / "recovery.md"

RESET_NOW, RESTART_JOB, SEPARATES = "80E18404", "80E01801", "80E18402"
ILL = ActDone(Act.CHECK, is_good=False, seen="device 0: Alarm")
WELL = ActDone(Act.CHECK, is_good=True, seen="computes right")
WAS_RESET = ActDone(Act.RESET, is_good=True, seen="chip 0.0")
REFUSED = ActDone(Act.RESET, is_good=False, seen="refused")


def course(plan: HealPlan, *outcomes: ActDone) -> list[NextAct | None]:
    """What is asked for, act after act, if each comes out like this."""
    return [next_act(plan, outcomes[:number]) for number in range(len(outcomes) + 1)]


def diagnosed(error: str | None = None, *, exit_code: int = 1, code: str | None = None):
    """What the diagnosis makes of a rank's end, and of a code that the driver reports."""
    text = f" Health Status : Alarm\n Error Code : {code}\n Error Information : NA\n"
    health = NodeOutput("node-1", "npu-smi info -t health -i 0 -c 0", text, device=0)
    end = WorkerEnd(1, "node-1", 0, exit_code, 9.0, error)
    outputs = (health,) if code is not None else ()
    return diagnose(Evidence(at_s=10.0, step=4, workers=(end,), outputs=outputs))


def test_every_level_has_a_treatment_and_what_is_separated_is_never_reset():
    assert set(TREATMENTS) == {None, *ChipLevel}
    assert {TREATMENTS[level].reset for level in SEPARATED} == {Reset.NEVER}


def test_the_page_has_the_table():
    assert treatments_markdown() in PAGE.read_text(encoding="utf-8")


def test_a_chip_whose_level_asks_for_it_is_reset_before_it_is_checked():
    plan = HealPlan(RESET_NOW)
    check = NextAct(Act.CHECK, plan.reset_s)
    assert course(plan, WAS_RESET, WELL) == [NextAct(Act.RESET), check, None]


def test_a_fault_that_asks_for_new_processes_gets_time_and_then_a_reset():
    plan = HealPlan(RESTART_JOB)
    waits, after = NextAct(Act.CHECK, plan.wait_s), NextAct(Act.CHECK, plan.reset_s)
    assert course(plan, ILL, WAS_RESET, WELL) == [waits, NextAct(Act.RESET), after, None]
    assert course(plan, WELL) == [waits, None]


def test_no_chip_is_reset_twice():
    assert course(HealPlan(RESET_NOW), WAS_RESET, ILL)[-1] is None
    assert course(HealPlan(RESET_NOW), REFUSED, ILL)[-1] is None


def test_after_a_reset_that_was_refused_the_check_decides():
    plan = HealPlan(RESET_NOW)
    assert course(plan, REFUSED, WELL)[1:] == [NextAct(Act.CHECK, plan.wait_s), None]


def test_a_job_that_forbids_it_has_no_chip_reset():
    plan = HealPlan(RESET_NOW, may_reset=False)
    assert course(plan, ILL) == [NextAct(Act.CHECK), None]


@pytest.mark.parametrize(
    ("reported", "then"),
    [((RESET_NOW,), NextAct(Act.RESET)), ((RESET_NOW, SEPARATES), None), ((), None)],
    ids=["reset", "separated", "none"],
)
def test_the_codes_of_the_check_count_where_the_fault_had_none(reported, then):
    ill = ActDone(Act.CHECK, is_good=False, seen="Alarm", codes=reported)
    assert next_act(HealPlan(None), (ill,)) == then


def test_only_a_good_check_at_the_end_lets_processes_be_started():
    assert is_healed((WAS_RESET, WELL))
    assert not is_healed((WAS_RESET, ILL))
    assert not is_healed((WAS_RESET,))
    assert not is_healed(())


def test_a_code_that_is_still_reported_is_still_there_unless_it_asks_for_nothing():
    assert is_still_there(HealPlan(RESTART_JOB), (RESTART_JOB,))
    assert not is_still_there(HealPlan(RESTART_JOB), (RESET_NOW,))
    assert not is_still_there(HealPlan("80E18401"), ("80E18401",))


def test_software_costs_no_check():
    for found in (diagnosed(exit_code=-11), diagnosed("ValueError: no such column")):
        assert hardware_fault(found.fault, found.runners_up) is None


def test_a_code_that_the_program_caused_costs_no_check():
    found = diagnosed(code="80C98002")
    assert found.fault.code == "80C98002"
    assert hardware_fault(found.fault, found.runners_up) is None


def test_damaged_memory_is_looked_at_with_and_without_a_code():
    found = diagnosed("RuntimeError: UCE ERROR reason=[device mem error]")
    assert hardware_fault(found.fault, found.runners_up) is found.fault
    found = diagnosed(code=RESET_NOW)
    hurt = hardware_fault(found.fault, found.runners_up)
    assert hurt is not None
    assert (hurt.chip_code, hurt.device) == (RESET_NOW, 0)


def test_a_process_that_dies_where_the_driver_reports_a_code_is_the_chips():
    found = diagnosed(exit_code=-9, code=RESET_NOW)
    assert found.fault.code == "SIGKILL"
    hurt = hardware_fault(found.fault, found.runners_up)
    assert hurt is not None
    assert hurt.chip_code == RESET_NOW


def test_a_check_that_fails_puts_the_hardware_at_fault():
    crash = diagnosed(exit_code=-11).fault
    ill = ActDone(Act.CHECK, is_good=False, seen="Alarm", codes=("80E18401", RESET_NOW))
    found = found_at_fault(crash, (ill,))
    assert (found.hardware_fault, found.chip_code) == (True, RESET_NOW)
    assert found_at_fault(crash, (ILL,)).chip_code is None
