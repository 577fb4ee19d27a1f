"""Codes with several causes, code tables beside rules, time zones, and how sure a diagnosis is."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.diagnosis.cause import LogSource, choose_cause
from perdure.training.diagnosis.codes import look_up_code
from perdure.training.diagnosis.explanation import explain_choice
from perdure.training.diagnosis.rules import load_rules
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.sources import diagnose_files
from perdure.training.diagnosis.zones import read_clock, zone_shifts
from perdure.training.recovery.faults import MIN_CONFIDENCE, Fault, FaultClass
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import Policy, Rung
from tests.values import not_none

SET_DEVICE = (
    "RuntimeError: NPU function error: c10_npu::SetDevice(device_id_), error code is 507033"
)


def first_cause(text: str) -> Fault:
    source = LogSource("a", scan_text(text, year=2026).findings)
    return not_none(choose_cause([source], at_s=0.0)).fault


@pytest.mark.parametrize(
    ("beside", "fault_class"),
    [
        ("device memory is still held by process 61", FaultClass.LEFTOVER),
        ("NPU 2 has been occupied by another process", FaultClass.LEFTOVER),
        ("the device is busy.", FaultClass.LEFTOVER),
        ("heartbeat missing on device 2", FaultClass.DEVICE_LOST),
        ("Heartbeats are missing on the device.", FaultClass.DEVICE_LOST),
        ("Device[2] lost heart beat", FaultClass.DEVICE_LOST),
        ("opening", FaultClass.DEVICE_LOST),
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_code_is_decided_by_what_stands_beside_it(beside, fault_class, is_before):
    lines = (beside, SET_DEVICE) if is_before else (SET_DEVICE, beside)
    assert first_cause("\n".join(lines) + "\n").fault_class is fault_class


def test_what_stands_far_from_a_code_does_not_decide_it():
    far = "the device is busy.\n" + "reading part\n" * 400 + SET_DEVICE
    assert first_cause(f"{far}\n").fault_class is FaultClass.DEVICE_LOST


@pytest.mark.parametrize(
    ("code", "fault_class"),
    [
        ("507027", FaultClass.VERSION_MISMATCH),  # kernel look-up
        ("507022", FaultClass.COLLECTIVE_TIMEOUT),  # IPC
        ("207014", FaultClass.OPERATOR_ERROR),  # queue full
        ("507021", FaultClass.LAUNCH_MISCONFIGURED),  # profiling
        ("107021", FaultClass.LAUNCH_MISCONFIGURED),  # a system parameter that is not set
    ],
)
def test_the_whole_range_of_the_runtimes_numbers_is_known(code, fault_class):
    fact = not_none(look_up_code(f"call failed, error code is {code}"))
    assert fact.spec.fault_class is fault_class


# The words of these rules say more than the number that a call returns.
_MORE_PRECISE = {"mindspore-getnext-starved", "hccl-function-refused", "npu-pinned-memory",
                 "npu-ez9903"}  # fmt: skip


def test_rules_and_code_tables_agree_where_they_speak_of_the_same_number():
    differing = {
        rule.id
        for rule in load_rules()
        if (fact := look_up_code(rule.spec.example)) is not None
        and fact.table in {"acl", "hccl"}
        and fact.spec.fault_class is not rule.fault_class
    }
    assert differing == _MORE_PRECISE


def shifts(*texts: str) -> list[float]:
    return zone_shifts([read_clock(text, year=2026) for text in texts])


@pytest.mark.parametrize(
    ("first", "second", "shift_s"),
    [
        ("2026-01-05T10:00:00Z a", "2026-01-05T18:00:01+08:00 b", -8 * 3600.0),
        ("2026-01-05 10:00:00,100+0530 a", "2026-01-05 04:30:09Z b", 5.5 * 3600.0),
        ("2026-01-05 10:00:00 a", "2026-01-05 18:00:04 b", -8 * 3600.0),
        ("2026-01-05 10:00:00 a", "2026-01-05 10:00:40 b", 0.0),
        ("2026-01-05 10:00:00 a", "2026-01-05 10:17:00 b", 0.0),
        ("2026-01-05 10:00:00 a", "nothing", 0.0),
        ("2026-01-05 10:00:00 a\n2026-01-05 18:30:00 a", "2026-01-05 18:00:00 b", 0.0),
    ],
)
def test_a_time_zone_is_read_or_inferred_from_ends_that_belong_together(first, second, shift_s):
    assert shifts(first, second) == [0.0, shift_s]


def diagnose(folder: Path, **logs: str):
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return diagnose_files(str(folder), sorted(folder.iterdir()), at_s=0.0, year=2026)


ECC = "HBM multi bit ECC error on device 3"
TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'mask'"


def test_the_first_cause_across_time_zones_is_the_first_in_time(tmp_path):
    first = f"2026-01-05T18:00:00+08:00 ERROR {ECC}\n"
    later = f"2026-01-05T10:00:30Z ERROR {TYPE_ERROR}\n"
    case = diagnose(tmp_path, a=later, b=first)
    assert not_none(case.diagnosis).fault.evidence == first.strip()


def test_steps_that_both_logs_show_decide_alone_about_their_clocks(tmp_path):
    def log(hour: int, zone: str, num_steps: int, end: str) -> str:
        at = f"2026-01-05T{hour:02d}:"
        times = [f"{at}{step // 60:02d}:{step % 60:02d}{zone}" for step in range(num_steps)]
        steps = (f"{time} iteration {step}/ 500 loss 1.0" for step, time in enumerate(times))
        return "\n".join((*steps, f"{at}{end}{zone} ERROR"))

    first = log(2, "Z", 100, "01:40") + f" {TYPE_ERROR}\n"
    later = log(10, "+08:00", 90, "01:50") + f" {ECC}\n"
    for names in ("ab", "ba"):
        case = diagnose(tmp_path, **dict(zip(names, (first, later), strict=True)))
        assert TYPE_ERROR in not_none(case.diagnosis).fault.evidence


def test_an_error_of_the_program_is_no_rival_of_a_broken_device(tmp_path):
    case = diagnose(tmp_path, a=f"{ECC}\n", b=f"{TYPE_ERROR}\n")
    diagnosis = not_none(case.diagnosis)
    assert diagnosis.fault.evidence == ECC
    assert not diagnosis.has_rival


def test_causes_whose_order_no_clock_shows_are_rivals_and_the_ladder_takes_them_as_unknown(
    tmp_path,
):
    case = diagnose(tmp_path, a=f"{TYPE_ERROR}\n", b=f"{ECC}\n")
    diagnosis = not_none(case.diagnosis)
    assert diagnosis.has_rival
    assert not_none(diagnosis.fault.confidence) < MIN_CONFIDENCE
    assert "do not show" in diagnosis.fault.explanation
    decision = decide(
        diagnosis.fault, now_s=0.0, history=(), supported=frozenset(Rung), policy=Policy()
    )
    unknown = diagnosis.fault.of_class(FaultClass.UNKNOWN)
    assert decision == decide(
        unknown, now_s=0.0, history=(), supported=frozenset(Rung), policy=Policy()
    )
    assert decision.rung is not Rung.STOP
    rows = explain_choice([reading.source for reading in case.readings], diagnosis)
    assert [row.verdict.split(":")[0] for row in rows] == ["the cause", "as likely"]


def test_an_explanation_says_what_became_of_every_finding(tmp_path):
    steps = "".join(f"step {step} loss 2.1 lr 1e-4\n" for step in range(1, 30))
    survived = "OSError: [Errno 5] Input/output error\n"
    case = diagnose(tmp_path, a=f"{survived}{steps}[ERROR] x\n{TYPE_ERROR}\n")
    rows = explain_choice([reading.source for reading in case.readings], case.diagnosis)
    assert [(row.line, row.verdict.split(":")[0]) for row in rows] == [
        (TYPE_ERROR, "the cause"),
        (survived.strip(), "no failure"),
        ("[ERROR] x", "explained"),
    ]
    assert rows[2].explained_by == TYPE_ERROR


def test_a_fault_that_an_old_ledger_holds_has_no_confidence_and_is_not_doubtful():
    assert not Fault(FaultClass.HANG, 0.0, "x").is_doubtful
