"""MindFormers' monitor_config, as far as it is about steps whose gradient norm is abnormal.

Sources: MindFormers "Training High Availability" (monitor_on is required: only then are abnormal
norms seen, and TRE is on), "Data Skip And Checkpoint Health Monitor", and the defaults of its
configuration reference: monitor_on and check_for_global_norm False, a threshold of 3.0, a count
of 10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from perdure.training.platforms.settings import (
    Finding,
    Setting,
    quote_entry,
    read_number,
    refusal_of,
)
from perdure.training.platforms.tft import TFT, has_tre

MONITOR_ON = "monitor_on"
CHECK = "check_for_global_norm"
THRESHOLD = "global_norm_spike_threshold"
COUNT = "global_norm_spike_count_threshold"
SKIP = "use_skip_data_by_global_norm"
DEFAULT_THRESHOLD = 3.0
MAX_COUNT = 1_000_000
YAML_BOOL = {"True": True, "False": False, "true": True, "false": False}


def read_switch(name: str, text: str) -> Iterator[Finding]:
    """monitor_on or check_for_global_norm, whose meaning depends on each other."""
    if text not in YAML_BOOL:
        raise refusal_of(name, text, " or ".join(YAML_BOOL))
    yield from ()


def read_threshold(name: str, text: str) -> Iterator[Finding]:
    """global_norm_spike_threshold, which matters only beside the switches."""
    _threshold(name, text)
    yield from ()


def read_count(name: str, text: str) -> Iterator[Finding]:
    """global_norm_spike_count_threshold, likewise."""
    read_number(name, text, low=1, high=MAX_COUNT)
    yield from ()


def read_monitor(entries: Mapping[str, str]) -> Iterator[Finding]:
    """What the entries of monitor_config mean together; all of them have been read already."""
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
        yield Setting("abnormal_grad_norm", DEFAULT_THRESHOLD, source, is_implied=True)
    if COUNT in entries:
        source = quote_entry(COUNT, entries[COUNT])
        if skips:
            count = read_number(COUNT, entries[COUNT], low=1, high=MAX_COUNT)
            yield Setting("max_skipped_in_a_row", count, source)
        else:
            yield f"{source} has no effect without {SKIP}='True'"


def _is_on(entries: Mapping[str, str], name: str) -> bool:
    return YAML_BOOL.get(entries.get(name, "False"), False)


def _threshold(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[+-]?[0-9]{1,2})?", text):
        raise refusal_of(name, text, "a number above 0")
    value = float(text)
    if value <= 0 or not math.isfinite(value):
        raise refusal_of(name, text, "a number above 0")
    return value
