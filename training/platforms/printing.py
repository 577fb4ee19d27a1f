"""Our policy as the recovery settings of a platform.

The printed entries are read back, so that every field which the platform cannot hold, or holds
differently, is a warning.

Sources of the places of entries: ModelArts' training job annotations (JobMetadata of its API);
MindFormers "Training High Availability" and "Data Skipping"; MindSpeed-LLM "High Availability";
MindCluster "Job YAML Configuration".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perdure.training.platforms.forms import (
    CHECK,
    COUNT,
    GRACE,
    MONITOR_ON,
    SKIP,
    THRESHOLD,
    Platform,
    read_platform,
)
from perdure.training.platforms.settings import Value, format_value
from perdure.training.platforms.tft import TFT, read_snapshot_steps
from perdure.training.recovery.rungs import Policy, RestartCount

Entries = dict[str, str]


class EntryPlace(StrEnum):
    """A place for entries on their platform."""

    LABELS = "metadata.labels"
    ANNOTATIONS = "metadata.annotations"
    POD = "pod template, spec"
    JOB_VARIABLES = "environment variables of the job"
    SHELL = "the shell that starts the program"
    CONFIG = "MindFormers' YAML configuration"


_PLACES: Mapping[str, EntryPlace] = {
    GRACE: EntryPlace.JOB_VARIABLES,
    TFT: EntryPlace.SHELL,
    "HIGH_AVAILABILITY": EntryPlace.SHELL,
    **dict.fromkeys((SKIP, MONITOR_ON, CHECK, THRESHOLD, COUNT), EntryPlace.CONFIG),
    "recover-strategy": EntryPlace.ANNOTATIONS,
    "restartPolicy": EntryPlace.POD,
    "fault-scheduling": EntryPlace.LABELS,
    "fault-retry-times": EntryPlace.LABELS,
    "pod-rescheduling": EntryPlace.LABELS,
    "subHealthyStrategy": EntryPlace.LABELS,
}


@dataclass(frozen=True, slots=True)
class ExportedPolicy:
    """A policy as the entries of a platform.

    Attributes:
        entries: text by name.
        warnings: a line for each field that the entries cannot hold: "field=value: why".
        without_entry: fields without an entry, which the platform handles as the policy does;
            reading the entries back gives our default of them.
    """

    entries: Mapping[str, str]
    warnings: tuple[str, ...]
    without_entry: Mapping[str, Value]

    def by_place(self) -> Mapping[EntryPlace, Entries]:
        """Group the entries by the places where they belong."""
        places: dict[EntryPlace, Entries] = {}
        for name, text in self.entries.items():
            place = _PLACES.get(name, EntryPlace.ANNOTATIONS)  # all of fault-tolerance/
            places.setdefault(place, {})[name] = text
        return {place: places[place] for place in EntryPlace if place in places}


def print_platform(
    policy: Policy, platform: Platform, *, extras: Mapping[str, Value] | None = None
) -> ExportedPolicy:
    """Print a policy as entries of a platform, with warnings of the fields that they cannot hold.

    Args:
        policy: rungs and limits of the job.
        platform: names and forms the entries.
        extras: further fields of the section `restart`: unmount_after_s and
            snapshot_every_steps have entries, any other field is a warning.
    """
    extras = extras or {}
    entries = _PRINTERS[platform](policy) | _print_extras(policy, platform, extras)
    read = {**read_platform(entries).fields, **_read_snapshot_steps(entries)}
    default = Policy().model_dump()
    unnamed: dict[str, Any] = {**default, **_UNNAMED[platform]}
    warnings, without_entry = [], {}
    for name, value in policy.model_dump().items():
        has_no_effect = name == "process_in_place" and not policy.process_replace
        if has_no_effect or value == read.get(name, unnamed[name]):
            if name not in read and value != default[name] and not has_no_effect:
                without_entry[name] = value
            continue
        why = (
            f"can only be {format_value(read[name])}"
            if name in read
            else _describe_lack(name, platform)
        )
        warnings.append(f"{name}={format_value(value)}: {platform} {why}")
    for name, value in extras.items():
        if read.get(name) != value:
            warnings.append(f"{name}={format_value(value)}: {platform} has no entry for it")
    return ExportedPolicy(entries, tuple(warnings), without_entry)


def _print_extras(policy: Policy, platform: Platform, extras: Mapping[str, Value]) -> Entries:
    after_s, steps = extras.get("unmount_after_s"), extras.get("snapshot_every_steps")
    if platform is Platform.MODELARTS and after_s is not None:
        return {GRACE: str(after_s)}
    if platform is not Platform.MINDFORMERS:
        return {}
    entries = _print_monitor(policy, extras)
    if policy.numeric_retry and steps is not None:
        entries[TFT] = _print_tft(policy, snapshot_every_steps=steps)
    return entries


def _print_monitor(policy: Policy, extras: Mapping[str, Value]) -> Entries:
    """Print monitor_config, where the job has a setting that it can hold."""
    norm, count = extras.get("abnormal_grad_norm"), extras.get("max_skipped_in_a_row")
    if norm is None or not (policy.numeric_retry or policy.data_skipping):
        return {}
    entries = {MONITOR_ON: "True", CHECK: str(policy.numeric_retry), THRESHOLD: str(norm)}
    return entries | ({COUNT: str(count)} if count is not None and policy.data_skipping else {})


def _read_snapshot_steps(entries: Entries) -> Mapping[str, int]:
    steps = read_snapshot_steps(TFT, entries[TFT]) if TFT in entries else None
    return {} if steps is None else {"snapshot_every_steps": steps}


def _describe_lack(name: str, platform: Platform) -> str:
    value = _UNNAMED[platform].get(name)
    return "has no entry for it" + (
        f", there it is {format_value(value)}" if value is not None else ""
    )


def _print_modelarts(policy: Policy) -> Entries:
    prefix = "fault-tolerance/"
    pods = policy.pod_retries if policy.max_restarts else 0
    counts = {"job-retry-num": policy.max_restarts, "pod-retry-num": pods}
    switches = {
        "job-unconditional-retry": policy.unconditional,
        "hang-retry": policy.hang and policy.max_restarts > 0,
        "hccl_op_retry": policy.operator_retry,
    }
    entries = {prefix + name: str(min(n, 128)) for name, n in counts.items() if n > 0}
    return entries | {prefix + name: format_value(on) for name, on in switches.items()}


def _print_mindformers(policy: Policy) -> Entries:
    skipping = {SKIP: "True"} if policy.data_skipping else {}
    return {TFT: _print_tft(policy), **skipping}


def _print_tft(policy: Policy, *, snapshot_every_steps: Value | None = None) -> str:
    """Print MS_ENABLE_TFT; TRE:2 goes back to a snapshot as ours does, TRE:1 to a checkpoint."""
    has_steps = policy.numeric_retry and snapshot_every_steps is not None
    switches = {
        "TTP": policy.end_of_life_checkpoint,
        "UCE": policy.memory_retry,
        "HCCE": policy.collective_retry,
        "ARF": policy.process_replace,
        "TRE": 2 if has_steps else policy.numeric_retry,
        "RSC": policy.pod_retries > 0,
    }
    steps = [f"TRE_SNAPSHOT_STEPS:{snapshot_every_steps}"] if has_steps else []
    named = ",".join([*(f"{key}:{int(on)}" for key, on in switches.items()), *steps])
    return f"{{{named}}}"


def _in_process_words(policy: Policy) -> list[str]:
    words = {
        "retry": policy.memory_retry or policy.collective_retry,
        "recover": policy.process_replace or policy.node_replace,
        "dump": policy.end_of_life_checkpoint,
    }
    return [word for word, on in words.items() if on]


def _print_mindspeed(policy: Policy) -> Entries:
    words = _in_process_words(policy)
    return {"HIGH_AVAILABILITY": ",".join(words)} if words else {}


def _print_mindcluster(policy: Policy) -> Entries:
    times = min(policy.max_restarts, 100) if policy.unconditional else 0
    entries = {
        "fault-scheduling": "grace",
        "fault-retry-times": str(times),
        "pod-rescheduling": "on" if policy.pod_retries > 0 else "off",
        "subHealthyStrategy": "ignore",
        "restartPolicy": "Never",
    }
    # Process-level recovery asks for fault-retry-times; without it only the last save is left.
    words = (
        _in_process_words(policy)
        if times
        else [w for w in _in_process_words(policy) if w == "dump"]
    )
    if "recover" in words and policy.process_replace:
        at = words.index("recover")
        in_place = (
            ["recover-in-place"] if policy.process_in_place or not policy.node_replace else []
        )
        words[at : at + 1] = [*in_place, *(["recover"] if policy.node_replace else [])]
    return entries | {"recover-strategy": ",".join([*words, "exit"])}


_PRINTERS: Mapping[Platform, Callable[[Policy], Entries]] = {
    Platform.MODELARTS: _print_modelarts,
    Platform.MINDFORMERS: _print_mindformers,
    Platform.MINDSPEED: _print_mindspeed,
    Platform.MINDCLUSTER: _print_mindcluster,
}

# Values of fields that no entry of a platform names, where it differs from our
# default: ModelArts counts every restart of a job and its annotations know no recovery inside the
# processes; MindSpeed-LLM without HIGH_AVAILABILITY has none.
_NONE_IN_PROCESS: Mapping[str, Value] = {
    "memory_retry": False,
    "collective_retry": False,
    "process_replace": False,
    "node_replace": False,
    "end_of_life_checkpoint": False,
}
_UNNAMED: Mapping[Platform, Mapping[str, Value]] = {
    Platform.MODELARTS: {**_NONE_IN_PROCESS, "count": RestartCount.EVER},
    Platform.MINDFORMERS: {},
    Platform.MINDSPEED: _NONE_IN_PROCESS,
    Platform.MINDCLUSTER: {},
}
