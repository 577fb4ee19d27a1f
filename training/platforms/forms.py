"""The entries that platforms know, what each of them sets of our policy, and reading them.

What no entry names keeps its value. MS_ENABLE_TFT, HIGH_AVAILABILITY, recover-strategy and
ModelArts' annotations are complete lists: what they leave out is off.

Sources: ModelArts' training job annotations (JobMetadata of its API, "Fault Recovery
Mechanism"); MindFormers "Training High Availability" and "Data Skipping"; MindSpeed-LLM "High
Availability"; MindCluster "Job YAML Configuration". Counts are recoveries in a row without
progress.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.training.errors import InputError
from perdure.training.platforms.modelarts import GRACE, read_absent, read_grace
from perdure.training.platforms.monitor import (
    CHECK,
    COUNT,
    MAX_COUNT,
    MONITOR_ON,
    SKIP,
    THRESHOLD,
    YAML_BOOL,
    read_count,
    read_monitor,
    read_switch,
    read_threshold,
)
from perdure.training.platforms.settings import (
    Fact,
    Finding,
    ImportedSettings,
    Reader,
    Setting,
    combine_settings,
    quote_entry,
    read_number,
    refusal_of,
)
from perdure.training.platforms.tft import read_tft


class Platform(StrEnum):
    """Where an entry comes from."""

    MODELARTS = "modelarts"
    MINDFORMERS = "mindformers"
    MINDSPEED = "mindspeed"
    MINDCLUSTER = "mindcluster"


@dataclass(frozen=True, slots=True)
class PlatformEntry:
    """One entry that is understood.

    Attributes:
        platform: whose it is.
        allowed: its values, in words.
        becomes: what it becomes, for the documentation.
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
    """A word that switches `setting` on or off."""

    def read(name: str, text: str) -> Iterator[Finding]:
        if text not in words:
            raise refusal_of(name, text, " or ".join(words))
        yield Setting(setting, words[text], quote_entry(name, text))

    return read


def _fact_reader(fact: Fact, words: tuple[str, ...], but: Mapping[str, str]) -> Reader:
    """A word that only matters beside others; `but` holds the warning that it comes with."""

    def read(name: str, text: str) -> Iterator[Finding]:
        if text not in words:
            raise refusal_of(name, text, " or ".join(words))
        yield Setting(fact, text, quote_entry(name, text))
        if text in but:
            yield f"{quote_entry(name, text)}: {but[text]}"

    return read


_TRUE_FALSE = {"true": True, "false": False}


_ELASTIC = "going on with fewer ranks (elastic training) is not a rung of ours"
# exit names what comes when nothing helps; every ladder of ours ends in `stop`. Source: MindCluster
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
    """recover-strategy: what is not in the list is off."""
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
    """HIGH_AVAILABILITY: each word brings dump with it (--enable-high-availability)."""
    words = _split_words(name, text, _AVAILABILITY)
    source = quote_entry(name, text)
    yield Setting("end_of_life_checkpoint", True, source)
    for word in ("retry", "recover"):
        for setting in _STRATEGIES[word]:
            yield Setting(setting, word in words, source, is_implied=word not in words)
    if "elastic-training" in words:
        yield f"{source}: {_ELASTIC}"


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

ENTRIES: Mapping[str, PlatformEntry] = {
    "fault-tolerance/job-retry-num": PlatformEntry(
        Platform.MODELARTS, "1 to 128", "max_restarts", _count_reader("max_restarts")
    ),
    "fault-tolerance/job-unconditional-retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "unconditional",
        _choice_reader("unconditional", words=_TRUE_FALSE),
    ),
    "fault-tolerance/hang-retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "hang", _choice_reader("hang", words=_TRUE_FALSE)
    ),
    "fault-tolerance/pod-retry-num": PlatformEntry(
        Platform.MODELARTS, "1 to 128", "pod_retries", _count_reader("pod_retries")
    ),
    "fault-tolerance/hccl_op_retry": PlatformEntry(
        Platform.MODELARTS, "true, false", "comm.op_retry.enabled, which must be the same",
        _choice_reader("operator_retry", words=_TRUE_FALSE),
    ),
    GRACE: PlatformEntry(Platform.MODELARTS, "-1 to 86400", "failover_grace_s", read_grace),
    "MS_ENABLE_TFT": PlatformEntry(
        Platform.MINDFORMERS, "a list of switches, below", "the fields below", read_tft
    ),
    SKIP: PlatformEntry(
        Platform.MINDFORMERS, "True, False", "data_skipping",
        _choice_reader("data_skipping", words=YAML_BOOL),
    ),
    MONITOR_ON: PlatformEntry(
        Platform.MINDFORMERS, "True, False", "what the next three need", read_switch
    ),
    CHECK: PlatformEntry(Platform.MINDFORMERS, "True, False", "numeric_retry", read_switch),
    THRESHOLD: PlatformEntry(
        Platform.MINDFORMERS, "a number above 0", "abnormal_grad_norm; default: 3.0",
        read_threshold,
    ),
    COUNT: PlatformEntry(
        Platform.MINDFORMERS, f"1 to {MAX_COUNT}", "max_skipped_in_a_row", read_count
    ),
    "HIGH_AVAILABILITY": PlatformEntry(
        Platform.MINDSPEED, "comma list: " + ", ".join(_AVAILABILITY),
        "end_of_life_checkpoint; retry: memory_retry, collective_retry; recover: process_replace, "
        "node_replace",
        _read_availability,
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

# Entries beside the ones above that set nothing a restart policy could hold.
IGNORED_ENTRIES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "job_template", "jupyter-lab/enable", "tensorboard/enable",
            "mindstudio-insight/enable", "performance_diagnosis_enabled", "record/code-dir",
            "framework", "ring-controller.atlas", "tor-affinity", "sp-block",
            "huawei.com/schedule_policy", "huawei.com/schedule_minAvailable",
        ),
        "is not about recovery",
    ),
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
        job_settings: what the job itself sets; must not contradict the entries.

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
    findings += read_absent(entries)
    findings += read_monitor(entries)
    settings = [finding for finding in findings if isinstance(finding, Setting)]
    warnings += [finding for finding in findings if isinstance(finding, str)]
    return combine_settings([*settings, *job_settings], warnings)


def _hint(name: str) -> str:
    by_leaf = {name.rpartition("/")[2]: name for name in ENTRIES}
    close = difflib.get_close_matches(name.rpartition("/")[2], by_leaf, n=1)
    return f"did you mean {by_leaf[close[0]]}?" if close else f"known are {', '.join(ENTRIES)}"
