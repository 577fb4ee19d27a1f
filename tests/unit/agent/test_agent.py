"""A real agent: what its workers get, and what is left when it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.errors import TimedOut
from perdure.training.agent.checkpoint_server import REVIVED_AFTER_S, CheckpointServerProcess
from perdure.training.agent.control import ADDRESS_FILE, TERMINATED_FILE
from perdure.training.commands.arguments import NAMES_IN_ARGUMENTS
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.platforms.forms import GRACE
from perdure.training.processes import is_alive, kill_container
from perdure.training.wire.agent import (
    MetricsQuery,
    RendezvousOrder,
    ShutdownOrder,
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.logs import LogPiece, ReadLogsQuery
from tests.jobs import small_job
from tests.unit.agent.conftest import EPOCH, Container, agent_job
from tests.waiting import BEYOND_A_TEST_S, PATIENCE_S, wait_for

# A grandchild that left the session of its parent and does not listen to SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""  # noqa: E501
# A worker that ends on SIGTERM, and a helper of it that notes SIGTERM and ends then, not before.
HELPED = """
(trap 'echo swept; exit 0' TERM; echo up; while :; do sleep 0.02; done) &
trap 'exit 75' TERM
while :; do sleep 0.02; done
"""
BEATING = """
import pathlib, os, time
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
writer = HeartbeatWriter(pathlib.Path(os.environ["PERDURE_HEARTBEAT"]))
for step in range(5, 8):
    writer.beat(phase=Phase.STEP, step=step)
