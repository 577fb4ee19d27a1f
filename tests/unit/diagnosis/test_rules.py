"""The rule table: every rule catches its own example, and ordinary output is left alone."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.diagnosis.codes import load_codes, look_up_code
from perdure.training.diagnosis.recognise import CODE_RULE, recognise
from perdure.training.diagnosis.rules import FILES, Role, load_rules, match_line
from perdure.training.diagnosis.scan import scan_text
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

RULES = load_rules()

ORDINARY = [
    "",
    "step 12 loss 3.4",
    "INFO saved checkpoint step-00000100 in 3.2 s",
    "warning: no errors were found",
    " iteration   100/  1000 | lm loss: 2.345E+00 | grad norm: 0.9 | number of nan iterations: 0 |",
    "[rank0]:[I1121 02:07:08.408271257 ProcessGroupNCCL.cpp:905] NCCL_DEBUG: N/A, timeout(ms): 600",
    "HCCL_EXEC_TIMEOUT=1836 HCCL_CONNECT_TIMEOUT=600",
    "{'loss': 1.42, 'grad_norm': 0.53, 'learning_rate': 4.5e-06, 'epoch': 0.66}",
    "| 0     910B3               | OK            | 92.6        38            0    / 0         |",
    "Health Status                  : OK",
    "HBM Double Bit Error Count               : 0",
    "link status: UP",
    "net health status: Success",
    "  Uncorrectable Error               : 0",
    "Loading checkpoint shards: 100%|##########| 8/8 [00:12<00:00,  1.51s/it]",
    "node-1:5776:5902 [0] NCCL INFO comm 0x5581 rank 3 nranks 8 cudaDev 3 - Init COMPLETE",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "2025-11-21 13:18:47,639 INFO retries=3 timeout=1800 error_code=0",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.",
    "total fault count: 0, failed: 0, errors: 0",
]


@pytest.mark.parametrize(
    "line",
    [
        "Unrecognized options: --training.stps=1",
        "Error parsing --training.steps: invalid literal for int() with base 10:",
        "Error parsing checkpoint: We need to maintain at least 2 checkpoint",
        "Missing value for argument '--training.steps'. Expected 1 values.",
        "invalid choice 'no' for argument '--checkpoint.async-mode'. Expected one of",
    ],
)
def test_a_wrong_argument_is_recognised_in_the_box_that_tyro_draws(line):
    log = f"[rank0]:\u256d\u2500 Value error \u2500\u256e\n[rank0]:\u2502 {line:<76} \u2502\n"
    (matches,) = scan_text(log, year=2026).findings
    assert (matches.rule, matches.fault_class) == ("py-tyro", FaultClass.LAUNCH_MISCONFIGURED)
    assert line in matches.line


# Fifteen hundred tests of one rule each would take longer to set up than to run.
def test_a_rule_catches_its_own_example_before_any_other():
    matches = {r.id: match_line(r.spec.example, context=r.spec.context_example) for r in RULES}
    caught_by = {rule_id: match and match[0].id for rule_id, match in matches.items()}
    assert {rule_id: by for rule_id, by in caught_by.items() if by != rule_id} == {}


def test_a_rule_finds_its_example_in_a_log():
    for rule in RULES:
        text = f"{rule.spec.context_example}\nnoise before\n{rule.spec.example}\nnoise after\n"
        rule_ids = {rule.id}
        if rule.spec.yields_to_code and look_up_code(rule.spec.example) is not None:
            rule_ids = {f"{CODE_RULE}chip"}
        matches = [f for f in scan_text(text, year=2026).findings if f.rule in rule_ids]
        assert [(f.line, f.fault_class) for f in matches] == [
            (rule.spec.example.rstrip(), rule.fault_class)
        ], rule.id


@settings(max_examples=40)  # they are drawn slowly
@given(data=st.data())
@pytest.mark.parametrize("rule", [r for r in RULES if r.spec.prefilter], ids=lambda rule: rule.id)
def test_a_prefilter_lets_every_line_of_its_rule_through(rule, data):
    line = data.draw(st.from_regex(rule.pattern).filter(lambda text: "\n" not in text))
    assert re.search(rule.spec.prefilter, line)


def test_rule_ids_are_unique_and_every_rule_names_its_source():
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.spec.source.strip() for rule in RULES)


def test_every_class_but_unknown_has_rules_and_a_cause_among_them():
    causes = {rule.fault_class for rule in RULES if rule.role is Role.ROOT}
    without_rules = {FaultClass.UNKNOWN, FaultClass.HANG, FaultClass.FAIL_SLOW}
    without_rules |= {FaultClass.CONTAINER_LOST}  # the engine knows, no line of output does
    without_rules |= {FaultClass.RESTART_REQUESTED}  # an exit code that the job names
    missing = set(FaultClass) - without_rules - causes
    assert not missing, "training/diagnosis/rules/*.toml: each class needs a rule with role root"


def test_every_file_of_rules_is_read():
    folder = files("perdure.training.diagnosis") / "rules"
    names = {file.name for file in folder.iterdir() if file.name.endswith(".toml")}
    assert names == set(FILES), "training/diagnosis/rules.py: FILES needs each file"


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_output_is_caught_by_no_rule(line):
    matches = recognise(line, "")
    assert matches is None or matches.is_low_level, matches


@pytest.mark.parametrize(
    ("line", "code", "fault_class"),
    [
        ("RuntimeError: x, error code is 507054", "507054", FaultClass.DEVICE_MEMORY_ERROR),
        ("call f failed, error code:507010.", "507010", FaultClass.DEVICE_LOST),
        (
            "HCCL function error: HcclAllReduce(a), error code is 9",
            "9",
            FaultClass.COLLECTIVE_TIMEOUT,
        ),
        ("Error Code                     : 80E18402", "80E18402", FaultClass.DEVICE_MEMORY_ERROR),
        ("event_id:0x81078603", "81078603", FaultClass.LINK_DOWN),
        ("EJ9999: [PID: 1] something new", "EJ9999", FaultClass.LINK_DOWN),
    ],
)
def test_a_number_after_error_code_is_looked_up(line, code, fault_class):
    fact = not_none(look_up_code(line))
    assert (fact.code, fact.spec.fault_class) == (code, fault_class)


@pytest.mark.parametrize(
    ("code", "answer", "user_fault"),
    [
        ("80E18402", "isolate", None),  # SeparateNPU
        ("80E18400", "retry", None),  # NotHandleFault
        ("80C98001", "reschedule", None),  # RestartNPU
        ("80C98002", "retry", True),  # RestartRequest, class User of the knowledge graph
    ],
)
def test_a_chips_code_is_answered_by_its_level_and_by_who_caused_it(code, answer, user_fault):
    fact = not_none(look_up_code(f"Fault RAS occurs in the system: [event_id:0x{code.lower()}]"))
    assert (fact.code, fact.spec.recoverable_by) == (code, answer)
    assert fact.spec.user_fault is user_fault
    assert fact.spec.means.endswith(")")


def test_a_number_that_no_table_knows_is_no_evidence():
    assert look_up_code("error code is 507999") is None
    assert look_up_code("error code is 0") is None


def test_no_code_is_twice_in_a_table():
    rows = [code for table in load_codes().values() for code in table]
    assert len(rows) > 150
