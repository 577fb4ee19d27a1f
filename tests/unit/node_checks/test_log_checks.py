"""Whether the logs of devices will be there when they are needed."""

from __future__ import annotations

import pytest

from perdure.training.environment import check_environment
from perdure.training.errors import InputError
from perdure.training.node_checks.host import check_logs
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job


def test_as_recommended_they_are_fine_whatever_level_the_node_has():
    check = check_logs(small_job(), {"ASCEND_GLOBAL_LOG_LEVEL": "0"})
    assert check.outcome is CheckOutcome.OK
    assert check.seen == "level 3 (error), collected after each attempt"


@pytest.mark.parametrize(
    ("node", "sections", "words"),
    [
        ({}, {"env": {"ASCEND_GLOBAL_LOG_LEVEL": "4"}}, "writes no log"),
        ({}, {"env": {"ASCEND_GLOBAL_LOG_LEVEL": "1"}}, "slows every step"),
        ({}, {"env": {"ASCEND_SLOG_PRINT_TO_STDOUT": "1"}}, "writes no file"),
        ({"ASCEND_SLOG_PRINT_TO_STDOUT": "1"}, {}, "writes no file"),
        ({"ASCEND_PROCESS_LOG_PATH": "logs"}, {}, "not absolute"),
        ({}, {"watch": {"log_limit_bytes": 0}}, "collects none"),
    ],
)
def test_logs_that_would_be_missing_are_warned_of(node, sections, words):
    check = check_logs(small_job(**sections), node)
    assert check.outcome is CheckOutcome.WARNING
    assert words in check.seen


@pytest.mark.parametrize(
    ("node", "own"),
    [
        ({"ASCEND_PROCESS_LOG_PATH": "/logs"}, {}),
        ({"ASCEND_SLOG_PRINT_TO_STDOUT": "1"}, {"ASCEND_SLOG_PRINT_TO_STDOUT": "0"}),
        ({}, {"ASCEND_GLOBAL_LOG_LEVEL": "2"}),
    ],
)
def test_what_is_collected_all_the_same_is_no_warning(node, own):
    assert check_logs(small_job(env=own), node).outcome is CheckOutcome.OK


def test_whether_logs_are_printed_is_0_or_1():
    with pytest.raises(InputError, match=r"ASCEND_SLOG_PRINT_TO_STDOUT.*0 to 1"):
        check_environment(small_job(env={"ASCEND_SLOG_PRINT_TO_STDOUT": "yes"}))