time.sleep(600)
"""
SAVING = "trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.02; done"
STDOUT = "command-00001.stdout.log"
STDERR = "command-00001.stderr.log"


def variables(container: Container, name: str = STDOUT) -> dict[str, str]:
    lines = container.logs()[name].splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def until_logged(container: Container, text: str, name: str = STDOUT) -> None:
    wait_for(lambda: text in container.logs().get(name, ""))


def test_a_command_gets_the_platforms_variables_and_is_no_rank(shared):
    shared.finish("env", variables={"HCCL_BUFFSIZE": "200", "MY_OWN": "x y"})
    environment = variables(shared)
    expected = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "MA_NUM_HOSTS": "2",
        "MA_NUM_GPUS": "2",
        "MA_CURRENT_IP": "127.0.0.2",
        "MA_SCHEDULE_CNT": "3",
        "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS": "-1",
        "VC_TASK_INDEX": "1",
        "VC_WORKER_NUM": "2",
        "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.2",
        "NODE_RANK": "1",
        "PERDURE_RUN_ID": "run-1",
        "PERDURE_NODE": "node-1",
        "PERDURE_PLACEMENT": "3",
        "PERDURE_CONTAINER": shared.marker,
        "HCCL_BUFFSIZE": "200",
        "MY_OWN": "x y",
    }
    assert {name: environment.get(name) for name in expected} == expected
    # The agent itself was started with these: they belong to another program.
    assert environment.keys().isdisjoint({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})


def test_every_start_of_processes_is_counted_and_the_schedule_count_stays(shared):
    first = int(shared.status().proc_start_cnt)
    for count in (first + 1, first + 2):
        assert shared.finish("env").proc_start_cnt == count
        environment = variables(shared)
        assert (environment["MA_PROC_START_CNT"], environment["MA_SCHEDULE_CNT"]) == (
            str(count),
            "3",
        )


def test_output_goes_to_a_log_for_each_stream_where_the_job_has_it(shared, tmp_path):
    script = "echo to-out; echo to-err >&2"
    order = shared.start("sh", "-c", script, log_path=str(tmp_path / "logs"))
    shared.until("ended")
    assert shared.logs() == {STDOUT: "to-out\n", STDERR: "to-err\n"}
    path = tmp_path / "logs" / "run-1" / f"p0003-a{order.attempt:04d}" / STDOUT
    assert path.read_text() == "to-out\n"


def test_what_is_being_written_is_read_in_whole_lines_without_secrets(shared):
    script = "echo one; echo password=hunter2 >&2; echo two; printf hal; sleep 600"
    order = shared.start("sh", "-c", script)
    until_logged(shared, "hal")
    at = {"placement": order.placement, "attempt": order.attempt}

    def read(**query: Any) -> dict[str, LogPiece]:
        return {piece.name: piece for piece in shared.call(ReadLogsQuery(**query)).pieces}

    pieces = read()
    assert (pieces[STDOUT].text, pieces[STDERR].text) == ("one\ntwo\n", "password=***\n")
    assert (pieces[STDOUT].attempt, pieces[STDOUT].rank) == (order.attempt, None)
    offsets = {f"node-1/{piece.name}": piece.offset for piece in pieces.values()}
    assert [piece.text for piece in read(**at, offsets=offsets).values()] == ["", ""]
    assert read(file=STDOUT, tail_bytes=9)[STDOUT].text == "two\n", "the first line is not whole"
    assert read(file=STDOUT, **at, offsets={f"node-1/{STDOUT}": 4})[STDOUT].text == "two\n"
    assert read(placement=9, attempt=9, offsets=offsets)[STDOUT].text == "one\ntwo\n"
    assert read(rank=1) == {}, "of a command no rank is known"
    shared.call(StopOrder(grace_s=0))
    shared.until("ended")
    assert read(**at, offsets=offsets)[STDOUT].text == "hal", "there will be no more of it"


def test_variables_in_the_command_are_filled_in(shared):
    shared.finish("echo", "--nnodes=${MA_NUM_HOSTS}", "$VC_TASK_INDEX", "$(date)", "$$HOME")
    assert shared.logs()[STDOUT] == "--nnodes=2 1 $(date) $HOME\n"
    shared.finish("echo", "${NNODES} ${NODE_RANK} ${WORLD_SIZE}")
    assert shared.logs()[STDOUT] == "2 1 4\n"
    shared.finish("sh", "-c", 'for i in a b; do echo "$i $NNODES"; done')
    assert shared.logs()[STDOUT] == "a 2\nb 2\n", "what the shell sets is its own"


def test_a_name_in_the_command_that_nothing_sets_is_an_error(shared):
    status = shared.finish("echo", "--nnodes=${MA_NUM_NODES}")
    assert [worker.exit_code for worker in status.workers] == [127]
    assert "${MA_NUM_NODES} is set by nothing; did you mean ${MA_NUM_" in shared.logs()[STDERR]


def test_every_variable_that_a_command_gets_may_be_named_in_its_arguments(shared):
    shared.finish("env")
    job_names = {"OMP_NUM_THREADS"}  # of the order
    assert variables(shared).keys() - os.environ.keys() - job_names <= NAMES_IN_ARGUMENTS


def test_cann_writes_its_log_beside_the_ranks_own_or_below_the_folder_of_the_job(shared):
    shared.finish("env")
    environment = variables(shared)
    folder = Path(environment["TORCHELASTIC_ERROR_FILE"]).parent
    assert environment["ASCEND_PROCESS_LOG_PATH"] == f"{folder}/command-00001.ascend"
    shared.finish("env", variables={"ASCEND_PROCESS_LOG_PATH": "/own"})
    rank_folder = Path(variables(shared)["ASCEND_PROCESS_LOG_PATH"])
    assert rank_folder.is_relative_to("/own"), "a folder of its own for each rank of each attempt"
    assert rank_folder.name == "command-00001"


def test_the_end_of_a_worker_is_reported_with_its_exit_code_and_its_error(shared, tmp_path):
    recorded = {"message": "ValueError: bad\nmore", "extraInfo": {"timestamp": "9"}}
    (tmp_path / "error.json").write_text(json.dumps({"message": recorded}))
    script = f"cp {tmp_path}/error.json $TORCHELASTIC_ERROR_FILE; exit 3"
    before_s = time.time()
    (worker,) = shared.finish("sh", "-c", script).workers
    assert (worker.error, worker.error_s) == ("ValueError: bad", 9.0)
    assert (worker.rank, worker.exit_code, worker.stopped_by_agent) == (1, 3, False)
    assert worker.ended_s is not None
    assert before_s < worker.ended_s <= time.time()


def test_a_command_or_a_folder_that_is_not_there_ends_as_in_a_shell(shared, tmp_path):
    assert shared.finish("no-such-program").workers[0].exit_code == 127
    assert "perdure: cannot start 'no-such-program'" in shared.logs()[STDERR]
    assert shared.finish("true", cwd=str(tmp_path / "gone")).workers[0].exit_code == 127


def test_logs_that_cannot_be_written_end_the_attempt_with_an_error(shared, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    status = shared.finish("true", log_path=str(tmp_path / "file"))
    assert status.staging_error is not None
    assert "file" in status.staging_error
    assert [process.pid for process in shared.processes()] == [shared.process.pid]
    assert shared.finish("true").staging_error is None


def checkpoint_servers(container: Container) -> list[int]:
    """Pids of the checkpoint server, once it is ready."""
    log = container.folder / "checkpoint-server.log"
    wait_for(lambda: log.exists() and "checkpoint server is ready" in log.read_text())
    return [
        process.pid
        for process in container.processes()
        if "perdure.training.agent.checkpoint_server" in process.cmdline()
    ]


@pytest.fixture
def with_checkpoint_server(new_container, tmp_path) -> Container:
    """A container with a checkpoint server, and an attempt in it that failed to start."""
    job = small_job(tmp_path, run_id=f"run-{uuid.uuid4().hex}")
    (tmp_path / "file").write_text("not a folder")
    container = new_container()
    changes = {"is_command": False, "job": job, "log_path": str(tmp_path / "file")}
    assert container.finish("true", **changes).staging_error is not None
    return container


def test_an_attempt_that_cannot_be_started_costs_the_checkpoint_server_nothing(
    with_checkpoint_server,
):
    (pid,) = checkpoint_servers(with_checkpoint_server)
    assert psutil.Process(pid).ppid() == with_checkpoint_server.process.pid
    with_checkpoint_server.call(ShutdownOrder(grace_s=60))
    assert with_checkpoint_server.process.wait(240) == 0
    assert with_checkpoint_server.processes() == []


def test_a_checkpoint_server_that_dies_is_started_again_under_its_name_but_not_at_once(tmp_path):
    job = small_job(tmp_path, run_id=f"run-{uuid.uuid4().hex}")
    job_file = tmp_path / "job.json"
    job_file.write_text(job.model_dump_json())
    checkpoint_server = CheckpointServerProcess(tmp_path)
    assert not checkpoint_server.revive(now_s=time.monotonic()), "there was none"
    before_s = time.monotonic()
    name = checkpoint_server.ensure(job, job_file, None, first_container=1)
    client = CheckpointClient(name)
    assert client.shares() == ()
    later_s = time.monotonic() + REVIVED_AFTER_S
    assert not checkpoint_server.revive(now_s=later_s), "it lives"
    (first,) = checkpoint_server.pids
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert not checkpoint_server.revive(now_s=before_s)
    assert checkpoint_server.revive(now_s=later_s)
    try:
        with pytest.raises(TimedOut, match="the checkpoint server of this node does not answer"):
            client.shares()
        assert client.shares() == ()
        assert checkpoint_server.pids != {first}
    finally:
        checkpoint_server.close(5)


def test_a_checkpoint_server_whose_agent_was_killed_ends(with_checkpoint_server):
    (pid,) = checkpoint_servers(with_checkpoint_server)
    with_checkpoint_server.process.kill()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_a_repeated_start_order_starts_nothing_also_after_a_stop(shared):
    order = shared.start("sleep", "600")
    running = shared.until("running")
    shared.call(order)
    second = shared.status()
    assert second.proc_start_cnt == running.proc_start_cnt
    assert [w.pid for w in second.workers] == [w.pid for w in running.workers]
    with pytest.raises(EngineError, match=f"attempt {order.attempt} is still running"):
        shared.call(shared.order("true"))
    shared.call(StopOrder(grace_s=60))
    (worker,) = shared.until("ended").workers
    assert (worker.exit_code, worker.stopped_by_agent) == (-signal.SIGTERM, True)
    shared.call(order)
    assert shared.status().state == "ended"


@pytest.mark.parametrize("graces_s", [(0.3,), (600, 0.1, 600)])
def test_a_worker_that_ignores_sigterm_is_killed_after_the_shortest_grace_period(shared, graces_s):
    shared.start("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.02; done")
    until_logged(shared, "up")
    for grace_s in graces_s:
        shared.call(StopOrder(grace_s=grace_s))
        assert shared.status().state == "stopping"
    assert shared.until("ended").workers[0].exit_code == -signal.SIGKILL


LASTING = "trap 'echo asked' TERM; echo up; while :; do sleep 0.02; echo lives; done"


def test_without_a_forced_end_a_worker_lives_until_another_order_comes(shared):
    shared.start("sh", "-c", LASTING, failover_grace_s=-1, grace_s=0.1)
    until_logged(shared, "up")
    shared.call(StopOrder(grace_s=-1))
    until_logged(shared, "asked\n" + "lives\n" * 50)  # ten times the grace period at least
    assert shared.status().state == "stopping"
    shared.call(StopOrder(grace_s=0))
    assert shared.until("ended").workers[0].exit_code == -signal.SIGKILL


def test_without_a_forced_end_what_outlives_the_workers_is_gone(shared):
    shared.start(sys.executable, "-c", STUBBORN, failover_grace_s=-1, grace_s=0.1)
    until_logged(shared, "up")
    shared.call(StopOrder(grace_s=-1))
    shared.until("ended")
    assert [process.pid for process in shared.processes()] == [shared.process.pid]


def test_a_stubborn_grandchild_in_a_session_of_its_own_is_gone_after_stop(shared):
    shared.start(sys.executable, "-c", STUBBORN)
    until_logged(shared, "up")
    assert len(shared.processes()) == 3
    shared.call(StopOrder(grace_s=0.3))
    shared.until("ended")
    assert [process.pid for process in shared.processes()] == [shared.process.pid]


def test_what_outlives_a_stopped_worker_is_asked_to_end_before_the_grace_period_is_over(shared):
    shared.start("sh", "-c", HELPED)
    until_logged(shared, "up")
    shared.call(StopOrder(grace_s=BEYOND_A_TEST_S))
    (worker,) = shared.until("ended").workers
    assert worker.exit_code == 75
    assert "swept" in shared.logs()[STDOUT]


@pytest.mark.parametrize("prefix", ["", "env -i "])
def test_what_a_worker_leaves_behind_is_gone_when_the_attempt_is_over(shared, prefix):
    shared.finish("sh", "-c", f"{prefix}setsid sleep 600 & sleep 0.2; exit 3")
    assert [process.pid for process in shared.processes()] == [shared.process.pid]
    assert psutil.Process(shared.process.pid).children(recursive=True) == []


def test_step_records_are_handed_out_in_whole_lines(shared):
    script = r"printf 'one\ntwo\nhal' >> $PERDURE_METRICS; sleep 600"
    assert shared.call(MetricsQuery(offset=0)).text == ""
    shared.start("sh", "-c", script)
    reply = wait_for(lambda: (r := shared.call(MetricsQuery(offset=0))).text and r)
    assert (reply.text, reply.offset) == ("one\ntwo\n", 8)
    second = shared.call(MetricsQuery(offset=4))
    assert (second.text, second.offset) == ("two\n", 8)
    assert shared.call(MetricsQuery(offset=8)).text == ""


def test_a_start_that_was_stopped_while_its_data_came_does_not_touch_the_next_one(shared):
    with socket.create_server(("127.0.0.1", 0)) as store:  # takes as long as the test likes
        endpoint = f"http://127.0.0.1:{store.getsockname()[1]}"
        job = agent_job(storage={"address": "s3://bucket", "endpoint": endpoint})
        shared.start("true", job=job, data_manifest_key="data/manifest.json")
        store.settimeout(PATIENCE_S)
        connection, _ = store.accept()
        assert connection.recv(1)
        assert shared.status().state == "staging"
        shared.call(StopOrder(grace_s=1))
        assert shared.status().state == "ended"
        shared.start("sleep", "600")
        running = shared.until("running")
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        connection.close()
    with pytest.raises(AssertionError):
        wait_for(
            lambda: (now := shared.status()).state != "running" or now.workers != running.workers,
            timeout_s=0.2,
        )
    shared.call(StopOrder(grace_s=1))
    assert shared.until("ended").staging_error is None


def test_data_that_cannot_be_staged_ends_the_attempt_with_an_error(shared, tmp_path):
    status = shared.finish("true", job=agent_job(tmp_path), data_manifest_key="no/such.json")
    assert status.staging_error is not None
    assert "no/such.json" in status.staging_error
    assert status.workers == ()


def test_the_rendezvous_of_a_command_is_a_free_port_or_the_one_asked_for(shared):
    start = shared.order("true")
    order = RendezvousOrder(port=0, start=start, supported=())
    reply = shared.call(order)
    assert reply.port is not None
    assert reply.port > 1023
    assert reply.coordinator is None
    assert shared.call(order).port == reply.port, "repeated for the same attempt"
    other = RendezvousOrder(port=29000, start=shared.order("true"), supported=())
    assert shared.call(other).port == 29000


def test_a_command_whose_port_is_still_held_gets_another_one(shared):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        order = RendezvousOrder(port=port, start=shared.order("true"), supported=())
        fresh = shared.call(order).port
        assert fresh not in (None, port)
        assert shared.call(order).port == fresh, "repeated for the same attempt"


def test_a_silent_rank_is_reported_as_a_hang(new_container):
    container = new_container(hang_timeout_s=1.0)
    container.start("env", "RANK=5", "LOCAL_RANK=1", sys.executable, "-c", BEATING)
    hang = wait_for(lambda: container.status().hang)
    assert (hang.rank, hang.phase, hang.step, hang.limit_s) == (5, "step", 7, 1.0)
    assert hang.silent_s > 1.0
    status = container.status()
    (launcher,), (rank,) = status.workers, status.ranks
    assert (rank.rank, rank.local_rank, rank.pid) == (5, 1, launcher.pid)
    assert (rank.step, rank.phase, rank.exit_code) == (7, "step", None)
    assert (launcher.rank, launcher.step) == (1, None), "the index of the node, and no step"


def test_a_superseded_supervisor_is_refused(shared):
    previous = shared.status()
    for order in (shared.order("true"), StopOrder(grace_s=0), StatusQuery()):
        with pytest.raises(EngineError, match=f"epoch {EPOCH - 1} is superseded by {EPOCH}"):
            shared.client(epoch=EPOCH - 1).call(order)
    assert shared.status() == previous


def test_a_stranger_cannot_supersede_the_supervisor(shared):
    with pytest.raises(AgentUnreachable, match="wrong token"):
        shared.client(token="other", epoch=EPOCH + 1).call(StatusQuery())
    assert shared.client(epoch=EPOCH).call(StatusQuery()).status is not None


def test_a_shutdown_ends_the_workers_and_the_agent(new_container):
    container = new_container()
    address = container.address
    container.start("sleep", "600")
    container.until("running")
    container.call(ShutdownOrder(grace_s=1))
    assert container.process.wait(240) == 0
    assert container.processes() == []
    assert not (container.folder / ADDRESS_FILE).exists()
    assert not is_alive(address.pid, address.process_started_s)


def test_an_agent_without_a_supervisor_stops_its_workers_and_ends(new_container):
    container = new_container(orphan_timeout_s=3.0)
    container.start(sys.executable, "-c", STUBBORN, grace_s=0.2)
    assert container.process.wait(240) == 0
    assert container.processes() == []


def test_an_agent_that_is_asked_to_end_stops_its_workers_first(new_container):
    container = new_container()
    container.start("sh", "-c", SAVING, grace_s=60)
    until_logged(container, "up")
    (log,) = container.folder.glob(f"attempts/*/{STDOUT}")
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(240) == 0
    assert container.processes() == []
    assert log.read_text() == "up\nsaved\n"


def test_an_agent_whose_container_goes_away_ends_its_workers_before_the_volumes_do(new_container):
    container = new_container({GRACE: "0"})
    container.start("sh", "-c", LASTING, grace_s=BEYOND_A_TEST_S)
    until_logged(container, "up")
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(240) == 0


def test_an_agent_that_is_asked_to_end_says_so_until_its_workers_have_saved(new_container):
    container = new_container()
    container.start("sh", "-c", SAVING, grace_s=60)
    until_logged(container, "up")
    assert not container.status().is_terminated
    container.process.send_signal(signal.SIGTERM)
    wait_for((container.folder / TERMINATED_FILE).exists)
    with suppress(AgentUnreachable):  # it may have ended by now
        assert container.status().is_terminated
    assert container.process.wait(240) == 0
    assert (container.folder / TERMINATED_FILE).exists(), "for who comes later"


def test_killing_a_container_leaves_nothing_of_it_and_everything_else(new_container, shared):
    container = new_container()
    address = container.address
    container.start(sys.executable, "-c", STUBBORN)
    until_logged(container, "up")
    assert kill_container(container.marker)
    assert container.processes() == []
    assert not is_alive(address.pid, address.process_started_s)
    assert kill_container(container.marker)
    with pytest.raises(AgentUnreachable):
        container.client().call(StatusQuery())
    assert shared.status().node == "node-1"


def test_what_is_spared_outlives_the_rest_of_its_container(new_container):
    container = new_container()
    container.start("sleep", "600")
    container.until("running")
    assert kill_container(container.marker, spare={container.address.pid})
    assert [process.pid for process in container.processes()] == [container.address.pid]


def test_the_address_of_an_agent_is_published_whole_and_a_reused_pid_is_not_its_process(shared):
    assert not (shared.folder / f"{ADDRESS_FILE}.tmp").exists()
    address = shared.address
    assert address.pid == shared.process.pid
    assert is_alive(address.pid, address.process_started_s)
    assert not is_alive(address.pid, address.process_started_s - 60)
