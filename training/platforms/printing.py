"""Our policy as a platform's recovery settings.

What is printed is read back, so that every field which the platform cannot hold, or holds
differently, is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from training.platforms.forms import Platform, read_platform
from training.platforms.settings import Value, shown
from training.recovery.rungs import Policy, RestartCount

Entries = dict[str, str]


@dataclass(frozen=True, slots=True)
class Printed:
    """A policy as a platform's entries.

    Attributes:
        entries: name to text.
        warnings: one line for each field that the entries cannot hold: "field=value: why".
    """

    entries: Mapping[str, str]
    warnings: tuple[str, ...]


def print_platform(policy: Policy, platform: Platform) -> Printed:
    """The entries for `platform`, and what they cannot hold."""
    entries = _PRINTERS[platform](policy)
    read = read_platform(entries).fields
    unnamed: dict[str, Any] = {**asdict(Policy()), **_UNNAMED[platform]}
    warnings = []
    for name, value in asdict(policy).items():
        has_no_effect = name == "process_in_place" and not policy.process_replace
        if has_no_effect or value == read.get(name, unnamed[name]):
            continue
        why = f"can only be {shown(read[name])}" if name in read else _no_entry(name, unnamed)
        warnings.append(f"{name}={shown(value)}: {platform} {why}")
    return Printed(entries, tuple(warnings))


def _no_entry(name: str, unnamed: Mapping[str, Value]) -> str:
    return f"has no entry for it, there it is {shown(unnamed[name])}"


def _modelarts(policy: Policy) -> Entries:
    prefix = "fault-tolerance/"
    pods = policy.pod_retries if policy.max_restarts else 0
    counts = {"job-retry-num": policy.max_restarts, "pod-retry-num": pods}
    switches = {
        "job-unconditional-retry": policy.unconditional,
        "hang-retry": policy.hang and policy.max_restarts > 0,
        "hccl_op_retry": policy.operator_retry,
    }
    entries = {prefix + name: str(min(n, 128)) for name, n in counts.items() if n > 0}
    return entries | {prefix + name: shown(on) for name, on in switches.items()}


def _mindformers(policy: Policy) -> Entries:
    switches = {
        "TTP": policy.end_of_life_checkpoint,
        "UCE": policy.memory_retry,
        "HCCE": policy.collective_retry,
        "ARF": policy.process_replace,
        "TRE": policy.numeric_retry,
        "RSC": policy.pod_retries > 0,
    }
    named = ",".join(f"{key}:{int(on)}" for key, on in switches.items())
    skipping = {"use_skip_data_by_global_norm": "True"} if policy.data_skipping else {}
    return {"MS_ENABLE_TFT": f"{{{named}}}", **skipping}


def _in_process(policy: Policy) -> list[str]:
    words = {
        "retry": policy.memory_retry or policy.collective_retry,
        "recover": policy.process_replace,
        "dump": policy.end_of_life_checkpoint,
    }
    return [word for word, on in words.items() if on]


def _mindspeed(policy: Policy) -> Entries:
    words = _in_process(policy)
    return {"HIGH_AVAILABILITY": ",".join(words)} if words else {}


def _mindcluster(policy: Policy) -> Entries:
    times = min(policy.max_restarts, 100) if policy.unconditional else 0
    entries = {
        "fault-scheduling": "grace",
        "fault-retry-times": str(times),
        "pod-rescheduling": "on" if policy.pod_retries > 0 else "off",
        "subHealthyStrategy": "ignore",
        "restartPolicy": "Never",
    }
    # Process-level recovery asks for fault-retry-times; without it only the last save is left.
    words = _in_process(policy) if times else [w for w in _in_process(policy) if w == "dump"]
    if "recover" in words and policy.process_in_place:
        words.insert(words.index("recover"), "recover-in-place")
    return entries | {"recover-strategy": ",".join([*words, "exit"])}


_PRINTERS: Mapping[Platform, Callable[[Policy], Entries]] = {
    Platform.MODELARTS: _modelarts,
    Platform.MINDFORMERS: _mindformers,
    Platform.MINDSPEED: _mindspeed,
    Platform.MINDCLUSTER: _mindcluster,
}

# What a platform does about a field that none of its entries names, where that is not our
# default: ModelArts counts every restart of a job and its annotations know no recovery inside the
# processes; MindSpeed-LLM without HIGH_AVAILABILITY has none.
_NONE_IN_PROCESS: Mapping[str, Value] = {
    "memory_retry": False,
    "collective_retry": False,
    "process_replace": False,
    "end_of_life_checkpoint": False,
}
_UNNAMED: Mapping[Platform, Mapping[str, Value]] = {
    Platform.MODELARTS: {**_NONE_IN_PROCESS, "count": RestartCount.EVER},
    Platform.MINDFORMERS: {},
    Platform.MINDSPEED: _NONE_IN_PROCESS,
    Platform.MINDCLUSTER: {},
}
