"""How much time the next start gets, by the starts before it."""

from __future__ import annotations

import pytest

from perdure.training.liveness.start_patience import StartPatience, patience_of
from perdure.training.recovery.faults import IDLE_START, SLOW_START, Fault, FaultClass
from perdure.training.recovery.rungs import Recovery, Rung


def slow(*, progressed: bool = False, failed: bool = False) -> Recovery:
    fault = Fault(FaultClass.HANG, 0.0, "no progress", code=SLOW_START)
    return Recovery(fault, Rung.HANG_RESTART, progressed=progressed, failed=failed)


def crash(*, progressed: bool = False) -> Recovery:
    fault = Fault(FaultClass.NATIVE_CRASH, 0.0, "killed", code="SIGKILL")
    return Recovery(fault, Rung.IN_PLACE_RESTART, progressed=progressed)


def idle() -> Recovery:
    fault = Fault(FaultClass.HANG, 0.0, "no progress", code=IDLE_START)
    return Recovery(fault, Rung.HANG_RESTART, progressed=False)


HANG_LATER = Recovery(Fault(FaultClass.HANG, 0.0, "no progress"), Rung.HANG_RESTART, False)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], StartPatience()),
        ([crash(), HANG_LATER], StartPatience()),
        ([crash(), slow()], StartPatience(2.0)),
        ([slow(), slow()], StartPatience(4.0, ends_slow_start=False)),
        ([slow(), idle()], StartPatience(4.0, ends_slow_start=False)),
        ([slow(), crash(), slow()], StartPatience(4.0, ends_slow_start=False)),
        ([slow()] * 9, StartPatience(4.0, ends_slow_start=False)),
        ([slow(progressed=True)], StartPatience(2.0)),
        ([slow(), slow(progressed=True), crash()], StartPatience(4.0)),
        ([slow(failed=True)], StartPatience()),
    ],
    ids=["a first start", "other faults", "twice the time", "the third is not ended", "idle or not",
         "a crash in between", "the factor has an end", "what it took it will take again",
         "a row ends with progress", "an answer that was not carried out"],
)  # fmt: skip
def test_a_start_gets_more_time_after_each_that_was_too_slow(history, expected):
    assert patience_of(history) == expected
