"""What of the lines of Prefect's task engine stays in the log of a run."""

from __future__ import annotations

import logging

import pytest

from perdure.tasks.engine_log import AttemptLines


def written(text: str, task: str, level: int = logging.ERROR) -> bool:
    record = logging.LogRecord("prefect.task_runs", level, "task_engine.py", 1, text, (), None)
    record.task_name = task
    return AttemptLines().filter(record)


ABORTED = "Crash detected! Execution was interrupted by an unexpected exception: "


@pytest.mark.parametrize(
    ("text", "task", "stays"),
    [
        (ABORTED + "NotWanted: a stop was requested before the restart", "train", False),
        (ABORTED + "SystemExit: 3", "train", True),
        (ABORTED + "NotWanted: of another task", "prepare", True),
        ("Finished in state RestartInPlace('native_crash')", "attempt", False),
        ("Task run failed with state RestartInPlace", "attempt", False),
        ("Task run failed with exception: OSError", "attempt", True),
    ],
)
def test_only_the_end_of_an_attempt_is_left_out(text, task, stays):
    assert written(text, task) is stays
