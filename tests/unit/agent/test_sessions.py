"""A real agent with a session program: workers from a fork server, and a coordinator."""

from __future__ import annotations

import json
import signal
import socket

import psutil
import pytest

from perdure.training.wire.agent import RendezvousOrder, ShutdownOrder, StartOrder, StopOrder
from perdure.training.wire.coordinator import WorkerJoined
from perdure.training.wire.transport import dump_line
from tests.unit.agent.conftest import Container, agent_job, end_container, start_container
from tests.waiting import wait_for

FORK_SERVER_TIMEOUT_S = 240.0  # it imports torch, on a machine that may have much else to do
RECIPE = """
import json, os, sys, time
from pathlib import Path
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.runtime.session import Session

def main(job):
    print(json.dumps(dict(os.environ)), flush=True)
    todo = job.env["TODO"]
    if todo == "fail" and os.environ["LOCAL_RANK"] == "0":
        raise ValueError("own")
    if todo != "end":
        print("up", flush=True)
        time.sleep(600)
    # As a loop over all steps that has come to its end.
    HeartbeatWriter(Path(os.environ["PERDURE_HEARTBEAT"])).beat(phase=Phase.DONE, step=job.steps)
    Session.ended_at = job.steps
"""


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """One agent for all tests here, with the recipe where its workers start."""
    folder = tmp_path_factory.mktemp("agent") / "container"
    container = start_container(folder, {"RANK": "7"})  # of another program
    (folder / "own.py").write_text(RECIPE)
    container.call(order(container, "end"))
    wait_for(lambda: container.status().is_over, timeout_s=FORK_SERVER_TIMEOUT_S)
    yield container
    end_container(container)


@pytest.fixture
def shared(container):
    """The agent; nothing runs in it when a test begins."""
    yield container
    if not container.status().is_over:
        container.call(StopOrder(grace_s=0))
        container.until("ended")


def order(container: Container, todo: str) -> StartOrder:
    job = agent_job(
        worker={"recipe": "own:main"},
        engine={"nodes": 2, "slots_per_node": 2},
        batch={"global_batch_size": 8, "micro_batch_size": 1},
        env={"TODO": todo},
    )
    return container.order("unused", is_command=False, job=job)


def names(container: Container) -> list[str]:
    """Of the container's processes beside its agent."""
    agent_pid = container.process.pid
    return sorted(process.name() for process in container.processes() if process.pid != agent_pid)


def until_up(container: Container) -> None:
    wait_for(lambda: sum("up\n" in text for text in container.logs().values()) == 2)


def start_coordinated(container: Container) -> None:
    """Start workers that stay, with a coordinator on their node."""
    start = order(container, "stay")
    address = container.call(RendezvousOrder(port=0, start=start, supported=())).coordinator
    container.call(start.model_copy(update={"coordinator": address}))
    until_up(container)


def test_workers_are_named_after_their_ranks_and_know_their_place(shared):
    shared.call(order(shared, "stay"))
    until_up(shared)
    assert names(shared)[1:] == ["rank-2", "rank-3"]
    for rank in (2, 3):
        place = json.loads(shared.logs()[f"rank-{rank:05d}.stdout.log"].splitlines()[0])
        assert (place["RANK"], place["LOCAL_RANK"]) == (str(rank), str(rank - 2))
        assert (place["WORLD_SIZE"], place["MA_SCHEDULE_CNT"]) == ("4", "3")
        assert (place["OMP_NUM_THREADS"], place["PERDURE_RUN_ID"]) == ("1", "run-1")
        assert (place["LOCAL_WORLD_SIZE"], place["NODE_RANK"], place["GROUP_RANK"]) == (
            "2",
            "1",
            "1",
        )
        assert place["PERDURE_HEARTBEAT"].endswith(f"heartbeat-{rank - 2}")
    shared.call(StopOrder(grace_s=60))
    status = shared.until("ended")
    assert [w.exit_code for w in status.workers] == [-signal.SIGTERM, -signal.SIGTERM]


def test_a_worker_that_ends_well_leaves_the_fork_server_for_the_next_attempt(shared):
    fork_servers = []
    for _ in range(2):
        shared.call(order(shared, "end"))
        status = shared.until("ended")
        assert [(w.rank, w.local_rank, w.exit_code) for w in status.workers] == [
            (2, 0, 0),
            (3, 1, 0),
        ]
        fork_servers.append([process.pid for process in shared.processes()])
    assert fork_servers[0] == fork_servers[1]
    assert len(fork_servers[0]) == 2


def test_an_exception_is_reported_and_ends_the_others_where_no_coordinator_answers(shared):
    shared.call(order(shared, "fail"))
    first, second = shared.until("ended").workers
    assert (first.exit_code, first.error, first.stopped_by_agent) == (1, "ValueError: own", False)
    assert (second.exit_code, second.stopped_by_agent) == (-signal.SIGTERM, True)


def test_a_rendezvous_is_a_coordinator_and_ends_with_its_attempt(shared):
    start = order(shared, "stay")
    wanted = RendezvousOrder(port=0, start=start, supported=())
    reply = shared.call(wanted)
    assert shared.call(wanted) == reply, "repeated for the same attempt"
    address = reply.coordinator
    assert address is not None
    assert names(shared)[0] == "coordinator"
    with socket.create_connection((address.host, address.port), timeout=240) as line:
        line.sendall(dump_line(WorkerJoined(token="wrong", rank=2, pid=1)))
        assert line.recv(1) == b"", "a stranger is hung up on"
    shared.call(start.model_copy(update={"coordinator": address}))
    until_up(shared)
    shared.call(StopOrder(grace_s=60))
    shared.until("ended")
    assert "coordinator" not in names(shared)


def test_a_rank_that_is_killed_is_replaced_as_the_coordinator_says_or_ends_the_attempt(shared):
    # Its ranks never train: the coordinator gives the attempt up.
    start_coordinated(shared)
    (victim,) = [process for process in shared.processes() if process.name() == "rank-3"]
    victim.kill()
    status = shared.until("ended")
    assert [(w.exit_code, w.stopped_by_agent) for w in status.workers] == [
        (-signal.SIGTERM, True),
        (-signal.SIGKILL, False),
    ]


def test_a_shutdown_leaves_nothing_of_a_session_program(container):
    # The last one here, for it ends the agent of the others: a fork server takes seconds to start.
    start_coordinated(container)
    children = psutil.Process(container.process.pid).children(recursive=True)
    assert len(children) == 4
    container.call(ShutdownOrder(grace_s=1))
    assert container.process.wait(240) == 0
    assert container.processes() == []
    assert not any(child.is_running() for child in children)
