"""ModelArts' annotations, taken together: one that a job does not have is off there.

Its guide on fault recovery: job-retry-num switches automatic restarts on, and in-place recovery
with them; hang-retry and pod-retry-num are given beside it; unconditional restart, restart upon
suspension and Pod rescheduling are off unless their annotation is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from perdure.training.errors import InputError
from perdure.training.platforms.settings import (
    MAX_GRACE_S,
    Finding,
    Setting,
    Value,
    quote_entry,
    refusal_of,
)

PREFIX = "fault-tolerance/"
JOB_RETRY_NUM = f"{PREFIX}job-retry-num"
GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"
NO_FORCED_END = -1
_NEED_RESTARTS = (f"{PREFIX}hang-retry", f"{PREFIX}pod-retry-num")

# Our fields when the annotation that switches them on is absent.
_ABSENT: Mapping[str, Mapping[str, Value]] = {
    JOB_RETRY_NUM: {"max_restarts": 0, "in_place": False},
    f"{PREFIX}job-unconditional-retry": {"unconditional": False},
    f"{PREFIX}hang-retry": {"hang": False},
    f"{PREFIX}pod-retry-num": {"pod_retries": 0},
    f"{PREFIX}hccl_op_retry": {"operator_retry": False},
    GRACE: {"failover_grace_s": NO_FORCED_END},
}


def read_grace(name: str, text: str) -> Iterator[Finding]:
    """MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS: -1, its default, is no forced end."""
    if not re.fullmatch(r"-1|[0-9]{1,5}", text) or int(text) > MAX_GRACE_S:
        raise refusal_of(name, text, f"a number from {NO_FORCED_END} to {MAX_GRACE_S}")
    yield Setting("failover_grace_s", int(text), quote_entry(name, text))


def read_absent(entries: Mapping[str, str]) -> Iterator[Finding]:
    """What follows from the annotations that are not there; nothing where there are none at all.

    Raises:
        InputError: an annotation needs job-retry-num, which is not there.
    """
    if not any(name.startswith(PREFIX) for name in entries):
        return
    if JOB_RETRY_NUM not in entries:
        for name in _NEED_RESTARTS:
            if entries.get(name, "false") != "false":
                text = f"{entries[name]!r} needs {JOB_RETRY_NUM}, a number from 1 to 128"
                raise InputError(name, text)
        entries_text = ", ".join(quote_entry(name, text) for name, text in entries.items())
        yield f"{entries_text} without {JOB_RETRY_NUM}: the job is never restarted"
    for name, fields in _ABSENT.items():
        if name not in entries:
            for field, value in fields.items():
                yield Setting(field, value, f"the absence of {name}", is_implied=True)
