"""The worker group, driven by hand where the agent's loop would hide the moment that matters."""

from __future__ import annotations

import os

import pytest

from tests.unit.agent.conftest import TOKEN, wait_for
from training.agent.protocol import AgentConfig, StartOrder
from training.agent.workers import WorkerGroup, _read_error


@pytest.fixture
def group(tmp_path):
    config = AgentConfig(
        run_id="run-1",
        node="node-0",
        member=0,
        schedule_cnt=1,
        token=TOKEN,
        epoch=1,
        orphan_timeout_s=60,
        start_timeout_s=60,
        hang_timeout_s=None,
        detect_hangs=False,
    )
    order = StartOrder(
        placement=1,
        attempt=1,
        num_nodes=1,
        slots_per_node=1,
        hosts=("127.0.0.1",),
        master_addr="127.0.0.1",
        master_port=29511,
        command=("sh", "-c", "exit 3"),
        is_command=True,
        cwd=str(tmp_path),
        grace_s=5,
        log_path=None,
        variables={},
        job="{}",
        data_manifest_key=None,
    )
    return WorkerGroup(config, order, str(tmp_path), tmp_path, tmp_path)


def test_a_worker_that_ended_just_before_the_order_to_stop_was_not_stopped(group):
    group.start(dict(os.environ), proc_start_cnt=1)
    (status,) = group.statuses()
    os.waitid(os.P_PID, status.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has noticed
    group.stop(5)
    wait_for(group.poll)
    (status,) = group.statuses()
    assert (status.exit_code, status.stopped_by_agent) == (3, False)
    assert status.ended_s is not None


@pytest.mark.parametrize(
    "document",
    [
        "",
        "no json",
        "[1]",
        "{}",
        '{"message": [1]}',
        '{"message": {"message": "x", "extraInfo": null}}',
        '{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}',
    ],
)
def test_an_error_file_that_makes_no_sense_says_nothing(tmp_path, document):
    path = tmp_path / "error.json"
    assert _read_error(path) == {}
    path.write_text(document)
    assert _read_error(path) == {}


@pytest.mark.parametrize("text", ["Oops: no", "  Oops: no\nsecond line\n"])
def test_an_error_file_may_hold_the_message_alone(tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(f'{{"message": {text!r}}}'.replace("'", '"'))
    assert _read_error(path) == {"message": "Oops: no"}
