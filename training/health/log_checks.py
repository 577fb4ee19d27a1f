"""Whether CANN's own logs (plog) will be there when a fault has to be explained.

They are read by the diagnosis and collected with the other logs of an attempt. What the variables
mean: CANN, environment variables, "Log" (envref_07_0121 and following).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from perdure.training.environment import variables_of
from perdure.training.job import Job
from perdure.training.wire.node import Check, CheckOutcome

NAME = "device_logs"
LEVEL = "ASCEND_GLOBAL_LOG_LEVEL"
PRINTED = "ASCEND_SLOG_PRINT_TO_STDOUT"
FOLDER = "ASCEND_PROCESS_LOG_PATH"
_LEVELS = ("debug", "info", "warning", "error", "none")
_DETAILED = frozenset({"0", "1"})
_NONE = "4"


def check_logs(job: Job, environment: Mapping[str, str]) -> Check:
    """Level, place and collection of the logs.

    Args:
        job: whose variables come before those of the node.
        environment: of the node.
    """
    values = {**environment, **variables_of(job)}
    level = values[LEVEL]
    problems = list(_problems(job, values))
    seen = f"level {level} ({_LEVELS[int(level)]})"
    return Check(
        name=NAME,
        outcome=CheckOutcome.WARNING if problems else CheckOutcome.OK,
        seen="; ".join([seen, *problems]) if problems else f"{seen}, collected after each attempt",
        allowed="warnings or errors, into files, collected",
    )


def _problems(job: Job, values: Mapping[str, str]) -> Iterator[str]:
    if values[LEVEL] == _NONE:
        yield f"{LEVEL}={_NONE} writes no log: chip and HCCL faults lose their reason"
    if values[LEVEL] in _DETAILED:
        yield f"{LEVEL}={values[LEVEL]} slows every step and fills the disk"
    if values.get(PRINTED) == "1":
        yield f"{PRINTED}=1 prints the logs and writes no file: they push out what ranks print"
    folder = values.get(FOLDER)
    if folder and not PurePosixPath(folder).is_absolute():
        yield f"{FOLDER}={folder} is not absolute: it depends on the folder a rank starts in"
    if job.watch.log_limit_bytes == 0:
        yield "watch.log_limit_bytes=0 collects none: they go with their container"
