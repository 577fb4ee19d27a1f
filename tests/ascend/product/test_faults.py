"""Each fault of a device as torch_npu raises it: class, rung, and the curve of a run without it.

The emulator returns the codes, and torch_npu makes the exceptions. docs/ascend.md has the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from tests.ascend.product import runs


@dataclass(frozen=True)
class Case:
    """A fault, and what is expected of it.

    Attributes:
        text: a pattern. The driver's sentence goes to whichever thread of the process asks first;
            the exception of another has the runtime's code alone.
    """

    command: str
    text: str
    fault_class: FaultClass
    rungs: tuple[Rung, ...]


# A step retry asks the device, which refuses: only a new process helps.
BEYOND_HEALING = (Rung.STEP_RETRY, Rung.PROCESS_REPLACE)

CASES = {
    "uce-in-a-parameter": Case(
        "uce in-a-parameter", "UCE ERROR", FaultClass.DEVICE_MEMORY_ERROR, (Rung.STEP_RETRY,)
    ),
    "uce-elsewhere": Case("uce", "UCE ERROR", FaultClass.DEVICE_MEMORY_ERROR, BEYOND_HEALING),
    "hbm-ecc": Case(
        "ecc", "HBM MULTI BIT ECC ERROR", FaultClass.DEVICE_MEMORY_ERROR, (Rung.STEP_RETRY,)
    ),
    "suspect-memory": Case(
        "suspect-memory",
        "SUSPECT MEM ERROR",
        FaultClass.DEVICE_MEMORY_ERROR,
        BEYOND_HEALING,
    ),
    "hccs-link": Case("link", "HCCS LINK ERROR", FaultClass.LINK_DOWN, (Rung.STEP_RETRY,)),
    "suspect-remote": Case(
        "suspect-remote", "SUSPECT REMOTE ERROR", FaultClass.LINK_DOWN, (Rung.STEP_RETRY,)
    ),
    "op-retry-failed": Case(
        "retry-failed", "HCCL OP RETRY FAILED", FaultClass.LINK_DOWN, (Rung.STEP_RETRY,)
    ),
    "aicore": Case(
        "aicore", "aicore error|507015", FaultClass.OPERATOR_ERROR, (Rung.IN_PLACE_RESTART,)
    ),
    "aicore-timeout": Case(
        "aicore-timeout",
        "aicore timeout|507014",
        FaultClass.OPERATOR_ERROR,
        (Rung.IN_PLACE_RESTART,),
    ),
    "oom": Case("oom", "out of memory", FaultClass.DEVICE_OOM, (Rung.IN_PLACE_RESTART,)),
}


SHORT = ("uce-in-a-parameter", "aicore")


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_a_fault_of_a_device_is_recovered_with_the_curve_unchanged(home, undisturbed, name):
    case = CASES[name]
    outcome = runs.run(home, name, fault=runs.DeviceFault(case.command))
    told = runs.summary(outcome)
    assert (home / f"{name}.fired").exists(), f"the fault was never armed: {told}"
    assert outcome.ended == "completed", told
    assert re.search(case.text, told), told
    assert case.fault_class in told
    assert tuple(one.rung for one in list_recoveries(outcome.history)) == case.rungs, told
    assert differences(outcome.curve, undisturbed.curve) == [], told
    assert outcome.leftovers == ()


@pytest.mark.long
def test_an_operation_that_hccl_repeats_by_itself_costs_nothing(home, undisturbed):
    changes = {"comm": {"chip": "a3", "op_retry": {"enabled": True, "hold_time_ms": 100}}}
    outcome = runs.run(home, "op-retry", fault=runs.DeviceFault("retry"), changes=changes)
    told = runs.summary(outcome)
    assert (home / "op-retry.fired").exists()
    assert list_recoveries(outcome.history) == [], told
    assert differences(outcome.curve, undisturbed.curve) == [], told


@pytest.mark.long
def test_a_stream_that_never_ends_is_a_hang(home, undisturbed):
    changes = {"restart": {"hang_timeout_s": 15.0}}
    outcome = runs.run(home, "hang", fault=runs.DeviceFault("hang"), changes=changes)
    told = runs.summary(outcome)
    assert FaultClass.HANG in told
    assert [one.rung for one in list_recoveries(outcome.history)] == [Rung.HANG_RESTART], told
    assert differences(outcome.curve, undisturbed.curve) == [], told
