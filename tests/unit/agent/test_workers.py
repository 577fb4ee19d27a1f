"""The worker group, driven by hand where the agent's loop would hide the moment that matters."""

from __future__ import annotations

import os

import pytest

from perdure.training.agent.worker_process import read_error
from perdure.training.config.job import parse_job
from perdure.training.errors import InputError
from perdure.training.processes import MARKER, environment_of
from tests.jobs import job_document
from tests.waiting import wait_for


def test_a_worker_that_ended_just_before_the_order_to_stop_was_not_stopped(new_group):
    group = new_group("sh", "-c", "exit 3", is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    (status,) = group.statuses()
    os.waitid(os.P_PID, status.pid, os.WEXITED | os.WNOWAIT)  # ended, and the agent has not noticed
    group.stop(60)
    wait_for(group.poll)
    (status,) = group.statuses()
    assert (status.exit_code, status.stopped_by_agent) == (3, False)
    assert status.ended_s is not None


def test_a_command_that_is_started_once_per_device_knows_its_rank_as_torch_has_it(new_group):
    group = new_group("sleep", "60", is_command=True, is_launcher=False)
    group.start(dict(os.environ), proc_start_cnt=1)
    assert [(status.rank, status.local_rank) for status in group.statuses()] == [(2, 0), (3, 1)]
    assert [group.output.name(rank) for rank in group.ranks] == ["rank-00002", "rank-00003"]
    # Until it is sleep, it is a copy of this process.
    ranks = wait_for(lambda: len(r := group.command_statuses()) == 2 and r)
    assert [(status.rank, status.local_rank) for status in ranks] == [(2, 0), (3, 1)]
    assert [status.pid for status in ranks] == [status.pid for status in group.statuses()]
    environment = environment_of(ranks[1].pid)
    place = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
    assert [environment[name] for name in place] == ["3", "1", "4", "2", "1"]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29511")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment, "rank 0 opens the store itself"


def test_a_rank_table_is_there_before_the_processes_that_read_it(new_group, tmp_path):
    group = new_group("sh", "-c", "cp $$RANK_TABLE_FILE copy", is_command=True, rank_table="{}")
    group.start(dict(os.environ), proc_start_cnt=1)
    wait_for(group.poll)
    assert [status.exit_code for status in group.statuses()] == [0]
    assert (tmp_path / "copy").read_text() == "{}"


LASTING = (
    "trap 'echo asked >>log' TERM; until [ -e end ]; do sleep 0.02; echo lives >>log; done; exit 4"
)


@pytest.mark.parametrize("failover_grace_s", [-1, 60])
def test_a_worker_whose_peer_has_failed_has_the_time_that_the_job_gives(
    new_group, tmp_path, failover_grace_s
):
    log, script = tmp_path / "log", f"[ $LOCAL_RANK = 0 ] && exit 3; {LASTING}"
    group = new_group("sh", "-c", script, grace_s=0.1, failover_grace_s=failover_grace_s)
    group.start({**os.environ, MARKER: str(tmp_path)}, proc_start_cnt=1)  # so it can be killed

    def lives_on() -> bool:
        """It was asked to end ten grace periods of a request to stop ago, at least."""
        assert not group.poll()
        return log.exists() and "asked\n" + "lives\n" * 50 in log.read_text()

    wait_for(lives_on)
    assert [status.exit_code for status in group.statuses()] == [3, None]
    (tmp_path / "end").touch()
    wait_for(group.poll)
    assert [status.exit_code for status in group.statuses()] == [3, 4]


@pytest.mark.parametrize(
    ("document", "error"),
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
    tmp_path, document, error
):
    path = tmp_path / "error.json"
    if document is not None:
        path.write_text(document)
    assert read_error(path) == error


@pytest.mark.parametrize("is_command", [True, False])
def test_a_variable_of_the_job_reaches_its_processes_or_is_refused(new_group, is_command):
    """The agent sets variables of its own, and some of them whatever the job has."""

    def environment(variables: dict[str, str]) -> dict[str, str]:
        group = new_group("sleep", "60", is_command=is_command, variables=variables)
        group.start({"PATH": os.environ["PATH"]}, proc_start_cnt=1)
        # Until it is sleep, it is a copy of this process.
        return wait_for(lambda: (e := environment_of(group.statuses()[0].pid)).get("MA_HOME") and e)

    of_agent = environment({}).keys() - {"PATH"}
    accepted = {name: "own" for name in of_agent if is_accepted(name)}
    assert "ASCEND_PROCESS_LOG_PATH" in accepted
    assert "MASTER_ADDR" in of_agent - accepted.keys()
    reached = environment(accepted)
    # Logs of ranks are kept apart below the folder that the job gives.
    assert reached.pop("ASCEND_PROCESS_LOG_PATH").startswith("own/")
    del accepted["ASCEND_PROCESS_LOG_PATH"]
    assert accepted.items() <= reached.items()


def is_accepted(name: str) -> bool:
    try:
        parse_job(job_document(None, env={name: "own"}))
    except InputError:
        return False
    return True
