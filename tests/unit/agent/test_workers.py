"""The worker group, driven by hand where the agent's loop would hide the moment that matters."""

from __future__ import annotations

import os

import pytest

from tests.waiting import wait_for
from training.agent.error_file import read_error


def test_a_worker_that_ended_just_before_the_order_to_stop_was_not_stopped(new_group):
    group = new_group("sh", "-c", "exit 3", is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    (status,) = group.statuses()
    os.waitid(os.P_PID, status.pid, os.WEXITED | os.WNOWAIT)  # ended, and the agent has not noticed
    group.stop(5)
    wait_for(group.poll)
    (status,) = group.statuses()
    assert (status.exit_code, status.stopped_by_agent) == (3, False)
    assert status.ended_s is not None


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (None, {}),
        ("", {}),
        ("no json", {}),
        ("[1]", {}),
        ("{}", {}),
        ('{"message": [1]}', {}),
        ('{"message": {"message": "x", "extraInfo": null}}', {}),
        ('{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}', {}),
        ('{"message": "Oops: no"}', {"message": "Oops: no"}),
        (r'{"message": "  Oops: no\nsecond line\n"}', {"message": "Oops: no"}),
    ],
)
def test_an_error_file_holds_a_message_with_or_without_its_time_or_nothing_at_all(
    tmp_path, document, found
):
    path = tmp_path / "error.json"
    if document is not None:
        path.write_text(document)
    assert read_error(path) == found
