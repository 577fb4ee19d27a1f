"""The worker group, driven by hand where the agent's loop would hide the moment that matters."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import wait_for
from training.agent.workers import WorkerGroup, _read_error
from training.wire.agent import WorkerStatus


def start(group: WorkerGroup) -> None:
    group.start({**os.environ, "RANK": "7"}, proc_start_cnt=1)


def end(group: WorkerGroup) -> tuple[WorkerStatus, ...]:
    """Let it come to its end."""
    wait_for(group.poll)
    return group.statuses()


def test_the_ranks_of_a_session_job_know_their_place_and_have_logs_of_their_own(new_group):
    group = new_group("env")
    assert list(group.planned_ranks) == [2, 3]
    start(group)
    assert [(w.rank, w.local_rank, w.exit_code) for w in end(group)] == [(2, 0, 0), (3, 1, 0)]
    for rank in (2, 3):
        lines = group.log_path(rank, "stdout").read_text().splitlines()
        seen = dict(line.partition("=")[::2] for line in lines)
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank - 2))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (seen["NODE_RANK"], seen["GROUP_RANK"]) == ("1", "1")
        assert seen["PERDURE_HEARTBEAT"].endswith(f"heartbeat-{rank - 2}")


def test_the_peers_of_a_failed_worker_are_stopped_and_not_blamed(new_group):
    group = new_group("sh", "-c", 'if [ "$LOCAL_RANK" = 0 ]; then exit 9; fi; sleep 600')
    start(group)
    first, second = end(group)
    assert (first.exit_code, first.stopped_by_agent) == (9, False)
    assert (second.exit_code, second.stopped_by_agent) == (-signal.SIGTERM, True)


def test_a_worker_that_ended_just_before_the_order_to_stop_was_not_stopped(new_group):
    group = new_group("sh", "-c", "exit 3", is_command=True)
    start(group)
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
    assert _read_error(path) == found
