"""The scheduler that an agent starts beside MindSpore's ranks."""

from __future__ import annotations

import os

import pytest

from perdure.training.agent.mindspore_scheduler import MindSporeScheduler, cluster_variables
from tests.waiting import wait_for

RANK = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node-0",
    "MASTER_PORT": "4242", "PERDURE_HEARTBEAT": "/nowhere",
}  # fmt: skip


def test_a_rank_gets_the_variables_that_msrun_would_set():
    assert cluster_variables(RANK) == {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": "5",
        "MS_WORKER_NUM": "8",
        "MS_SCHED_HOST": "node-0",
        "MS_SCHED_PORT": "4242",
        "MS_TOPO_TIMEOUT": "600",
        "RANK_ID": "5",
        "RANK_SIZE": "8",
        "DEVICE_ID": "1",
    }


def test_a_time_limit_of_the_job_stays():
    assert cluster_variables({**RANK, "MS_TOPO_TIMEOUT": "60"})["MS_TOPO_TIMEOUT"] == "60"


def start(folder, script: str) -> MindSporeScheduler:
    variables = {**os.environ, **RANK, **cluster_variables(RANK)}
    command = ("/bin/sh", "-c", script)
    return MindSporeScheduler.start(
        command, variables, cwd=str(folder), log=folder / "logs" / "scheduler.log"
    )


def test_it_is_no_rank_and_has_a_log_of_its_own(tmp_path):
    shown = "echo $MS_ROLE $MS_SCHED_PORT rank=$RANK id=$RANK_ID beat=$PERDURE_HEARTBEAT"
    scheduler = start(tmp_path, shown)
    wait_for(lambda: scheduler.process.poll() is not None)
    assert scheduler.log.read_text() == "MS_SCHED 4242 rank= id= beat=\n"
    assert not scheduler.has_failed


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$", "kill -15 $$"])
def test_an_end_that_leaves_ranks_behind_is_a_failure(tmp_path, script):
    scheduler = start(tmp_path, script)
    wait_for(lambda: scheduler.has_failed)


def test_it_is_ended_behind_the_last_rank(tmp_path):
    scheduler = start(tmp_path, "exec sleep 600")
    assert not scheduler.has_failed
    scheduler.end()
    assert scheduler.process.returncode == -9
