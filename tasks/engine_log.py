"""Filter of the lines that Prefect's task engine logs about states which tasks return.

For a task that returns a failed state it writes three to five lines (3.8.8): "Task run failed
with state ... NoneType: None", "Retry 1/100 will start", "Running hook ...", "Finished in state".
The end of an attempt is one line of Perdure's own; what an exception leaves behind stays, but for
the one that ends the wait before a restart: "Crash detected!" is not what a user's cancel is.
"""

from __future__ import annotations

import logging

from perdure.tasks.retry_delay import NotWanted

TASK_LOGGER = "prefect.task_runs"
ATTEMPT_TASKS = frozenset({"train", "attempt"})
_MODULE = "task_engine"
_STARTS = ("Task run failed with state", "Running hook", "Hook ")
_END = "Finished in state"
_CRASH = "Crash detected!"


class AttemptLines(logging.Filter):
    """Leaves out what the engine writes about attempts whose end has a line of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if record.module != _MODULE or getattr(record, "task_name", None) not in ATTEMPT_TASKS:
            return True
        text = record.getMessage()
        failed = record.levelno >= logging.ERROR and text.startswith(_END)
        not_wanted = text.startswith(_CRASH) and NotWanted.__name__ in text
        return not (failed or not_wanted or text.startswith(_STARTS))


def silence_engine_log() -> None:
    """Filter the task engine's log in this process; once is enough."""
    logger = logging.getLogger(TASK_LOGGER)
    if not any(isinstance(log_filter, AttemptLines) for log_filter in logger.filters):
        logger.addFilter(AttemptLines())
