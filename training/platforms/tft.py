"""MS_ENABLE_TFT, the fault-tolerance switches of MindSpore: "{TTP:1,UCE:1,ARF:1}".

Sources: MindFormers "Training High Availability" (keys, what brings what with it) and
MindSpore's own parser, tools/error_handler/error_config.cc (optional braces, TRE:2 with
TRE_SNAPSHOT_STEPS). A switch that is not named is off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perdure.training.errors import InputError
from perdure.training.platforms.settings import Finding, Setting, read_number

_ON_OFF = ("0", "1")
_STEPS = "TRE_SNAPSHOT_STEPS"
TFT = "MS_ENABLE_TFT"


@dataclass(frozen=True, slots=True)
class _Switch:
    """A key of MS_ENABLE_TFT: the settings that it switches on, and its values."""

    settings: tuple[str, ...]
    values: tuple[str, ...] = _ON_OFF


# UCE and ARF bring the last save before the end (TTP) with them.
_TFT: Mapping[str, _Switch] = {
    "TTP": _Switch(("end_of_life_checkpoint",)),
    "UCE": _Switch(("memory_retry", "end_of_life_checkpoint")),
    "HCCE": _Switch(("collective_retry",)),
    "ARF": _Switch(
        ("process_replace", "process_in_place", "node_replace", "end_of_life_checkpoint")
    ),
    "TRE": _Switch(("numeric_retry",), ("0", "1", "2")),
    "TSP": _Switch(()),
    # What answers once the others have failed, in place of a restart of all processes.
    "RSC": _Switch(("pod_retries", "pod_before_in_place")),
    _STEPS: _Switch((), ()),
}
_SETTINGS = tuple(dict.fromkeys(name for switch in _TFT.values() for name in switch.settings))
_FORM = "{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1,TSP:1,RSC:1}, each 0 or 1 (TRE also 2)"


def _tft_values(name: str, text: str) -> dict[str, str]:
    """Split "{TTP:1,UCE:1}" into keys and values; braces are optional, as MindSpore has it."""
    inner = re.sub(r"\s*:\s*", ":", text.strip().strip("'\"").strip().strip("{}").strip())
    values: dict[str, str] = {}
    for item in filter(None, re.split(r"[,\s]+", inner)):
        key, _, value = item.partition(":")
        if key not in _TFT:
            raise InputError(name, f"{item!r}: no such switch, allowed is {_FORM}")
        if values.setdefault(key, value) != value:
            raise InputError(name, f"{key}:{values[key]} and {item} contradict each other")
        allowed = _TFT[key].values
        if allowed and value not in allowed:
            raise InputError(name, f"{key}:{value} must be {key}:{f' or {key}:'.join(allowed)}")
    return values


def read_tft(name: str, text: str) -> Iterator[Finding]:
    """Read all switches at once: a switch that is not named is off."""
    values = _tft_values(name, text)
    on = {key: values.get(key, "0") != "0" for key in _TFT}
    for setting in _SETTINGS:
        keys = [key for key, switch in _TFT.items() if setting in switch.settings]
        value = any(on[key] for key in keys)
        written = [f"{key}:{values[key]}" for key in keys if key in values and on[key] == value]
        source = f"{name} {' '.join(written) or f'without {keys[0]}'}"
        yield Setting(setting, value, source, is_implied=not written)
    yield from _tft_warnings(name, values, on)


def has_tre(name: str, text: str) -> bool:
    """Whether abnormal steps are executed again.

    Raises:
        InputError: the list is wrong.
    """
    return _tft_values(name, text).get("TRE", "0") != "0"


def read_snapshot_steps(name: str, text: str) -> int | None:
    """Read TRE_SNAPSHOT_STEPS; the job has such an interval, the policy of the ladder has none.

    Raises:
        InputError: the list or the number is wrong.
    """
    return _snapshot_steps(name, _tft_values(name, text))


def _snapshot_steps(name: str, values: Mapping[str, str]) -> int | None:
    if _STEPS not in values:
        return None
    return read_number(f"{name} {_STEPS}", values[_STEPS], low=1, high=1_000_000)


def _tft_warnings(name: str, values: Mapping[str, str], on: Mapping[str, bool]) -> Iterator[str]:
    if values.get("TTP") == "0" and (on["UCE"] or on["ARF"]):
        yield f"{name} TTP:0 has no effect beside UCE or ARF: end_of_life_checkpoint is on"
    if on["TSP"]:
        yield f"{name} TSP:1: pausing between steps has no switch in the restart policy"
    if values.get("TRE") == "1":
        yield f"{name} TRE:1 restarts from a checkpoint: numeric_retry re-executes from a snapshot"
    steps = _snapshot_steps(name, values)
    if steps is not None and not on["TRE"]:
        yield f"{name} {_STEPS}:{steps} has no effect without TRE: numeric_retry is off"
    if steps is None and values.get("TRE") == "2":
        raise InputError(name, f"TRE:2 without {_STEPS}: it needs {_STEPS}:1 or more")
