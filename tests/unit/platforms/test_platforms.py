"""Platform entries in and out: each form, each refusal, each thing that cannot be said."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perdure.training.config.recovery import RestartSpec
from perdure.training.errors import InputError
from perdure.training.platforms.forms import ENTRIES, IGNORED_ENTRIES, Platform, read_platform
from perdure.training.platforms.printing import print_platform
from perdure.training.platforms.settings import JOB_FIELDS, PAIRS, POLICY_FIELDS, Fact, Setting
from perdure.training.recovery.rungs import Policy, RestartCount

SWITCHES = sorted(n for n, field in Policy.model_fields.items() if field.annotation is bool)
IN_PROCESS = (
    "end_of_life_checkpoint", "memory_retry", "collective_retry", "process_replace",
    "numeric_retry",
)  # fmt: skip

values: dict[str, st.SearchStrategy[Any]] = {
    "max_restarts": st.integers(1, 128),
    "pod_retries": st.integers(0, 128),
    "count": st.sampled_from(RestartCount),
    **{name: st.booleans() for name in SWITCHES},
}
policies = (
    st.fixed_dictionaries(values)
    .filter(lambda d: not (d["numeric_retry"] and d["data_skipping"]))
    .map(lambda d: Policy(**d))
)
words = st.sampled_from(["true", "false"])
numbers = st.integers(1, 128).map(str)
modelarts: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {
        "fault-tolerance/job-retry-num": numbers,
        "fault-tolerance/job-unconditional-retry": words,
        "fault-tolerance/hang-retry": words,
        "fault-tolerance/hccl_op_retry": words,
        "fault-tolerance/pod-retry-num": numbers,
    }
)


@given(modelarts)
def test_every_set_of_modelarts_annotations_is_printed_back_as_it_was_read(entries):
    reading = read_platform(entries)
    assert reading.warnings == ()
    assert dict(print_platform(reading.policy(), Platform.MODELARTS).entries) == entries


@given(policies, st.sampled_from(Platform))
def test_what_is_printed_reads_back_or_is_named_in_a_warning(policy, platform):
    printed = print_platform(policy, platform)
    back = read_platform(printed.entries).policy().model_dump()
    lost = {warning.partition("=")[0] for warning in printed.warnings}
    differs = {name for name, value in policy.model_dump().items() if back[name] != value}
    if platform is Platform.MODELARTS or not printed.entries:
        # Nothing is lost by a switch that is off where the platform has none.
        differs -= {name for name in (*IN_PROCESS[:4], "node_replace") if not getattr(policy, name)}
    if platform is Platform.MODELARTS and policy.count is RestartCount.EVER:
        differs -= {"count"}  # as it is there
    if not policy.process_replace:
        differs -= {"process_in_place"}  # nothing that it could be about
    assert differs <= lost


@given(st.text(max_size=12), st.sampled_from(sorted(ENTRIES)))
def test_any_text_is_read_or_refused_in_one_line(text, name):
    with contextlib.suppress(InputError):
        read_platform({name: text})
        return
    with pytest.raises(InputError) as caught:
        read_platform({name: text})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_documentation_lists_every_form():
    text = (Path(__file__).parents[3] / "docs/policy.md").read_text(encoding="utf-8")
    lines = [f"| `{n}` | {f.allowed} | {f.becomes} |" for n, f in ENTRIES.items()]
    assert [line for line in lines if line not in text] == []


def test_the_tables_name_only_fields_of_the_policy():
    names = POLICY_FIELDS | JOB_FIELDS | set(Fact)
    assert {p.name for p in PAIRS} | {p.other for p in PAIRS} <= names
    assert set(ENTRIES).isdisjoint(IGNORED_ENTRIES)


ON_3 = {"unconditional": True, "max_restarts": 3}


MA = "fault-tolerance/"
GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"
RETRIED = {f"{MA}job-retry-num": "8"}
# What is off because its annotation is not there; and without job-retry-num.
OFF = {
    "unconditional": False, "hang": False, "pod_retries": 0, "operator_retry": False,
}  # fmt: skip
NOTHING = {**OFF, "max_restarts": 0, "in_place": False}
# (entries, fields of the policy that they set)
READ = [
    (RETRIED, {**OFF, "max_restarts": 8}),
    ({**RETRIED, f"{MA}job-unconditional-retry": "true"},
     {**OFF, "max_restarts": 8, "unconditional": True}),
    ({**RETRIED, f"{MA}job-unconditional-retry": "false"}, {**OFF, "max_restarts": 8}),
    ({**RETRIED, f"{MA}hang-retry": "true"}, {**OFF, "max_restarts": 8, "hang": True}),
    ({**RETRIED, f"{MA}pod-retry-num": "1"}, {**OFF, "max_restarts": 8, "pod_retries": 1}),
    ({**RETRIED, f"{MA}hccl_op_retry": "true"}, {**OFF, "max_restarts": 8, "operator_retry": True}),
    ({f"{MA}hang-retry": "false"}, NOTHING),
    ({f"{MA}job-unconditional-retry": "true"}, {**NOTHING, "unconditional": True}),
    ({f"{MA}hccl_op_retry": "true"}, {**NOTHING, "operator_retry": True}),
    ({GRACE: "-1", **RETRIED}, {**OFF, "max_restarts": 8, "unmount_after_s": -1}),
    ({GRACE: "0", **RETRIED}, {**OFF, "max_restarts": 8, "unmount_after_s": 0}),
    ({GRACE: "10"}, {"unmount_after_s": 10}),
    ({"use_skip_data_by_global_norm": "True"}, {"data_skipping": True}),
    ({"monitor_on": "True", "check_for_global_norm": "True"},
     {"numeric_retry": True, "abnormal_grad_norm": 3.0}),
    ({"monitor_on": "True", "check_for_global_norm": "True", "global_norm_spike_threshold": "44.0"},
     {"numeric_retry": True, "abnormal_grad_norm": 44.0}),
    ({"check_for_global_norm": "True", "global_norm_spike_threshold": "44.0"}, {}),
    ({"use_skip_data_by_global_norm": "True", "monitor_on": "True",
      "check_for_global_norm": "False", "global_norm_spike_count_threshold": "2"},
     {"data_skipping": True, "numeric_retry": False, "abnormal_grad_norm": 3.0,
      "max_skipped_in_a_row": 2}),
    ({"fault-retry-times": "10"}, {"unconditional": True, "max_restarts": 10}),
    ({"fault-retry-times": "0"}, {"unconditional": False}),
    ({"fault-retry-times": "3", "restartPolicy": "Never"}, ON_3),
    ({"fault-scheduling": "grace"}, {}),
    ({"fault-scheduling": "off"}, {"unconditional": False, "pod_retries": 0}),
    ({"pod-rescheduling": "on"}, {"pod_retries": 128}),
    ({"pod-rescheduling": "off"}, {"pod_retries": 0}),
    ({"pod-rescheduling": "on", **RETRIED, f"{MA}pod-retry-num": "4"},
     {**OFF, "max_restarts": 8, "pod_retries": 4}),
    ({"pod-rescheduling": "on", "MS_ENABLE_TFT": "{RSC:1}"}, {"pod_retries": 128}),
    ({"subHealthyStrategy": "ignore"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "expected"), READ)
def test_an_entry_becomes_the_fields_it_is_about(entries, expected):
    fields = read_platform(entries).fields
    assert {name: fields[name] for name in expected} == expected
    assert "MS_ENABLE_TFT" in entries or fields.keys() == expected.keys()


# (text, letters of IN_PROCESS that are on)
TFT = [
    ("{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1,TSP:1,RSC:1}", "11111"),
    ("{TTP:1}", "10000"),
    ("TRE:1", "00001"),
    ("{TRE:2,TRE_SNAPSHOT_STEPS:5}", "00001"),
    ("{ ARF:1 }", "10010"),
    ("'{ARF:1,TTP:1}'", "10010"),
    ("{HCCE:1}", "00100"),
    ("{UCE:1 TTP:1}", "11000"),
    ("{UCE:1}", "11000"),
    ("{UCE:1, HCCE:1, TTP:0}", "11100"),
    ("{HCCE:1,TTP:0}", "00100"),
    ("{}", "00000"),
]


@pytest.mark.parametrize(("text", "on"), TFT)
def test_ms_enable_tft_names_what_is_on_and_the_rest_is_off(text, on):
    fields = read_platform({"MS_ENABLE_TFT": text}).fields
    assert "".join(str(int(fields[name])) for name in IN_PROCESS) == on


@pytest.mark.parametrize(
    ("name", "text", "on"),
    [
        ("HIGH_AVAILABILITY", "dump", "1000"),
        ("HIGH_AVAILABILITY", "retry", "1110"),
        ("HIGH_AVAILABILITY", "recover", "1001"),
        ("HIGH_AVAILABILITY", "elastic-training", "1000"),
        ("HIGH_AVAILABILITY", "recover,retry", "1111"),
        ("recover-strategy", "retry, recover, dump, exit", "1111"),
        ("recover-strategy", "recover-in-place", "0001"),
        ("recover-strategy", "dump", "1000"),
        ("recover-strategy", "exit", "0000"),
    ],
)
def test_a_list_of_strategies_names_what_is_on_and_the_rest_is_off(name, text, on):
    fields = read_platform({name: text}).fields
    assert "".join(str(int(fields[field])) for field in IN_PROCESS[:4]) == on


@pytest.mark.parametrize(
    ("text", "steps"),
    [("{TRE:2,TRE_SNAPSHOT_STEPS:7}", 7), ("TRE:1 TRE_SNAPSHOT_STEPS:3", 3), ("{TRE:1}", 10)],
)
def test_the_snapshot_interval_becomes_that_of_the_job(text, steps):
    spec = RestartSpec.model_validate({"from_platform": {"MS_ENABLE_TFT": text}})
    assert (spec.numeric_retry, spec.snapshot_every_steps) == (True, steps)
    assert spec.read_platform().warnings == read_platform({"MS_ENABLE_TFT": text}).warnings
    assert not any("TRE_SNAPSHOT_STEPS" in line for line in spec.read_platform().warnings)
    assert RestartSpec.model_validate(spec.model_dump()) == spec


def test_a_snapshot_interval_that_the_job_contradicts_is_refused_with_both():
    entries = {"MS_ENABLE_TFT": "{TRE:2,TRE_SNAPSHOT_STEPS:7}"}
    with pytest.raises((InputError, ValidationError)) as caught:
        RestartSpec.model_validate({"from_platform": entries, "snapshot_every_steps": 8})
    for word in ("TRE_SNAPSHOT_STEPS:7", "snapshot_every_steps=8", "contradict"):
        assert word in str(caught.value)


def test_the_platforms_number_is_about_volumes_and_leaves_the_grace_of_processes_alone():
    entries = {"from_platform": {GRACE: "10"}, "failover_grace_s": 60}
    spec = RestartSpec.model_validate(entries)
    assert (spec.unmount_after_s, spec.failover_grace_s) == (10, 60)
    spec = RestartSpec.model_validate({"from_platform": RETRIED})
    assert (spec.unmount_after_s, spec.failover_grace_s) == (-1, 3)
    with pytest.raises((InputError, ValidationError)) as caught:
        RestartSpec.model_validate({**entries, "unmount_after_s": 30})
    for word in (f"{GRACE}='10'", "unmount_after_s=30", "contradict"):
        assert word in str(caught.value)


HIGH = "--enable-high-availability"


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ((HIGH,), "1000"),
        ((HIGH, "--enable-hbmfault-repair"), "1110"),
        ((HIGH, "--enable-worker-reboot"), "1001"),
        ((HIGH, "--enable-worker-reboot", "--enable-hbmfault-repair"), "1111"),
        ((HIGH, "--enable-elastic-training", "--distributed-optimizer-no-replica"), "1000"),
    ],
)
def test_arguments_of_mindspeed_name_what_is_on_in_any_order(given, on):
    for names in (given, given[::-1]):
        fields = read_platform(dict.fromkeys(names, "true")).fields
        assert "".join(str(int(fields[field])) for field in IN_PROCESS[:4]) == on


def test_an_argument_that_is_not_given_switches_nothing_off_that_another_names():
    entries = {"--enable-worker-reboot": "false", "HIGH_AVAILABILITY": "recover"}
    assert read_platform(entries).fields["process_replace"] is True


def test_what_one_list_leaves_out_another_may_name():
    fields = read_platform({"HIGH_AVAILABILITY": "retry", "MS_ENABLE_TFT": "{ARF:1}"}).fields
    assert (fields["memory_retry"], fields["process_replace"]) == (True, True)


# (entries, words that the error holds)
WRONG = [
    ({"fault-tolerance/job-retry-num": "0"}, ["job-retry-num", "'0'", "1 to 128"]),
    ({"fault-tolerance/job-retry-num": "129"}, ["'129'", "1 to 128"]),
    ({"fault-tolerance/job-retry-num": "three"}, ["'three'", "1 to 128"]),
    ({"fault-tolerance/pod-retry-num": "-1"}, ["pod-retry-num", "'-1'", "1 to 128"]),
    ({"fault-tolerance/hang-retry": "True"}, ["hang-retry", "'True'", "true or false"]),
    ({f"{MA}hang-retry": "true"}, ["hang-retry", "'true'", "job-retry-num", "1 to 128"]),
    ({f"{MA}pod-retry-num": "2"}, ["pod-retry-num", "'2'", "job-retry-num", "1 to 128"]),
    ({GRACE: "-2"}, [GRACE, "'-2'", "a number from -1 to 86400"]),
    ({GRACE: "86401"}, [GRACE, "'86401'", "-1 to 86400"]),
    ({GRACE: "30 s"}, [GRACE, "'30 s'", "-1 to 86400"]),
    ({"hang-retry": "true"}, ["did you mean fault-tolerance/hang-retry?"]),
    ({"fault-tolerance/job-retry-nr": "3"}, ["did you mean fault-tolerance/job-retry-num?"]),
    ({"colour": "red"}, ["colour", "'red'", "known are", "recover-strategy"]),
    ({"MS_ENABLE_TFT": "{TPP:1}"}, ["MS_ENABLE_TFT", "TPP:1", "TTP:1"]),
    ({"MS_ENABLE_TFT": "{UCE:2}"}, ["UCE:2", "UCE:0 or UCE:1"]),
    ({"MS_ENABLE_TFT": "{TRE:3}"}, ["TRE:3", "TRE:0 or TRE:1 or TRE:2"]),
    ({"MS_ENABLE_TFT": "{UCE}"}, ["UCE:", "UCE:0 or UCE:1"]),
    ({"MS_ENABLE_TFT": "{UCE:1,UCE:0}"}, ["UCE:1", "UCE:0", "contradict"]),
    ({"MS_ENABLE_TFT": "{TRE:2}"}, ["TRE:2", "TRE_SNAPSHOT_STEPS"]),
    ({"MS_ENABLE_TFT": "{TRE:2,TRE_SNAPSHOT_STEPS:0}"}, ["TRE_SNAPSHOT_STEPS", "'0'"]),
    ({"MS_ENABLE_TFT": "{TRE_SNAPSHOT_STEPS:x}"}, ["TRE_SNAPSHOT_STEPS", "'x'"]),
    ({"HIGH_AVAILABILITY": "resume"}, ["HIGH_AVAILABILITY", "'resume'", "dump, retry, recover"]),
    ({"--enable-worker-reboot": "on"}, ["--enable-worker-reboot", "'on'", "true or false"]),
    ({"recover-strategy": ""}, ["recover-strategy", "retry, recover"]),
    ({"fault-scheduling": "gentle"}, ["'gentle'", "grace or force or off"]),
    ({"fault-retry-times": "101"}, ["fault-retry-times", "'101'", "0 to 100"]),
    ({"pod-rescheduling": "true"}, ["'true'", "on or off"]),
    ({"subHealthyStrategy": "leave"}, ["'leave'", "ignore", "hotSwitch"]),
    (
        {"fault-tolerance/job-retry-num": "8", "fault-retry-times": "5"},
        ["job-retry-num='8'", "fault-retry-times='5'", "8 or 5"],
    ),
    (
        {"pod-rescheduling": "off", **RETRIED, "fault-tolerance/pod-retry-num": "2"},
        ["pod-rescheduling='off'", "pod-retry-num='2'", "contradict"],
    ),
    (
        {"fault-scheduling": "off", "fault-retry-times": "5"},
        ["fault-scheduling='off'", "fault-retry-times='5'", "contradict"],
    ),
    (
        {"MS_ENABLE_TFT": "{TRE:1}", "use_skip_data_by_global_norm": "True"},
        ["MS_ENABLE_TFT TRE:1", "use_skip_data_by_global_norm='True'", "data_skipping=false"],
    ),
    (
        {"fault-retry-times": "3", "restartPolicy": "OnFailure"},
        ["fault-retry-times='3'", "restartPolicy='OnFailure'", "restartPolicy=Never"],
    ),
    (
        {"recover-strategy": "retry,exit", "fault-retry-times": "0"},
        ["recover-strategy='retry,exit'", "fault-retry-times='0'", "1 to 100"],
    ),
    (
        {"recover-strategy": "recover", "fault-scheduling": "off"},
        ["recover-strategy='recover'", "fault-scheduling='off'", "grace"],
    ),
    (
        {"subHealthyStrategy": "graceExit", "recover-strategy": "retry"},
        ["subHealthyStrategy='graceExit'", "recover-strategy='retry'", "dump"],
    ),
]


@pytest.mark.parametrize(("entries", "expected"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_a_wrong_entry_gives_one_line_with_names_values_and_what_is_allowed(entries, expected):
    with pytest.raises(InputError) as caught:
        read_platform(entries)
    assert [word for word in expected if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fact", "value", "source", "needs"),
    [
        (Fact.MC2, True, "comm.mc2=true", "mc2=false"),
        (Fact.WATCHDOG, True, "comm.watchdog=true", "watchdog=false"),
        (Fact.CHIP, "a2", "comm.chip=a2", "chip=a3"),
    ],
)
def test_operator_retry_excludes_mc2_the_watchdog_and_other_chips(fact, value, source, needs):
    entries = {"fault-tolerance/hccl_op_retry": "true"}
    with pytest.raises(InputError) as caught:
        read_platform(entries, job_settings=[Setting(fact, value, source)])
    text = str(caught.value)
    assert all(word in text for word in ("hccl_op_retry='true'", source, needs, "exclude"))
    off = {"fault-tolerance/hccl_op_retry": "false"}
    assert (
        read_platform(off, job_settings=[Setting(fact, value, source)]).fields["operator_retry"]
        is False
    )


# (entry, word of the warning that it comes with)
UNSAYABLE = [
    ("MS_ENABLE_TFT", "{TSP:1}", "pausing"),
    ("MS_ENABLE_TFT", "{ARF:1,TTP:0}", "TTP:0 has no effect"),
    ("MS_ENABLE_TFT", "{TRE:1}", "snapshot"),
    ("MS_ENABLE_TFT", "{TRE_SNAPSHOT_STEPS:5}", "TRE_SNAPSHOT_STEPS:5 has no effect"),
    ("HIGH_AVAILABILITY", "elastic-training", "fewer ranks"),
    ("--enable-elastic-training", "true", "fewer ranks"),
    ("--distributed-optimizer-no-replica", "true", "newest checkpoint"),
    ("recover-strategy", "elastic-training,exit", "fewer ranks"),
    ("fault-tolerance/job-unconditional-retry", "true", "never restarted"),
    ("fault-scheduling", "grace", "restart.failover_grace_s"),
    ("fault-scheduling", "force", "restart.failover_grace_s"),
    ("fault-scheduling", "off", "max_restarts"),
    ("subHealthyStrategy", "hotSwitch", "goes on where it is"),
    ("restartPolicy", "Always", "kubelet"),
    ("jupyter-lab/enable", "true", "ignored"),
    ("process-recover-enable", "on", "recover-strategy"),
    ("huawei.com/recover_policy_path", "pod", "job level"),
]


@pytest.mark.parametrize(
    ("text", "replaces"), [("recover", True), ("recover-in-place", False), ("dump,exit", False)]
)
def test_recover_moves_the_node_and_recover_in_place_replaces_processes_alone(text, replaces):
    fields = read_platform({"recover-strategy": text}).fields
    assert fields["node_replace"] is replaces


@pytest.mark.parametrize(("name", "text", "word"), UNSAYABLE)
def test_what_the_policy_cannot_express_is_a_warning(name, text, word):
    warnings = read_platform({name: text}).warnings
    assert any(name in line and word in line for line in warnings), warnings


# (policy, platform, entries that are printed, fields that are warned of)
PRINTED = [
    (
        {"max_restarts": 8, "pod_retries": 2}, Platform.MODELARTS,
        {"fault-tolerance/job-retry-num": "8", "fault-tolerance/pod-retry-num": "2"},
        {
            "count", "memory_retry", "collective_retry", "process_replace", "node_replace",
            "end_of_life_checkpoint",
        },
    ),
    (
        {"numeric_retry": True}, Platform.MINDFORMERS,
        {"MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1,RSC:0}"}, set(),
    ),
    (
        {"data_skipping": True, "pod_retries": 4}, Platform.MINDFORMERS,
        {"use_skip_data_by_global_norm": "True"}, {"pod_retries", "pod_before_in_place"},
    ),
    (
        {"end_of_life_checkpoint": False}, Platform.MINDFORMERS,
        {"MS_ENABLE_TFT": "{TTP:0,UCE:1,HCCE:1,ARF:1,TRE:0,RSC:0}"}, {"end_of_life_checkpoint"},
    ),
    (
        {"memory_retry": False, "collective_retry": False}, Platform.MINDSPEED,
        {"HIGH_AVAILABILITY": "recover,dump"}, set(),
    ),
    (
        {"memory_retry": False}, Platform.MINDSPEED,
        {"HIGH_AVAILABILITY": "retry,recover,dump"}, {"memory_retry"},
    ),
    (
        {"memory_retry": False}, Platform.MINDFORMERS,
        {"MS_ENABLE_TFT": "{TTP:1,UCE:0,HCCE:1,ARF:1,TRE:0,RSC:0}"}, set(),
    ),
    (
        {"process_in_place": False}, Platform.MINDCLUSTER,
        {"recover-strategy": "retry,recover,dump,exit"}, set(),
    ),
    (
        {"max_restarts": 0, "pod_retries": 2}, Platform.MODELARTS,
        {"fault-tolerance/hang-retry": "false"},
        {
            "count", "pod_retries", "in_place", "hang", "memory_retry", "collective_retry",
            "process_replace", "node_replace", "end_of_life_checkpoint",
        },
    ),
    (
        {"max_restarts": 101, "hang": False}, Platform.MINDCLUSTER,
        {
            "fault-retry-times": "100", "restartPolicy": "Never",
            "recover-strategy": "retry,recover-in-place,recover,dump,exit",
        },
        {"max_restarts", "hang"},
    ),
    (
        {"unconditional": False}, Platform.MINDCLUSTER,
        {"fault-retry-times": "0", "recover-strategy": "dump,exit"},
        {"memory_retry", "collective_retry", "process_replace", "node_replace", "process_in_place"},
    ),
    (
        {"node_replace": False}, Platform.MINDCLUSTER,
        {"recover-strategy": "retry,recover-in-place,dump,exit"}, set(),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "platform", "entries", "lost"), PRINTED)
def test_a_policy_is_printed_with_a_warning_for_what_the_platform_cannot_say(
    policy, platform, entries, lost
):
    printed = print_platform(Policy(**policy), platform)
    assert {name: printed.entries.get(name) for name in entries} == entries
    assert {warning.partition("=")[0] for warning in printed.warnings} == lost


MONITOR = {"monitor_on": "True", "check_for_global_norm": "True"}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"check_for_global_norm": "True"}, "check_for_global_norm='True' has no effect without"),
        ({"global_norm_spike_threshold": "4"}, "has no effect without monitor_on='True'"),
        ({"monitor_on": "True"}, "nothing of it is an answer"),
        ({**MONITOR, "global_norm_spike_count_threshold": "5"}, "use_skip_data_by_global_norm"),
    ],
)
def test_an_entry_of_the_monitor_that_changes_nothing_is_a_warning(entries, words):
    (warning,) = read_platform(entries).warnings
    assert words in warning


def test_a_threshold_of_the_job_comes_before_the_default_of_mindformers_alone():
    spec = RestartSpec.model_validate({"from_platform": MONITOR, "abnormal_grad_norm": 7.5})
    assert (spec.numeric_retry, spec.abnormal_grad_norm) == (True, 7.5)
    named = {**MONITOR, "global_norm_spike_threshold": "44.0"}
    with pytest.raises(ValueError, match="contradict each other"):
        RestartSpec.model_validate({"from_platform": named, "abnormal_grad_norm": 7.5})
    reread = RestartSpec.model_validate_json(spec.model_dump_json())
    assert reread == spec


def test_the_monitor_and_skipping_exclude_each_other():
    with pytest.raises(InputError, match="exclude each other"):
        read_platform({**MONITOR, "use_skip_data_by_global_norm": "True"})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "three", "1e999"])
def test_a_threshold_is_a_number_above_0(text):
    with pytest.raises(InputError, match="a number above 0"):
        read_platform({"global_norm_spike_threshold": text})


def test_the_monitor_is_printed_as_it_is_read():
    policy = Policy(numeric_retry=True)
    printed = print_platform(policy, Platform.MINDFORMERS, extras={"abnormal_grad_norm": 44.0})
    assert {**MONITOR, "global_norm_spike_threshold": "44.0"}.items() <= printed.entries.items()
    assert read_platform(printed.entries).fields["abnormal_grad_norm"] == 44.0
    assert not [line for line in printed.warnings if line.startswith("abnormal_grad_norm")]
