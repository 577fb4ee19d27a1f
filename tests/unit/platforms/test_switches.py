"""What a platform's switch changes: from its entries and what a rank printed to the rung."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.platforms.forms import read_platform
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import Recovery, Rung

STEP, REPLACE, IN_PLACE = Rung.STEP_RETRY, Rung.PROCESS_REPLACE, Rung.IN_PLACE_RESTART
POD = Rung.POD_RESCHEDULE

UCE = "RuntimeError: UCE ERROR"
HCCE = "RuntimeError: HCCL OP RETRY FAILED"
KILLED = ""
EXITED = "see you"


def met(printed: str) -> Fault:
    """What the diagnosis makes of the end of rank 3."""
    exit_code = -9 if printed == KILLED else 1
    end = WorkerEnd(rank=3, node="node-1", device=1, exit_code=exit_code, ended_s=9.0, log=printed)
    return diagnose(Evidence(at_s=10.0, step=40, workers=[end])).fault


TFT = "MS_ENABLE_TFT"
STRATEGY = "recover-strategy"


@pytest.mark.parametrize(
    ("entries", "printed", "rung"),
    [
        ({TFT: "{UCE:1}"}, UCE, STEP),
        ({TFT: "{UCE:1}"}, HCCE, IN_PLACE),
        ({TFT: "{HCCE:1}"}, UCE, IN_PLACE),
        ({TFT: "{HCCE:1}"}, HCCE, STEP),
        ({TFT: "{ARF:1}"}, UCE, REPLACE),
        ({TFT: "{ARF:1}"}, KILLED, REPLACE),
        ({STRATEGY: "retry"}, UCE, STEP),
        ({STRATEGY: "retry"}, HCCE, STEP),
        ({STRATEGY: "recover"}, KILLED, REPLACE),
        ({STRATEGY: "recover"}, UCE, IN_PLACE),
        ({STRATEGY: "recover-in-place"}, KILLED, REPLACE),
        ({STRATEGY: "recover-in-place"}, UCE, REPLACE),
        ({STRATEGY: "dump"}, KILLED, IN_PLACE),
        ({TFT: "{RSC:1}"}, UCE, POD),
        ({TFT: "{RSC:1,TTP:1}"}, UCE, POD),
        ({TFT: "{RSC:1}"}, KILLED, POD),
        ({TFT: "{RSC:1}"}, EXITED, POD),
        ({TFT: "{RSC:1}"}, HCCE, POD),
        ({TFT: "RSC:1 TRE:1"}, KILLED, POD),
        ({TFT: "{RSC:1,HCCE:1}"}, UCE, POD),
        ({TFT: "{RSC:1,HCCE:1}"}, HCCE, STEP),
        ({TFT: "{RSC:1,ARF:1}"}, UCE, REPLACE),
        ({TFT: "{RSC:1,ARF:1}"}, KILLED, REPLACE),
        ({TFT: "{RSC:0,UCE:1}"}, KILLED, IN_PLACE),
    ],
)
def test_each_switch_is_about_faults_of_its_own(entries, printed, rung):
    policy = read_platform(entries).policy()
    decision = decide(
        met(printed),
        now_s=11.0,
        history=(),
        supported=frozenset(Rung),
        policy=policy,
        survivors=True,
    )
    assert decision.rung is rung, decision


@pytest.mark.parametrize(
    ("text", "failed", "printed"),
    [
        ("{RSC:1,ARF:1}", (REPLACE,), KILLED),
        ("{RSC:1,ARF:1,TTP:1}", (REPLACE,), EXITED),
        ("{RSC:1,HCCE:1}", (STEP,), HCCE),
        ("{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1,TSP:1,RSC:1}", (STEP, REPLACE), UCE),
    ],
)
def test_a_pod_is_next_once_what_comes_before_it_has_failed(text, failed, printed):
    policy = read_platform({TFT: text}).policy()
    history = [Recovery(met(printed), rung, progressed=False, failed=True) for rung in failed]
    asked: dict[str, Any] = {"now_s": 11.0, "supported": frozenset(Rung), "policy": policy}
    assert decide(met(printed), history=history, survivors=True, **asked).rung is POD
    assert decide(met(printed), history=history, **asked).rung is POD, "its processes have ended"


def test_a_pod_that_cannot_be_replaced_is_restarted_in_place():
    policy = read_platform({TFT: "{RSC:1}"}).policy()
    decision = decide(
        met(UCE), now_s=11.0, history=(), supported=frozenset(Rung) - {POD}, policy=policy
    )
    assert decision.rung is IN_PLACE
