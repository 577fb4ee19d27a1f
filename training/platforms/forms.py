"""The recovery settings of four platforms: a table of entries, and readers that yield our settings.

A field that no entry names keeps its value. MS_ENABLE_TFT, HIGH_AVAILABILITY, recover-strategy
and ModelArts' annotations are complete lists: a word that they leave out is off.

Sources: ModelArts' training job annotations (JobMetadata of its API, "Fault Recovery
Mechanism"); MindFormers "Training High Availability", "Data Skipping" and "Data Skip And
Checkpoint Health Monitor"; MindSpeed-LLM "High Availability"; MindCluster "Job YAML
Configuration". Counts are recoveries in a row without progress.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.training.errors import InputError
from perdure.training.platforms.settings import (
    MAX_GRACE_S,
    Fact,
    Finding,
    ImportedSettings,
    Reader,
    Setting,
    Value,
    combine_settings,
    quote_entry,
    read_number,
    refusal_of,
)
from perdure.training.platforms.tft import TFT, has_tre, read_tft


class Platform(StrEnum):
    """A platform that has entries of its own."""

    MODELARTS = "modelarts"
    MINDFORMERS = "mindformers"
    MINDSPEED = "mindspeed"
    MINDCLUSTER = "mindcluster"


@dataclass(frozen=True, slots=True)
class PlatformEntry:
    """An entry of a platform: its values, the fields that it sets, and its reader.

    Attributes:
        platform: whose documents have it.
        allowed: its values, in words.
        becomes: the fields that it sets, as docs/policy.md lists them.
        read: yields settings and warnings for (name, text); raises InputError.
    """

    platform: Platform
    allowed: str
    becomes: str
    read: Reader


def _count_reader(field: str) -> Reader:
    def read(name: str, text: str) -> Iterator[Finding]:
        yield Setting(field, read_number(name, text, low=1, high=128), quote_entry(name, text))

    return read


def _choice_reader(setting: str, *, words: Mapping[str, bool]) -> Reader:
    """Build a reader of a word that switches `setting` on or off."""

    def read(name: str, text: str) -> Iterator[Finding]:
        if text not in words:
            raise refusal_of(name, text, " or ".join(words))
        yield Setting(setting, words[text], quote_entry(name, text))

    return read


def _fact_reader(fact: Fact, words: tuple[str, ...], but: Mapping[str, str]) -> Reader:
    """Build a reader of a word that matters only beside other settings.

    `but` holds the warning of each word that has one.
    """

    def read(name: str, text: str) -> Iterator[Finding]:
        if text not in words:
            raise refusal_of(name, text, " or ".join(words))
        yield Setting(fact, text, quote_entry(name, text))
        if text in but:
            yield f"{quote_entry(name, text)}: {but[text]}"

    return read


_TRUE_FALSE = {"true": True, "false": False}


_NO_REPLICA = "a rank without a replica is not replaced: all go on from the newest checkpoint"
_ELASTIC = "going on with fewer ranks (elastic training) is not a rung of ours"
# exit names the last resort; every ladder of ours ends in `stop`. Source: MindCluster
# "Process-Level Rescheduling": recover migrates the containers of the node at fault;
# recover-in-place restarts processes in theirs, after a process exception or a chip fault of the
# levels RestartRequest and RestartBusiness.
_STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "retry": ("memory_retry", "collective_retry"),
    "recover": ("process_replace", "node_replace"),
    "recover-in-place": ("process_replace", "process_in_place"),
    "elastic-training": (),
    "dump": ("end_of_life_checkpoint",),
    "exit": (),
}
_AVAILABILITY = ("dump", "retry", "recover", "elastic-training")


def _split_words(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            raise refusal_of(name, text, f"a comma list of {', '.join(allowed)}; not {word!r}")
    return words


def _read_strategies(name: str, text: str) -> Iterator[Finding]:
    """Read recover-strategy: a word that is not in the list is off."""
    words = _split_words(name, text, tuple(_STRATEGIES))
    source = quote_entry(name, text)
    on = {setting for word in words for setting in _STRATEGIES[word]}
    for setting in dict.fromkeys(
        setting for settings in _STRATEGIES.values() for setting in settings
    ):
        yield Setting(setting, setting in on, source, is_implied=setting not in on)
    yield Setting(Fact.PROCESS_RECOVERY, bool(on - {"end_of_life_checkpoint"}), source)
    if "elastic-training" in words:
        yield f"{source}: {_ELASTIC}"


def _read_availability(name: str, text: str) -> Iterator[Finding]:
    """Read HIGH_AVAILABILITY: each word brings dump with it (--enable-high-availability)."""
    words = _split_words(name, text, _AVAILABILITY)
    source = quote_entry(name, text)
    yield Setting("end_of_life_checkpoint", True, source)
    for word in ("retry", "recover"):
        for setting in _STRATEGIES[word]:
            yield Setting(setting, word in words, source, is_implied=word not in words)
    if "elastic-training" in words:
        yield f"{source}: {_ELASTIC}"


def _flag_reader(*settings: str, without: tuple[str, ...] = (), warning: str = "") -> Reader:
    """Make a reader of an argument of MindSpeed-LLM's programs, true where it is given.

    Args:
        settings: fields that it switches on.
        without: fields that stay off unless another argument switches them on.
        warning: the meaning that none of ours has.
    """

    def read(name: str, text: str) -> Iterator[Finding]:
        if text not in _TRUE_FALSE:
            raise refusal_of(name, text, " or ".join(_TRUE_FALSE))
        on, source = _TRUE_FALSE[text], quote_entry(name, text)
        for setting in settings:
            yield Setting(setting, on, source, is_implied=not on)
        for setting in without:
            yield Setting(setting, False, source, is_implied=True)
        if on and warning:
            yield f"{source}: {warning}"

    return read


def _read_retry_times(name: str, text: str) -> Iterator[Finding]:
    times, source = read_number(name, text, low=0, high=100), quote_entry(name, text)
    yield Setting("unconditional", times > 0, source)
    yield Setting(Fact.SERVICE_RETRY, times > 0, source)
    if times:
        yield Setting("max_restarts", times, source)


def _read_scheduling(name: str, text: str) -> Iterator[Finding]:
    if text not in _SCHEDULING:
        raise refusal_of(name, text, " or ".join(_SCHEDULING))
    source = quote_entry(name, text)
    yield Setting(Fact.FAULT_SCHEDULING, text, source)
    if text == "off":
        yield Setting("unconditional", False, source)
        yield Setting("pod_retries", False, source)
    yield f"{source}: {_SCHEDULING[text]}"


_SCHEDULING = {
    "grace": "after a fault SIGKILL follows SIGTERM by restart.failover_grace_s, not 15 minutes",
    "force": "workers still get restart.failover_grace_s between SIGTERM and SIGKILL",
    "off": "a node or chip fault still moves the job, up to max_restarts times",
}
_SUB_HEALTHY_GOES_ON = "the job goes on where it is; only later placements avoid the node"
_RESTART_POLICIES = ("Never", "Always", "OnFailure", "ExitCode")
_POLICY_OF_KUBELET = "containers are started again by the ladder, never by the kubelet"

# ModelArts' annotations are a whole: its guide on fault recovery switches automatic restarts, and
# in-place recovery with them, on by job-retry-num; unconditional restart, restart upon suspension
# and Pod rescheduling are off unless their annotation is there.
_PREFIX = "fault-tolerance/"
_JOB_RETRY_NUM = f"{_PREFIX}job-retry-num"
GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"
NO_LIMIT = -1
_NEED_RESTARTS = (f"{_PREFIX}hang-retry", f"{_PREFIX}pod-retry-num")

# Our fields where the annotation that switches them on is absent.
_ABSENT: Mapping[str, Mapping[str, Value]] = {
    _JOB_RETRY_NUM: {"max_restarts": 0, "in_place": False},
    f"{_PREFIX}job-unconditional-retry": {"unconditional": False},
    f"{_PREFIX}hang-retry": {"hang": False},
    f"{_PREFIX}pod-retry-num": {"pod_retries": 0},
    f"{_PREFIX}hccl_op_retry": {"operator_retry": False},
}


def _read_grace(name: str, text: str) -> Iterator[Finding]:
    """Read MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS; its default, -1, waits for the unmount."""
    if not re.fullmatch(r"-1|[0-9]{1,5}", text) or int(text) > MAX_GRACE_S:
        raise refusal_of(name, text, f"a number from {NO_LIMIT} to {MAX_GRACE_S}")
    yield Setting("unmount_after_s", int(text), quote_entry(name, text))


# MindFormers' monitor_config, for steps whose gradient norm is abnormal: without monitor_on nothing
# notices them, and TRE is off. Its configuration reference has these defaults: monitor_on and
# check_for_global_norm False, a threshold of 3.0, a count of 10.
MONITOR_ON = "monitor_on"
CHECK = "check_for_global_norm"
THRESHOLD = "global_norm_spike_threshold"
COUNT = "global_norm_spike_count_threshold"
SKIP = "use_skip_data_by_global_norm"
_DEFAULT_THRESHOLD = 3.0
_MAX_COUNT = 1_000_000
_YAML_BOOL = {"True": True, "False": False, "true": True, "false": False}


def _read_switch(name: str, text: str) -> Iterator[Finding]:
    """Check monitor_on or check_for_global_norm; `_read_monitor` combines them."""
    if text not in _YAML_BOOL:
        raise refusal_of(name, text, " or ".join(_YAML_BOOL))
    yield from ()


def _read_threshold(name: str, text: str) -> Iterator[Finding]:
    """Check global_norm_spike_threshold, which matters only beside the switches."""
    _threshold(name, text)
    yield from ()


def _threshold(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[+-]?[0-9]{1,2})?", text):
        raise refusal_of(name, text, "a number above 0")
    value = float(text)
    if value <= 0 or not math.isfinite(value):
        raise refusal_of(name, text, "a number above 0")
    return value


def _read_count(name: str, text: str) -> Iterator[Finding]:
    """Check global_norm_spike_count_threshold, which matters only beside the switches."""
    read_number(name, text, low=1, high=_MAX_COUNT)
    yield from ()


ENTRIES: Mapping[str, PlatformEntry] = {
    _JOB_RETRY_NUM: PlatformEntry(
        Platform.MODELARTS, "1 to 128", "max_restarts", _count_reader("max_restarts")
    ),
    f"{_PREFIX}job-unconditional-retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "unconditional",
        _choice_reader("unconditional", words=_TRUE_FALSE),
    ),
    f"{_PREFIX}hang-retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "hang", _choice_reader("hang", words=_TRUE_FALSE)
    ),
    f"{_PREFIX}pod-retry-num": PlatformEntry(
        Platform.MODELARTS, "1 to 128", "pod_retries", _count_reader("pod_retries")
    ),
    f"{_PREFIX}hccl_op_retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "comm.op_retry.enabled, which must be the same",
        _choice_reader("operator_retry", words=_TRUE_FALSE),
    ),
    GRACE: PlatformEntry(Platform.MODELARTS, "-1 to 86400", "unmount_after_s", _read_grace),
    "MS_ENABLE_TFT": PlatformEntry(
        Platform.MINDFORMERS, "a list of switches, below", "the fields of its switches, below",
        read_tft,
    ),
    SKIP: PlatformEntry(
        Platform.MINDFORMERS, "True, False", "data_skipping",
        _choice_reader("data_skipping", words=_YAML_BOOL),
    ),
    MONITOR_ON: PlatformEntry(
        Platform.MINDFORMERS, "True, False", "no field: switches the next three on", _read_switch
    ),
    CHECK: PlatformEntry(Platform.MINDFORMERS, "True, False", "numeric_retry", _read_switch),
    THRESHOLD: PlatformEntry(
        Platform.MINDFORMERS, "a number above 0", "abnormal_grad_norm; default: 3.0",
        _read_threshold,
    ),
    COUNT: PlatformEntry(
        Platform.MINDFORMERS, f"1 to {_MAX_COUNT}", "max_skipped_in_a_row", _read_count
    ),
    "HIGH_AVAILABILITY": PlatformEntry(
        Platform.MINDSPEED, "comma list: " + ", ".join(_AVAILABILITY),
        "end_of_life_checkpoint; retry: memory_retry, collective_retry; recover: process_replace, "
        "node_replace",
        _read_availability,
    ),
    "--enable-high-availability": PlatformEntry(
        Platform.MINDSPEED, "true, false", "end_of_life_checkpoint",
        _flag_reader(
            "end_of_life_checkpoint", without=(*_STRATEGIES["retry"], *_STRATEGIES["recover"])
        ),
    ),
    "--enable-hbmfault-repair": PlatformEntry(
        Platform.MINDSPEED, "true, false", ", ".join(_STRATEGIES["retry"]),
        _flag_reader(*_STRATEGIES["retry"]),
    ),
    "--enable-worker-reboot": PlatformEntry(
        Platform.MINDSPEED, "true, false", ", ".join(_STRATEGIES["recover"]),
        _flag_reader(*_STRATEGIES["recover"]),
    ),
    "--enable-elastic-training": PlatformEntry(
        Platform.MINDSPEED, "true, false", "-", _flag_reader(warning=_ELASTIC)
    ),
    "--distributed-optimizer-no-replica": PlatformEntry(
        Platform.MINDSPEED, "true, false", "-", _flag_reader(warning=_NO_REPLICA)
    ),
    "recover-strategy": PlatformEntry(
        Platform.MINDCLUSTER, "comma list: " + ", ".join(_STRATEGIES),
        "memory_retry, collective_retry, process_replace, node_replace, process_in_place, "
        "end_of_life_checkpoint",
        _read_strategies,
    ),
    "fault-scheduling": PlatformEntry(
        Platform.MINDCLUSTER, "grace, force, off",
        "off: unconditional=false, pod_retries=0", _read_scheduling,
    ),
    "fault-retry-times": PlatformEntry(
        Platform.MINDCLUSTER, "0 to 100", "unconditional, max_restarts", _read_retry_times
    ),
    "pod-rescheduling": PlatformEntry(
        Platform.MINDCLUSTER, "on, off", "pod_retries: 128 or 0",
        _choice_reader("pod_retries", words={"on": True, "off": False}),
    ),
    "subHealthyStrategy": PlatformEntry(
        Platform.MINDCLUSTER, "ignore, graceExit, forceExit, hotSwitch", "-",
        _fact_reader(
            Fact.SUB_HEALTHY, ("ignore", "graceExit", "forceExit", "hotSwitch"),
            dict.fromkeys(("graceExit", "forceExit", "hotSwitch"), _SUB_HEALTHY_GOES_ON),
        ),
    ),
    "restartPolicy": PlatformEntry(
        Platform.MINDCLUSTER, ", ".join(_RESTART_POLICIES), "-",
        _fact_reader(
            Fact.RESTART_POLICY, _RESTART_POLICIES,
            dict.fromkeys(("Always", "OnFailure", "ExitCode"), _POLICY_OF_KUBELET),
        ),
    ),
}  # fmt: skip

# Further entries: they set nothing that a restart policy could hold.
IGNORED_ENTRIES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "job_template", "jupyter-lab/enable", "tensorboard/enable",
            "mindstudio-insight/enable", "performance_diagnosis_enabled", "record/code-dir",
            "framework", "ring-controller.atlas", "tor-affinity",
            "huawei.com/schedule_policy", "huawei.com/schedule_minAvailable",
        ),
        "is not about recovery",
    ),
    "sp-block": "is engine.volcano.sp_block here",
    "process-recover-enable": "follows from recover-strategy",
    "huawei.com/recover_policy_path": "a rescheduled pod that fails goes on to the job level here",
    "wait-reschedule-timeout": "is restart.spare_wait_s here",
    "MINDIO_FOR_MINDSPORE": "has no meaning without MindIO",
    "MS_TFT_IP": "has no meaning without MindIO",
    "MS_TFT_PORT": "has no meaning without MindIO",
}  # fmt: skip


def read_platform(
    entries: Mapping[str, str], *, job_settings: Sequence[Setting] = ()
) -> ImportedSettings:
    """Read annotations, labels and environment variables, all in one mapping.

    Args:
        entries: name to text, as the platform has them.
        job_settings: settings of the job file; must not contradict the entries.

    Raises:
        InputError: an unknown name, a value that is not allowed, or two settings that
            contradict or exclude each other; names both.
    """
    findings: list[Finding] = []
    warnings: list[str] = []
    for name, text in entries.items():
        if name in IGNORED_ENTRIES:
            warnings.append(f"{name}: {IGNORED_ENTRIES[name]}, ignored")
            continue
        if name not in ENTRIES:
            raise InputError(name, f"{text!r}: no such setting; {_hint(name)}")
        findings += ENTRIES[name].read(name, text)
    findings += _read_absent(entries)
    findings += _read_monitor(entries)
    settings = [finding for finding in findings if isinstance(finding, Setting)]
    warnings += [finding for finding in findings if isinstance(finding, str)]
    return combine_settings([*settings, *job_settings], warnings)


def _hint(name: str) -> str:
    by_leaf = {name.rpartition("/")[2]: name for name in ENTRIES}
    close = difflib.get_close_matches(name.rpartition("/")[2], by_leaf, n=1)
    return f"did you mean {by_leaf[close[0]]}?" if close else f"known are {', '.join(ENTRIES)}"


def _read_absent(entries: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the settings that absent annotations imply; none where a job has no annotation at all.

    Raises:
        InputError: an annotation needs job-retry-num, which is absent.
    """
    if not any(name.startswith(_PREFIX) for name in entries):
        return
    if _JOB_RETRY_NUM not in entries:
        for name in _NEED_RESTARTS:
            if entries.get(name, "false") != "false":
                text = f"{entries[name]!r} needs {_JOB_RETRY_NUM}, a number from 1 to 128"
                raise InputError(name, text)
        entries_text = ", ".join(quote_entry(name, text) for name, text in entries.items())
        yield f"{entries_text} without {_JOB_RETRY_NUM}: the job is never restarted"
    for name, fields in _ABSENT.items():
        if name not in entries:
            for field, value in fields.items():
                yield Setting(field, value, f"the absence of {name}", is_implied=True)


def _read_monitor(entries: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the settings that the entries of monitor_config make together."""
    is_checked, skips = _is_on(entries, CHECK), _is_on(entries, SKIP)
    if CHECK in entries and not is_checked:
        yield Setting("numeric_retry", value=False, source=quote_entry(CHECK, entries[CHECK]))
    if not _is_on(entries, MONITOR_ON):
        names = [name for name in (THRESHOLD, COUNT) if name in entries]
        for name in [CHECK] * is_checked + names:
            yield f"{quote_entry(name, entries[name])} has no effect without {MONITOR_ON}='True'"
        return
    if is_checked:
        yield Setting("numeric_retry", value=True, source=quote_entry(CHECK, entries[CHECK]))
    if not (is_checked or skips or (TFT in entries and has_tre(TFT, entries[TFT]))):
        yield f"{MONITOR_ON}='True': nothing of it is an answer without {CHECK} or {SKIP}"
        return
    if THRESHOLD in entries:
        text = entries[THRESHOLD]
        source = quote_entry(THRESHOLD, text)
        yield Setting("abnormal_grad_norm", _threshold(THRESHOLD, text), source)
    else:
        source = f"{MONITOR_ON}='True' without {THRESHOLD}"
        yield Setting("abnormal_grad_norm", _DEFAULT_THRESHOLD, source, is_implied=True)
    if COUNT in entries:
        source = quote_entry(COUNT, entries[COUNT])
        if skips:
            count = read_number(COUNT, entries[COUNT], low=1, high=_MAX_COUNT)
            yield Setting("max_skipped_in_a_row", count, source)
        else:
            yield f"{source} has no effect without {SKIP}='True'"


def _is_on(entries: Mapping[str, str], name: str) -> bool:
    return _YAML_BOOL.get(entries.get(name, "False"), False)
